// What a model does to one row at a time: norms, rotary embedding, the gated activation, storing keys and
// values. Each row is computed by itself in one fixed order; rows are shared out to the threads.
#include <cmath>

#include "simd.h"
#include "thread_pool.h"

namespace crossdock {
namespace {

constexpr size_t kGrainElements = size_t{1} << 14;  // of work that is worth waking a thread for

size_t grain(size_t row_elements) { return kGrainElements / row_elements + 1; }

float sum_of_squares(const float* x, size_t n) {
    Floats total{};
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const Floats value = load(x + i);
        total = fma(value, value, total);
    }
    float tail[kLanes] = {};
    std::memcpy(tail, x + i, (n - i) * sizeof(float));
    const Floats value = load(tail);
    return sum(fma(value, value, total));
}

void norm_row(const float* x, const float* weight, float eps, size_t n, float* out) {
    const float scale = 1.0f / std::sqrt(sum_of_squares(x, n) / static_cast<float>(n) + eps);
    for (size_t i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

void rotate_heads(float* x, size_t heads, size_t half, const float* cos, const float* sin) {
    for (size_t head = 0; head < heads; ++head) {
        float* first = x + head * 2 * half;
        float* second = first + half;
        for (size_t i = 0; i < half; ++i) {
            const float a = first[i];
            const float b = second[i];
            first[i] = a * cos[i] - b * sin[i];
            second[i] = b * cos[i] + a * sin[i];
        }
    }
}

// Below -88 the true value is under 1e-36, and exp would saturate.
INLINE Floats silu(Floats gate) { return gate < -88.0f ? Floats{} : gate / (exp(-gate) + 1.0f); }

void silu_mul_row(const float* gate, const float* up, size_t n, float* out) {
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, silu(load(gate + i)) * load(up + i));
    float tail[kLanes] = {};
    std::memcpy(tail, gate + i, (n - i) * sizeof(float));
    store(tail, silu(load(tail)));
    for (size_t lane = 0; i < n; ++i, ++lane) out[i] = tail[lane] * up[i];
}

void store_row(const float* from, size_t n, float* to) { std::memcpy(to, from, n * sizeof(float)); }

void store_row(const float* from, size_t n, uint16_t* to) {
    for (size_t i = 0; i < n; ++i) to[i] = to_bf16(from[i]);
}

// Strides count elements. `layer` is the cache at block 0 of the layer; values are `half` behind the keys.
template <class Element>
void write_kv(ThreadPool& pool, Element* layer, int64_t block_stride, int64_t half, int64_t block_size,
              const float* k, int64_t k_stride, const float* v, int64_t v_stride, const int64_t* slots,
              int64_t rows, int64_t width) {
    pool.split(rows, grain(2 * width), [&](size_t begin, size_t end) {
        for (size_t row = begin; row < end; ++row) {
            Element* to = layer + slots[row] / block_size * block_stride + slots[row] % block_size * width;
            store_row(k + row * k_stride, width, to);
            store_row(v + row * v_stride, width, to + half);
        }
    });
}

}  // namespace
}  // namespace crossdock

using crossdock::ThreadPool;

#pragma GCC visibility push(default)
extern "C" {

void crossdock_rms_norm(void* pool, const float* x, const float* weight, float eps, int64_t rows, int64_t n,
                        float* out) {
    static_cast<ThreadPool*>(pool)->split(rows, crossdock::grain(n), [&](size_t begin, size_t end) {
        for (size_t row = begin; row < end; ++row) {
            crossdock::norm_row(x + row * n, weight, eps, n, out + row * n);
        }
    });
}

void crossdock_add_rms_norm(void* pool, const float* x, float* residual, const float* weight, float eps,
                            int64_t rows, int64_t n, float* out) {
    static_cast<ThreadPool*>(pool)->split(rows, crossdock::grain(n), [&](size_t begin, size_t end) {
        for (size_t row = begin; row < end; ++row) {
            const float* added = x + row * n;
            float* total = residual + row * n;
            for (int64_t i = 0; i < n; ++i) total[i] += added[i];
            crossdock::norm_row(total, weight, eps, n, out + row * n);
        }
    });
}

// x [rows, heads, 2 * half] with `stride` elements between rows.
void crossdock_rotary(void* pool, float* x, int64_t stride, int64_t rows, int64_t heads, int64_t half,
                      const int32_t* positions, const float* cos, const float* sin) {
    static_cast<ThreadPool*>(pool)->split(
        rows, crossdock::grain(heads * half * 2), [&](size_t begin, size_t end) {
            for (size_t row = begin; row < end; ++row) {
                const size_t at = static_cast<size_t>(positions[row]) * half;
                crossdock::rotate_heads(x + row * stride, heads, half, cos + at, sin + at);
            }
        });
}

void crossdock_silu_mul(void* pool, const float* gate_up, int64_t rows, int64_t n, float* out) {
    static_cast<ThreadPool*>(pool)->split(rows, crossdock::grain(4 * n), [&](size_t begin, size_t end) {
        for (size_t row = begin; row < end; ++row) {
            const float* gate = gate_up + row * 2 * n;
            crossdock::silu_mul_row(gate, gate + n, n, out + row * n);
        }
    });
}

void crossdock_write_kv_f32(void* pool, float* layer, int64_t block_stride, int64_t half, int64_t block_size,
                            const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                            const int64_t* slots, int64_t rows, int64_t width) {
    crossdock::write_kv(*static_cast<ThreadPool*>(pool), layer, block_stride, half, block_size, k, k_stride,
                        v, v_stride, slots, rows, width);
}

void crossdock_write_kv_bf16(void* pool, uint16_t* layer, int64_t block_stride, int64_t half,
                             int64_t block_size, const float* k, int64_t k_stride, const float* v,
                             int64_t v_stride, const int64_t* slots, int64_t rows, int64_t width) {
    crossdock::write_kv(*static_cast<ThreadPool*>(pool), layer, block_stride, half, block_size, k, k_stride,
                        v, v_stride, slots, rows, width);
}
}
#pragma GCC visibility pop
