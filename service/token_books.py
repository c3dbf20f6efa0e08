"""Tokens that a worker computed, and what became of them. Told, never asking; lives on the step thread.

computed = delivered + wasted + live, always: a token that was computed was of use, was wasted for a reason that has a
name, or belongs to an attempt that has not ended.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Waste(StrEnum):
    """Why what was computed was of no use here."""

    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"
    GATEWAY_LOST = "gateway_lost"
    TRANSFER_FAILED = "transfer_failed"
    PREEMPTED = "preempted"
    GUIDE_FAILED = "guide_failed"
    TOO_FAR = "too_far"
    """Nobody knew yet that the answer had ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Since the start of the process. live: computed for attempts that have not ended."""

    computed: int
    delivered: int
    live: int
    wasted: Mapping[Waste, int]

    def balanced(self) -> bool:
        return self.computed == self.delivered + self.live + sum(self.wasted.values())


class TokenBooks:
    """Counts since the start of the process."""

    def __init__(self) -> None:
        self._computed = 0
        self._delivered = 0
        self._wasted: Counter[Waste] = Counter()

    def compute(self, tokens: int) -> None:
        """A step computed them, for an attempt that is live."""
        self._computed += tokens

    def deliver(self, tokens: int) -> None:
        """What they were computed for came to its good end here."""
        assert tokens >= 0, tokens
        self._delivered += tokens

    def waste(self, cause: Waste, tokens: int) -> None:
        """What they were computed for ended otherwise."""
        assert tokens >= 0, tokens
        if tokens:
            self._wasted[cause] += tokens

    def counts(self, live: int) -> TokenCounts:
        """live: counted by who has the attempts, so that the sum can be checked."""
        return TokenCounts(
            computed=self._computed, delivered=self._delivered, live=live, wasted=dict(self._wasted)
        )
