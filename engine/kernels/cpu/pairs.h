// Pairs of bfloat16 numbers side by side in a word, as the processor's dot-product instruction reads them.
#pragma once

#include "simd.h"

namespace crossdock {

using Pair = uint32_t;  // the earlier number in the low half

INLINE Pair round_pair(float first, float second) {
    return static_cast<Pair>(to_bf16(second)) << 16 | to_bf16(first);
}

INLINE Words load(const Pair* from) {
    Words value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store(Pair* to, Words value) { std::memcpy(to, &value, sizeof value); }

#if defined(__AVX512BF16__)
// As `round_pair`, but numbers below the least normal one become zero: neighbours in `first`, then in `second`.
INLINE Words round_pairs(Floats first, Floats second) {
    return (Words)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

// Element i of both rows as a pair, for 2 * kLanes elements.
INLINE void interleave(const uint16_t* first, const uint16_t* second, Pair* to) {
    constexpr auto index = [](int from) {
        struct { alignas(64) int16_t at[32]; } lanes{};
        for (int i = 0; i < 32; ++i) lanes.at[i] = static_cast<int16_t>(from + i / 2 + i % 2 * 32);
        return lanes;
    };
    static constexpr auto low = index(0), high = index(16);
    const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, _mm512_load_si512(low.at), b));
    _mm512_storeu_si512(to + kLanes, _mm512_permutex2var_epi16(a, _mm512_load_si512(high.at), b));
}
#endif

// acc + first * first + second * second, in each lane.
INLINE Floats dot(Pair factor, Words pairs, Floats acc) {
#if defined(__AVX512BF16__)
    const __m512i factors = _mm512_set1_epi32(static_cast<int>(factor));
    return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)factors, (__m512bh)pairs);
#else
    const float first = from_bf16(static_cast<uint16_t>(factor));
    const float second = from_bf16(static_cast<uint16_t>(factor >> 16));
    acc = fma(splat(first), (Floats)(pairs << 16), acc);
    return fma(splat(second), (Floats)(pairs & 0xffff0000u), acc);
#endif
}

// acc[r][v] += a[r * a_stride + k] . b[k * b_stride + v * kLanes ...], k ascending.
template <int Rows, int Vectors>
INLINE void accumulate(Floats (&acc)[Rows][Vectors], const Pair* a, size_t a_stride, const Pair* b,
                       size_t b_stride, size_t count) {
    for (size_t k = 0; k < count; ++k, b += b_stride) {
        UNROLL
        for (int r = 0; r < Rows; ++r) {
            UNROLL
            for (int v = 0; v < Vectors; ++v) {
                acc[r][v] = dot(a[r * a_stride + k], load(b + v * kLanes), acc[r][v]);
            }
        }
    }
}

}  // namespace crossdock
