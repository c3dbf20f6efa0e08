"""Tokens that a worker computed, and what became of them. Told, never asking; lives on the step thread.

computed = delivered + wasted + live, always: a token that was computed is on its way, was of use, or was wasted for a
reason that has a name.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from service.reports import EndCause


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """A picture of the books. live: computed for attempts that have not ended. wasted: by the cause of the end."""

    computed: int
    delivered: int
    live: int
    wasted: Mapping[EndCause, int]


class TokenBooks:
    """Counts since the start of the process."""

    def __init__(self) -> None:
        self._computed = 0
        self._delivered = 0
        self._wasted: Counter[EndCause] = Counter()

    def compute(self, tokens: int) -> None:
        """A step computed them, for an attempt that is live."""
        self._computed += tokens

    def deliver(self, tokens: int) -> None:
        """The attempt they were computed for came to its good end here."""
        self._delivered += tokens

    def waste(self, cause: EndCause, tokens: int) -> None:
        """The attempt they were computed for ended otherwise."""
        if tokens:
            self._wasted[cause] += tokens

    def counts(self) -> TokenCounts:
        live = self._computed - self._delivered - self._wasted.total()
        return TokenCounts(
            computed=self._computed, delivered=self._delivered, live=live, wasted=dict(self._wasted)
        )
