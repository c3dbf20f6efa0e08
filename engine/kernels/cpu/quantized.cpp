// x [rows, in] times a weight of small integers. In each group of kGroup inputs a weight is code * scale + least, or
// (code - zero) * scale, with codes of 4 or 8 bits; activations are rounded to signed bytes with one scale for each row
// and group. Products of integers are summed exactly; one multiply-add for each group, in order of the groups, gives the
// float32 result, so a row's result depends on no other row, on no tile and on no thread.
//
// Packed order: tiles of kColumns outputs; in a tile, group after group: codes, scales, and least values or zeros if
// there are any, two bytes each so that codes begin on a cache line. Codes stand as the dot-product instruction reads them: four consecutive inputs of one output side by side, for
// each output of a vector; codes of 4 bits share bytes, the first half of a group in the low bits. Padding is zero.
#include <algorithm>

#include "linear.h"
#include "packing.h"
#include "rows.h"
#include "signed_bytes.h"
#include "simd.h"
#include "thread_pool.h"

namespace crossdock {
namespace {

constexpr int kGroup = 32;
constexpr int kQuads = kGroup / 4;
constexpr int kVectors = 2;
constexpr int kColumns = kVectors * kLanes;
constexpr int kRows = 6;
constexpr size_t kPanelRows = 64 * kRows;  // bounds the scratch memory for rounded activations

typedef uint8_t Codes __attribute__((vector_size(kLanes * 4)));

size_t group_bytes(int bits, Offsets offsets) {
    return kColumns * (kGroup * bits / 8 + sizeof(uint16_t) * (offsets == Offsets::kNone ? 1 : 2));
}

INLINE Floats load_halves(const uint8_t* from) {
#if defined(__AVX512F__)
    __m256i halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Floats)_mm512_cvtph_ps(halves);
#else
    Floats values;
    for (int i = 0; i < kLanes; ++i) {
        _Float16 half;
        std::memcpy(&half, from + 2 * i, sizeof half);
        values[i] = static_cast<float>(half);
    }
    return values;
#endif
}

// Adds to each lane the products of its four codes with four activations.
INLINE Ints dot_quad(Codes codes, int32_t activations, Ints acc) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, _mm512_set1_epi32(activations));
#else
    UNROLL
    for (int i = 0; i < 4; ++i) {
        const int32_t activation = static_cast<int8_t>(activations >> 8 * i);
        acc += (Ints)(((Words)codes >> 8 * i) & 0xffu) * activation;
    }
    return acc;
#endif
}

INLINE Ints splat_int(int32_t value) { return value - Ints{}; }

INLINE Ints load_zeros(const uint8_t* from) {
    typedef uint16_t Zeros __attribute__((vector_size(kLanes * 2)));
    Zeros zeros;
    std::memcpy(&zeros, from, sizeof zeros);
    return __builtin_convertvector(zeros, Ints);
}

// Rounded activations of a panel of rows. sums: of a group's codes; scaled_sums: times the group's scale.
struct Rounded {
    int8_t* codes;
    float* scales;
    int32_t* sums;
    float* scaled_sums;
    size_t in, groups;

    static size_t bytes(size_t rows, size_t in) {
        return rows * (in + in / kGroup * (2 * sizeof(float) + sizeof(int32_t)));
    }

    Rounded(void* at, size_t rows, size_t in) : in(in), groups(in / kGroup) {
        scales = static_cast<float*>(at);
        scaled_sums = scales + rows * groups;
        sums = reinterpret_cast<int32_t*>(scaled_sums + rows * groups);
        codes = reinterpret_cast<int8_t*>(sums + rows * groups);
    }

    INLINE int32_t quad(size_t row, size_t group, int quad) const {
        int32_t value;
        std::memcpy(&value, codes + row * in + group * kGroup + 4 * quad, sizeof value);
        return value;
    }
};

void round_group(const float* x, int8_t* codes, float* scale, int32_t* sum, float* scaled_sum) {
    *scale = round_to_bytes(x, kGroup, codes);
    int32_t total = 0;
    for (int i = 0; i < kGroup; ++i) total += codes[i];
    *sum = total;
    *scaled_sum = *scale * static_cast<float>(total);
}

void round_row(const float* x, size_t row, const Rounded& to) {
    for (size_t group = 0; group < to.groups; ++group) {
        const size_t at = row * to.groups + group;
        round_group(x + group * kGroup, to.codes + row * to.in + group * kGroup, to.scales + at, to.sums + at,
                    to.scaled_sums + at);
    }
}

template <int Bits>
INLINE Codes load_codes(const uint8_t* group, int quad, int vector) {
    constexpr int stored = Bits == 8 ? kQuads : kQuads / 2;
    Codes codes;
    std::memcpy(&codes, group + ((quad % stored) * kVectors + vector) * sizeof codes, sizeof codes);
    if constexpr (Bits == 8) return codes;
    return (quad < stored ? codes : (Codes)((Words)codes >> 4)) & 0x0f;
}

template <int Rows, int Bits, Offsets Kind>
void multiply_tile(const Rounded& x, size_t row, const uint8_t* tile, int zero, Floats (&total)[Rows][kVectors]) {
    UNROLL
    for (int r = 0; r < Rows; ++r) {
        UNROLL
        for (int v = 0; v < kVectors; ++v) total[r][v] = Floats{};
    }
    for (size_t group = 0; group < x.groups; ++group, tile += group_bytes(Bits, Kind)) {
        const uint8_t* scales = tile + kColumns * kGroup * Bits / 8;
        const uint8_t* offsets = scales + kColumns * 2;
        Ints acc[Rows][kVectors];
        UNROLL
        for (int v = 0; v < kVectors; ++v) {
            UNROLL
            for (int r = 0; r < Rows; ++r) {
                const int32_t sum = -x.sums[(row + r) * x.groups + group];
                if constexpr (Kind == Offsets::kZeros) {
                    acc[r][v] = load_zeros(offsets + v * kLanes * 2) * sum;
                } else {
                    acc[r][v] = Kind == Offsets::kLeast ? Ints{} : splat_int(zero * sum);
                }
            }
        }
        UNROLL
        for (int quad = 0; quad < kQuads; ++quad) {
            Codes codes[kVectors];
            UNROLL
            for (int v = 0; v < kVectors; ++v) codes[v] = load_codes<Bits>(tile, quad, v);
            UNROLL
            for (int r = 0; r < Rows; ++r) {
                const int32_t activations = x.quad(row + r, group, quad);
                UNROLL
                for (int v = 0; v < kVectors; ++v) acc[r][v] = dot_quad(codes[v], activations, acc[r][v]);
            }
        }
        UNROLL
        for (int v = 0; v < kVectors; ++v) {
            const Floats scale = load_halves(scales + v * kLanes * 2);
            UNROLL
            for (int r = 0; r < Rows; ++r) {
                const Floats product = __builtin_convertvector(acc[r][v], Floats) * scale;
                total[r][v] = fma(product, splat(x.scales[(row + r) * x.groups + group]), total[r][v]);
            }
            if constexpr (Kind == Offsets::kLeast) {
                const Floats least = load_halves(offsets + v * kLanes * 2);
                UNROLL
                for (int r = 0; r < Rows; ++r)
                    total[r][v] = fma(least, splat(x.scaled_sums[(row + r) * x.groups + group]), total[r][v]);
            }
        }
    }
}

struct Out {
    float* at;
    size_t features;
    const float* bias;  // padded to whole tiles, or null
};

template <int Rows, int Bits, Offsets Kind>
void multiply_and_store(const Rounded& x, size_t row, const uint8_t* tile, int zero, const Out& out, size_t column) {
    Floats total[Rows][kVectors];
    multiply_tile<Rows, Bits, Kind>(x, row, tile, zero, total);
    const size_t columns = std::min<size_t>(kColumns, out.features - column);
    UNROLL
    for (int r = 0; r < Rows; ++r) {
        float values[kColumns];
        UNROLL
        for (int v = 0; v < kVectors; ++v)
            store(values + v * kLanes, out.bias ? total[r][v] + load(out.bias + column + v * kLanes) : total[r][v]);
        std::memcpy(out.at + (row + r) * out.features + column, values, columns * sizeof(float));
    }
}

template <int Bits, Offsets Kind>
void multiply(ThreadPool& pool, const Rounded& x, size_t rows, const uint8_t* packed, int zero, const Out& out) {
    using Kernel = void (*)(const Rounded&, size_t, const uint8_t*, int, const Out&, size_t);
    static constexpr Kernel kernels[kRows] = {
        multiply_and_store<1, Bits, Kind>, multiply_and_store<2, Bits, Kind>,
        multiply_and_store<3, Bits, Kind>, multiply_and_store<4, Bits, Kind>,
        multiply_and_store<5, Bits, Kind>, multiply_and_store<6, Bits, Kind>};
    const size_t row_tiles = divide_up(rows, kRows);
    const size_t height = divide_up(rows, row_tiles);  // 8 rows are 4 + 4, not 6 + 2
    const size_t tile_bytes = x.groups * group_bytes(Bits, Kind);
    const size_t units = divide_up(out.features, kColumns) * row_tiles;
    const size_t grain = (size_t{1} << 16) / (x.in * kColumns * height) + 1;
    pool.split(units, grain, [&](size_t begin, size_t end) {
        for (size_t unit = begin; unit < end; ++unit) {
            const size_t tile = unit / row_tiles;
            const size_t row = unit % row_tiles * height;
            kernels[std::min(height, rows - row) - 1](x, row, packed + tile * tile_bytes, zero, out,
                                                      tile * kColumns);
        }
    });
}

template <int Bits>
void multiply_rounded(ThreadPool& pool, const Linear& linear, const Rounded& x, size_t rows, const Out& out) {
    const auto* packed = static_cast<const uint8_t*>(linear.packed);
    const int zero = linear.format.zero;
    switch (linear.format.offsets) {
        case Offsets::kNone: return multiply<Bits, Offsets::kNone>(pool, x, rows, packed, zero, out);
        case Offsets::kLeast: return multiply<Bits, Offsets::kLeast>(pool, x, rows, packed, zero, out);
        case Offsets::kZeros: return multiply<Bits, Offsets::kZeros>(pool, x, rows, packed, zero, out);
    }
}

void pack_codes(const uint8_t* codes, int bits, size_t column, uint8_t* group) {
    for (int k = 0; k < kGroup; ++k) {
        const int quad = k / 4;
        const int stored = bits == 8 ? kQuads : kQuads / 2;
        const size_t vector = (quad % stored) * kVectors + column / kLanes;
        uint8_t& place = group[vector * sizeof(Codes) + column % kLanes * 4 + k % 4];
        place |= quad < stored ? codes[k] : static_cast<uint8_t>(codes[k] << 4);
    }
}

}  // namespace

void multiply_codes(ThreadPool& pool, const Linear& linear, const Rows& rows, float* out) {
    const size_t in = linear.in;
    for (size_t first = 0; first < rows.count; first += kPanelRows) {
        const size_t count = std::min(kPanelRows, rows.count - first);
        const Rounded rounded(pool.scratch(0, Rounded::bytes(count, in)), count, in);
        pool.split(count, row_grain(in), [&](size_t begin, size_t end) {
            for (size_t row = begin; row < end; ++row) {
                rows.work(first + row);
                round_row(rows.at + (first + row) * rows.stride, row, rounded);
            }
        });
        const size_t features = linear.out;
        const Out to{out + first * features, features, linear.bias};
        (linear.format.bits == 8 ? multiply_rounded<8> : multiply_rounded<4>)(pool, linear, rounded, count, to);
    }
}

}  // namespace crossdock

#pragma GCC visibility push(default)
extern "C" {

int64_t crossdock_quantized_columns() { return crossdock::kColumns; }

int64_t crossdock_quantized_bytes(int64_t out, int64_t in, const crossdock::Format* format) {
    const size_t tiles = crossdock::divide_up(out, crossdock::kColumns);
    return tiles * (in / crossdock::kGroup) * crossdock::group_bytes(format->bits, format->offsets);
}

// codes [out, in], one in a byte; scales, float16, and offsets (null if the format has none) [out, in / kGroup]: least
// values in float16, or zeros in uint16.
void crossdock_quantized_pack(const uint8_t* codes, const uint16_t* scales, const uint16_t* offsets, int64_t out,
                              int64_t in, const crossdock::Format* format, uint8_t* packed) {
    using namespace crossdock;
    const size_t groups = in / kGroup;
    const size_t bytes = group_bytes(format->bits, format->offsets);
    const size_t size = crossdock_quantized_bytes(out, in, format);
    prefer_huge_pages(packed, size);
    std::memset(packed, 0, size);
    for (size_t n = 0; n < static_cast<size_t>(out); ++n) {
        for (size_t group = 0; group < groups; ++group) {
            uint8_t* to = packed + (n / kColumns * groups + group) * bytes;
            const size_t column = n % kColumns;
            pack_codes(codes + n * in + group * kGroup, format->bits, column, to);
            uint8_t* halves = to + kColumns * kGroup * format->bits / 8;
            std::memcpy(halves + column * 2, scales + n * groups + group, 2);
            if (offsets) std::memcpy(halves + (kColumns + column) * 2, offsets + n * groups + group, 2);
        }
    }
}
}
#pragma GCC visibility pop
