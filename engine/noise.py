"""The sampler's only source of chance: a pure function of (seed, position).

Counter-based, so there is no state to keep, move or lose: a stream that is resumed elsewhere draws what it
would have drawn here. Compiled kernels have a copy of it (`engine/kernels/cpu/philox.h`). Never touches a
global generator, a clock or the system.
"""

from typing import TypeAlias

Words4: TypeAlias = tuple[int, int, int, int]

NOISE_BITS = 53
_MASK = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10


def noise(seed: int, position: int) -> int:
    """The draw for one token, in units of 2^-NOISE_BITS: odd, strictly inside (0, 2^NOISE_BITS), all equally likely.

    seed: any integer, taken modulo 2**64; position: [0, 2**64).
    """
    assert 0 <= position < 1 << 64, position
    high, low, _, _ = philox4x32(
        (position & _MASK, position >> 32, 0, 0), (seed & _MASK, (seed >> 32) & _MASK)
    )
    return (high << 32 | low) >> 12 << 1 | 1


def philox4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """Philox4x32-10 of 32-bit words.

    Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1 = (product_1 >> 32) ^ c1 ^ k0, product_1 & _MASK
        c2, c3 = (product_0 >> 32) ^ c3 ^ k1, product_0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3
