"""How likely the tokens of a prompt are, packed: as a worker tells it, and as a gateway keeps it.

A value. Knows neither engine nor wire.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Score(NamedTuple):
    """Of one token. logprob: natural, of the model's own distribution. rank: among all tokens, from 1. top: (token id,
    logprob) of the likeliest ones, the likeliest first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Of consecutive tokens. logprobs, ranks: of each. width: alternatives of each; top_ids, top_logprobs: all of
    them, token by token."""

    logprobs: tuple[float, ...] = ()
    ranks: tuple[int, ...] = ()
    width: int = 0
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    @classmethod
    def of(cls, scores: Iterable[tuple[float, int, tuple[tuple[int, float], ...]]]) -> "Scores":
        """scores: (logprob, rank, top) of each; at least one, and of all as many alternatives."""
        each = tuple(scores)
        tops = [top for _, _, top in each]
        return cls(
            logprobs=tuple(logprob for logprob, _, _ in each),
            ranks=tuple(rank for _, rank, _ in each),
            width=len(tops[0]),
            top_ids=tuple(token for top in tops for token, _ in top),
            top_logprobs=tuple(logprob for top in tops for _, logprob in top),
        )

    def __len__(self) -> int:
        return len(self.logprobs)

    def __getitem__(self, index: int) -> Score:
        logprob, first = self.logprobs[index], index * self.width
        last = first + self.width
        top = zip(self.top_ids[first:last], self.top_logprobs[first:last], strict=True)
        return Score(logprob, self.ranks[index], tuple(top))

    def coherent(self) -> bool:
        """Whether the arrays fit each other."""
        tops = len(self.top_ids), len(self.top_logprobs)
        return len(self.ranks) == len(self) and set(tops) == {len(self) * self.width}

    def since(self, index: int) -> "Scores":
        """Those of the tokens from `index` on."""
        first = index * self.width
        return Scores(
            logprobs=self.logprobs[index:],
            ranks=self.ranks[index:],
            width=self.width,
            top_ids=self.top_ids[first:],
            top_logprobs=self.top_logprobs[first:],
        )

    @staticmethod
    def joined(parts: Iterable["Scores"]) -> "Scores":
        """parts: one after the other, of one width."""
        each = tuple(parts)
        return Scores(
            logprobs=tuple(value for part in each for value in part.logprobs),
            ranks=tuple(value for part in each for value in part.ranks),
            width=each[0].width if each else 0,
            top_ids=tuple(value for part in each for value in part.top_ids),
            top_logprobs=tuple(value for part in each for value in part.top_logprobs),
        )
