"""Which tokens may follow: what a sequence asks before each of its tokens is drawn.

Made and compiled by whoever gives the sequence to the engine. The engine knows no grammar, only masks.
"""

from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

TokenMask: TypeAlias = NDArray[np.uint32]
"""[ceil(vocabulary / 32)]: token t may follow where bit t % 32 of word t // 32 is set, the lowest first."""


class Constraint(Protocol):
    """Stands behind the tokens that it was told of; what it allows is a function of them. Step thread, and nobody else
    once a sequence has it. ends: tokens that say that it is complete; allowed only where it may be."""

    ends: frozenset[int]

    def allowed(self) -> TokenMask:
        """What may follow; nothing at all when the sequence cannot go on. Not to be written, and good until the next
        `advance`. Costs microseconds as a rule, some milliseconds at most."""
        ...

    def advance(self, token: int) -> None:
        """This token follows. One that was not allowed leaves nothing that is."""
        ...

    def fork(self) -> "Constraint":
        """Another one at the same place."""
        ...


def ends_of(constraint: Constraint | None) -> frozenset[int]:
    """None where there is no constraint."""
    return frozenset() if constraint is None else constraint.ends


def admits(mask: TokenMask, vocab_size: int) -> NDArray[np.bool_]:
    """bool [vocab_size] of a mask of that many tokens."""
    assert len(mask) == (vocab_size + 31) // 32, f"{len(mask)} words for {vocab_size} tokens"
    return np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
