"""What a step computes and what it draws, column by column.

Made by the core. Where the same sequences get one token each, step after step, the columns stay and only their numbers
go on. Changes no sequence, decides nothing.
"""

from collections.abc import Sequence as Ordered

import numpy as np
from numpy.typing import NDArray

from engine.batch import Int32s, Int64s, Shape
from engine.policy import Work
from engine.scheduling.pace import Load
from engine.sequence import NO_TOKENS, Progress, Sequence

MANY = 1 << 31
"""More tokens than any sequence has."""


class Draws:
    """Sequences for which a token each is drawn, in order of their rows of logits.

    positions: int64 [n], of the tokens that are drawn next. ruled: indices of those whose next token may depend on more
    than their logits and parameters. twinned: of those that draw for others, too. told_more: of those that asked for
    logprobs. ends: tokens with which any of them may end. limits: int64 [n], length of each at which it ends."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.positions: Int64s = np.array([one.known() for one in sequences], np.int64)
        self.params = tuple([one.sampling for one in sequences])
        self.ruled = [at for at, one in enumerate(sequences) if one.ruled()]
        self.twinned = [at for at, one in enumerate(sequences) if one.twins]
        self.told_more = [at for at, one in enumerate(sequences) if one.sampling.logprobs is not None]
        self.ends = NO_TOKENS.union(*{one.stop.ends() for one in sequences})
        self.limits: Int64s = np.array([one.stop.length_limit for one in sequences], np.int64)
        self._left = int((self.limits - self.positions).min(initial=MANY))

    def remarkable(self, tokens: list[int], positions: Int64s) -> list[int]:
        """Ascending indices of those for which these tokens may mean more than that there is one more. positions: int64
        [n], at which they were drawn, not after those that are drawn next."""
        found = set(self.ruled)
        if self._left <= 1:
            found.update((positions + 1 >= self.limits).nonzero()[0].tolist())
        if not self.ends.isdisjoint(tokens):
            found.update([at for at, token in enumerate(tokens) if token in self.ends])
        return sorted(found)

    def go_on(self) -> None:
        """Each has got the token that was drawn."""
        self.positions = self.positions + 1
        self._left -= 1


class Runs:
    """The runs of one step, in order. work: as planned.

    rows: int64 [S], see BlockRows. firsts, ends: int32 [S], the position of each run's first token, and behind its
    last. longest: the greatest end. tokens: in all. load: of the device. draws: of those that are all computed after
    it. long: bool [S], of those that are more than the one token before the next is drawn. scored: whether anybody
    asked how likely tokens are. steady: whether the same runs can be the next step's."""

    def __init__(self, work: tuple[Work, ...], progress: Ordered[Progress]) -> None:
        sequences = [sequence for sequence, _ in progress]
        self.work = work
        self.progress = tuple(progress)
        self.rows: Int64s = np.array([one.row for one in sequences], np.int64)
        self.firsts: Int32s = np.array([one.computed for one in sequences], np.int32)
        counts: Int32s = np.array([count for _, count in progress], np.int32)
        left = np.array([one.uncomputed() for one in sequences], np.int32)
        assert len({*self.rows.tolist()}) == len(self.rows), "a plan names a sequence once"
        assert ((counts >= 1) & (counts <= left)).all(), f"{counts} of {left}"
        complete: NDArray[np.bool_] = counts == left
        self.shape = Shape(counts, complete)
        self.ends: Int32s = self.firsts + counts
        self.longest = int(self.ends.max(initial=0))
        self.tokens, ones = int(counts.sum()), int((counts == 1).sum())
        self.load = Load(generating=ones, prompt_tokens=self.tokens - ones)
        self.long: NDArray[np.bool_] = (counts > 1) | ~complete
        self.draws = Draws([sequences[at] for at in complete.nonzero()[0].tolist()])
        self.scored = any(one.scored is not None for one in sequences)
        self.steady = not self.long.any() and not self.scored and not self.draws.twinned

    def __len__(self) -> int:
        return len(self.progress)

    def go_on(self) -> None:
        """Of steady ones: each was computed, and has got the token that was drawn."""
        self.firsts, self.ends = self.ends, self.ends + self.shape.counts
        self.longest += 1
        self.draws.go_on()
