// Floats as signed bytes that share a scale: each stands for code * scale.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace crossdock {

// The greatest magnitude by its bits: they order a NaN above every number, so broken floats get a broken scale.
INLINE float greatest_magnitude(const float* x, size_t n) {
    uint32_t greatest = 0;
    for (size_t i = 0; i < n; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        greatest = std::max(greatest, bits & 0x7fffffffu);
    }
    float value;
    std::memcpy(&value, &greatest, sizeof value);
    return value;
}

// Rounds n floats to codes in [-127, 127], ties to even, and returns their scale.
INLINE float round_to_bytes(const float* x, size_t n, int8_t* codes) {
    const float greatest = greatest_magnitude(x, n);
    const float inverse = greatest > 0.0f ? 127.0f / greatest : 0.0f;
    const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
    for (size_t i = 0; i < n; ++i) {
        const float shifted = x[i] * inverse + to_integer;
        int32_t bits;
        std::memcpy(&bits, &shifted, sizeof bits);
        codes[i] = static_cast<int8_t>(bits);
    }
    return greatest / 127.0f;
}

}  // namespace crossdock
