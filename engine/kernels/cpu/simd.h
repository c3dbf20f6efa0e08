// Float vectors as wide as the host's registers, and the few operations on them that the kernels share.
// Everything rounds the same way wherever it is inlined: fused multiply-adds are explicit, and the build
// turns contraction off.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Accumulators stay in registers only when every loop over them is unrolled.
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif
#define INLINE [[gnu::always_inline]] inline

namespace crossdock {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kTileVectors = 4;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kLanes = 8;
constexpr int kTileVectors = 2;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kTileVectors = 4;
#else
constexpr int kLanes = 4;
constexpr int kTileVectors = 2;
#endif

// A tile of kTileRows x kTileVectors accumulators fills the register file and leaves room for the operands.
constexpr int kTileRows = 6;
constexpr int kTileColumns = kTileVectors * kLanes;

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

INLINE Floats load(const float* from) {
    Floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

INLINE Floats splat(float value) { return value - Floats{}; }

INLINE Ints iota() {
    Ints lanes;
    for (int i = 0; i < kLanes; ++i) lanes[i] = i;
    return lanes;
}

INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// bfloat16, round to nearest even; any NaN becomes the quiet one.
INLINE uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return nan ? 0x7fc0 : static_cast<uint16_t>(rounded);
}

INLINE float from_bf16(uint16_t value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

INLINE Words widen(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
    Halves value;
    std::memcpy(&value, from, sizeof value);
    return __builtin_convertvector(value, Words);
#endif
}

INLINE Floats load(const uint16_t* from) { return (Floats)(widen(from) << 16); }

// Lane i of a, or lane i - kLanes of b, for each index i in [0, 2 kLanes).
INLINE Words shuffle(Words a, Words b, Ints index) {
#if defined(__clang__)
    Words result;
    for (int i = 0; i < kLanes; ++i) result[i] = index[i] < kLanes ? a[index[i]] : b[index[i] - kLanes];
    return result;
#else
    return __builtin_shuffle(a, b, index);
#endif
}

// e^x to about 1 ulp where the result is a normal number, NaN stays NaN; any bits beyond.
// x = n ln 2 + r with |r| <= ln 2 / 2, and e^r is a polynomial of degree 6 fitted at Chebyshev nodes.
INLINE Floats exp_within(Floats x) {
    const Floats to_integer = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Floats n = fma(x, splat(1.44269504f), to_integer) - to_integer;
    Floats r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    Floats p = splat(0.0013926184037700295f);
    p = fma(p, r, splat(0.008363178931176662f));
    p = fma(p, r, splat(0.041666556149721146f));
    p = fma(p, r, splat(0.16666576266288757f));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r * r, r) + 1.0f;
    const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
    return p * (Floats)exponent;
}

// x is clamped to the range of normal results.
INLINE Floats exp(Floats x) {
    x = x < -87.3f ? splat(-87.3f) : x;
    return exp_within(x > 88.3f ? splat(88.3f) : x);
}

// For x <= 0: what would be less than the least normal number is exactly 0.
INLINE Floats decay(Floats x) { return x < -87.3f ? Floats{} : exp_within(x); }

// In lane order, so that the result is the same wherever it is called.
INLINE float sum(Floats value) {
    float lanes[kLanes];
    store(lanes, value);
    UNROLL
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
}

INLINE float greatest(Floats value) {
    UNROLL
    for (int width = kLanes / 2; width > 0; width /= 2) {
        const Floats other = (Floats)shuffle((Words)value, (Words)value, iota() ^ width);
        value = value > other ? value : other;
    }
    return value[0];
}

// acc[r][v] += a[r * a_stride + k] * b[k * b_stride + v * kLanes ...], k ascending.
template <int Rows, int Vectors>
INLINE void accumulate(Floats (&acc)[Rows][Vectors], const float* a, size_t a_stride, const float* b,
                       size_t b_stride, size_t count) {
    for (size_t k = 0; k < count; ++k, b += b_stride) {
        Floats column[Vectors];
        UNROLL
        for (int v = 0; v < Vectors; ++v) column[v] = load(b + v * kLanes);
        UNROLL
        for (int r = 0; r < Rows; ++r) {
            const Floats factor = splat(a[r * a_stride + k]);
            UNROLL
            for (int v = 0; v < Vectors; ++v) acc[r][v] = fma(factor, column[v], acc[r][v]);
        }
    }
}

}  // namespace crossdock
