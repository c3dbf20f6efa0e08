// x [rows, in] times a packed weight. Each output element is one chain of fused multiply-adds over k = 0, 1,
// ..., in - 1, whatever tile or thread it falls to, so a row's result does not depend on the other rows.
//
// Packed order: tiles of kTileColumns outputs, each [in][columns] in float32, or [in / 2][columns][2] in
// bfloat16 (two consecutive inputs side by side, as the dot-product instruction reads them). Padding is zero.
#include "linear.h"

#include <algorithm>

#include "packing.h"
#include "pairs.h"
#include "rows.h"
#include "simd.h"
#include "thread_pool.h"

namespace crossdock {
namespace {

constexpr size_t kPanelRows = 84 * kTileRows;  // bounds the scratch memory for rounded activations

template <class Element>
void pack(const Element* weight, size_t out, size_t in, size_t group, Element* packed) {
    const size_t in_padded = divide_up(in, group) * group;
    const size_t out_padded = divide_up(out, kTileColumns) * kTileColumns;
    prefer_huge_pages(packed, out_padded * in_padded * sizeof(Element));
    for (size_t n = 0; n < out_padded; ++n) {
        Element* tile = packed + n / kTileColumns * kTileColumns * in_padded;
        for (size_t k = 0; k < in_padded; ++k) {
            const size_t place = (k / group * kTileColumns + n % kTileColumns) * group + k % group;
            tile[place] = n < out && k < in ? weight[n * in + k] : Element{};
        }
    }
}

void round_row(const float* x, size_t in, Pair* rounded) {
    for (size_t i = 0; i < in / 2; ++i) rounded[i] = round_pair(x[2 * i], x[2 * i + 1]);
    if (in % 2) rounded[in / 2] = round_pair(x[in - 1], 0.0f);
}

// `count` elements of X in each row: floats, or pairs.
template <class X>
struct Matrix {
    const X* at;
    size_t count, stride;

    Matrix from_row(size_t row) const { return {at + row * stride, count, stride}; }
};

template <int Rows>
INLINE void accumulate_weights(Floats (&acc)[Rows][kTileVectors], const Matrix<float>& x, const float* tile) {
    accumulate(acc, x.at, x.stride, tile, kTileColumns, x.count);
}

template <int Rows>
INLINE void accumulate_weights(Floats (&acc)[Rows][kTileVectors], const Matrix<Pair>& x, const uint16_t* tile) {
    accumulate(acc, x.at, x.stride, reinterpret_cast<const Pair*>(tile), kTileColumns, x.count);
}

template <int Rows>
void store_tile(Floats (&acc)[Rows][kTileVectors], float* out, size_t out_stride, size_t columns) {
    UNROLL
    for (int r = 0; r < Rows; ++r) {
        float row[kTileColumns];
        float* to = columns == kTileColumns ? out + r * out_stride : row;
        UNROLL
        for (int v = 0; v < kTileVectors; ++v) store(to + v * kLanes, acc[r][v]);
        if (to == row) std::memcpy(out + r * out_stride, row, columns * sizeof(float));
    }
}

template <int Rows, class X, class Weight>
void multiply_tile(const Matrix<X>& x, const Weight* tile, const float* bias, float* out, size_t out_stride,
                   size_t columns) {
    Floats acc[Rows][kTileVectors];
    UNROLL
    for (int r = 0; r < Rows; ++r) {
        UNROLL
        for (int v = 0; v < kTileVectors; ++v) acc[r][v] = Floats{};
    }
    accumulate_weights<Rows>(acc, x, tile);
    if (bias) {
        UNROLL
        for (int r = 0; r < Rows; ++r) {
            UNROLL
            for (int v = 0; v < kTileVectors; ++v) acc[r][v] += load(bias + v * kLanes);
        }
    }
    store_tile<Rows>(acc, out, out_stride, columns);
}

template <class X, class Weight>
using MultiplyTile = void (*)(const Matrix<X>&, const Weight*, const float*, float*, size_t, size_t);

template <class X, class Weight>
void multiply_rows(ThreadPool& pool, const Linear& linear, const Matrix<X>& x, size_t rows, float* out) {
    static constexpr MultiplyTile<X, Weight> kernels[kTileRows] = {
        multiply_tile<1, X, Weight>, multiply_tile<2, X, Weight>, multiply_tile<3, X, Weight>,
        multiply_tile<4, X, Weight>, multiply_tile<5, X, Weight>, multiply_tile<6, X, Weight>};
    if (rows == 0) return;
    const auto* packed = static_cast<const Weight*>(linear.packed);
    const size_t out_features = linear.out;
    const size_t row_tiles = divide_up(rows, kTileRows);
    const size_t height = divide_up(rows, row_tiles);  // 8 rows are 4 + 4, not 6 + 2
    const size_t tile_size = x.count * sizeof(X) / sizeof(Weight) * kTileColumns;
    const size_t units = divide_up(out_features, kTileColumns) * row_tiles;
    const size_t grain = std::max<size_t>(1, (size_t{1} << 15) / (tile_size * height) + 1);
    pool.split(units, grain, [&](size_t begin, size_t end) {
        for (size_t unit = begin; unit < end; ++unit) {
            const size_t column = unit / row_tiles * kTileColumns;
            const size_t row = unit % row_tiles * height;
            kernels[std::min(height, rows - row) - 1](
                x.from_row(row), packed + column / kTileColumns * tile_size,
                linear.bias ? linear.bias + column : nullptr, out + row * out_features + column, out_features,
                std::min<size_t>(kTileColumns, out_features - column));
        }
    });
}

}  // namespace

void multiply_float32(ThreadPool& pool, const Linear& linear, const Rows& rows, float* out) {
    const size_t in = linear.in;
    if (!rows.work.empty()) {
        pool.split(rows.count, row_grain(in), [&](size_t begin, size_t end) {
            for (size_t row = begin; row < end; ++row) rows.work(row);
        });
    }
    multiply_rows<float, float>(pool, linear, {rows.at, in, rows.stride}, rows.count, out);
}

void multiply_bfloat16(ThreadPool& pool, const Linear& linear, const Rows& rows, float* out) {
    const size_t in = linear.in;
    const size_t pairs = divide_up(in, 2);
    for (size_t first = 0; first < rows.count; first += kPanelRows) {
        const size_t count = std::min(kPanelRows, rows.count - first);
        auto* rounded = static_cast<Pair*>(pool.scratch(0, count * pairs * sizeof(Pair)));
        pool.split(count, row_grain(in), [&](size_t begin, size_t end) {
            for (size_t row = begin; row < end; ++row) {
                rows.work(first + row);
                round_row(rows.at + (first + row) * rows.stride, in, rounded + row * pairs);
            }
        });
        multiply_rows<Pair, uint16_t>(pool, linear, {rounded, pairs, pairs}, count, out + first * linear.out);
    }
}

void multiply(ThreadPool& pool, const Linear& linear, const Rows& rows, float* out) {
    switch (linear.format.bits) {
        case 32: return multiply_float32(pool, linear, rows, out);
        case 16: return multiply_bfloat16(pool, linear, rows, out);
        default: return multiply_codes(pool, linear, rows, out);
    }
}

}  // namespace crossdock

#pragma GCC visibility push(default)
extern "C" {

// Outputs per tile: packed weights and biases are padded to a multiple of it.
int64_t crossdock_tile_columns() { return crossdock::kTileColumns; }

// Floats per vector: it decides the order in which rows are summed, and with it their last bits.
int crossdock_lanes() { return crossdock::kLanes; }

// Whether bfloat16 weights are multiplied by the processor's own instruction.
int crossdock_has_bf16() {
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return 1;
#else
    return 0;
#endif
}

void crossdock_pack_f32(const float* weight, int64_t out, int64_t in, float* packed) {
    crossdock::pack(weight, out, in, 1, packed);
}

void crossdock_pack_bf16(const uint16_t* weight, int64_t out, int64_t in, uint16_t* packed) {
    crossdock::pack(weight, out, in, 2, packed);
}
}
#pragma GCC visibility pop
