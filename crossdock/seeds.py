"""The seeds of the answers to a request for several: pure arithmetic, so that anybody can ask for one of them alone."""

_STEP = 0x9E3779B97F4A7C15
"""Odd, and far from all small numbers: the choices of two seeds that people pick do not meet."""


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one choice, from 0: a signed 64-bit integer. That of choice 0 is the request's own."""
    return (seed + choice * _STEP + (1 << 63)) % (1 << 64) - (1 << 63)
