// Norms, rotary embedding, the gated activation, rounding: each row is computed by itself in one fixed order.
#include "rows.h"

#include <cmath>

#include "simd.h"

namespace crossdock {
namespace {

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

// Below -88 the true value is under 1e-36, and exp would saturate.
INLINE Floats silu(Floats gate) { return gate < -88.0f ? Floats{} : gate / (exp(-gate) + 1.0f); }

}  // namespace

void norm_row(const float* x, const float* weight, float eps, size_t n, float* out) {
    const float scale = 1.0f / std::sqrt(sum_of_squares(x, n) / static_cast<float>(n) + eps);
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
    for (; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

void add_norm_row(float* added, float* total, const float* weight, float eps, size_t n) {
    for (size_t i = 0; i < n; ++i) total[i] += added[i];
    norm_row(total, weight, eps, n, added);
}

void rotate_heads(float* heads, size_t count, size_t half, const float* cos, const float* sin) {
    for (size_t head = 0; head < count; ++head) {
        float* first = heads + head * 2 * half;
        float* second = first + half;
        for (size_t i = 0; i < half; ++i) {
            const float a = first[i];
            const float b = second[i];
            first[i] = a * cos[i] - b * sin[i];
            second[i] = b * cos[i] + a * sin[i];
        }
    }
}

void silu_mul_row(float* gate, const float* up, size_t n) {
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(gate + i, silu(load(gate + i)) * load(up + i));
    float tail[kLanes] = {};
    std::memcpy(tail, gate + i, (n - i) * sizeof(float));
    store(tail, silu(load(tail)));
    for (size_t lane = 0; i < n; ++i, ++lane) gate[i] = tail[lane] * up[i];
}

void store_row(const float* from, size_t n, float* to) { std::memcpy(to, from, n * sizeof(float)); }

void store_row(const float* from, size_t n, uint16_t* to) {
    for (size_t i = 0; i < n; ++i) to[i] = to_bf16(from[i]);
}

}  // namespace crossdock
