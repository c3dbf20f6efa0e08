// The noise of a token: a pure function of (seed, position), as engine/noise.py has it.
// Philox4x32-10: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <cstdint>

namespace crossdock {

// Odd, in (0, 2^53).
inline uint64_t noise_of(uint64_t seed, uint64_t position) {
    uint32_t c0 = position, c1 = position >> 32, c2 = 0, c3 = 0, k0 = seed, k1 = seed >> 32;
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = uint64_t{0xD2511F53} * c0, product1 = uint64_t{0xCD9E8D57} * c2;
        c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
        c1 = product1;
        c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
        c3 = product0;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return (uint64_t{c0} << 32 | c1) >> 12 << 1 | 1;
}

}  // namespace crossdock
