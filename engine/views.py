"""What a policy sees of sequences: counts, taken from them and from the pool between two steps.

Made and asked by the core alone. What does not change from one step to the next is not made again: the core says when
it does. Never changes anything else, never decides.
"""

from bisect import bisect_left
from collections.abc import Mapping

from engine.cache.block_pool import BlockPool, Match
from engine.cache.coming import Coming
from engine.cache.prefix_chain import PrefixLink
from engine.policy import SequenceView
from engine.scheduling.admission import blocks_at_start
from engine.sequence import Sequence, SequenceId, State

NOTHING = Match(blocks=0, owned=0)


class SequenceViews:
    """coming: what those that run are going to put into the cache."""

    def __init__(self, pool: BlockPool, block_size: int, coming: Coming) -> None:
        self._pool = pool
        self._block_size = block_size
        self._coming = coming
        self._order: list[tuple[float, SequenceId]] = []
        self._views: list[SequenceView] = []
        self._lacking = 0
        self._changed: dict[SequenceId, Sequence] = {}

    def entering(self, sequence: Sequence) -> SequenceView:
        """One that waits, or that was swapped out."""
        links = self.usable_links(sequence)
        match = self._pool.match(links) if links else NOTHING
        waits = sequence.state is State.WAITING
        needed = self.blocks_at_start(sequence)
        return SequenceView(
            id=sequence.id,
            uncomputed=sequence.uncomputed() - match.blocks * self._block_size * waits,
            blocks_to_start=needed - match.owned,
            blocks_to_end=self.blocks_for(sequence.positions_max()) - needed,
            arrived=sequence.arrived,
            coming=self._coming.count(links[match.blocks :]) * self._block_size * waits,
        )

    def enter(self, sequence: Sequence) -> None:
        """It runs from now on."""
        at = bisect_left(self._order, (sequence.arrived, sequence.id))
        self._order.insert(at, (sequence.arrived, sequence.id))
        self._views.insert(at, self._running_view(sequence, short=False))
        self._lacking += self._views[at].blocks_to_continue
        self._changed[sequence.id] = sequence

    def change(self, sequence: Sequence) -> None:
        """Of one that runs: its blocks, what was promised to it, or how many tokens it has to compute."""
        self._changed[sequence.id] = sequence

    def leave(self, sequence: Sequence) -> None:
        """It runs no more."""
        at = bisect_left(self._order, (sequence.arrived, sequence.id))
        del self._order[at]
        self._lacking -= self._views.pop(at).blocks_to_continue
        self._changed.pop(sequence.id, None)

    def running(self, sequences: Mapping[SequenceId, Sequence]) -> tuple[SequenceView, ...]:
        """Those that run, in order of arrival. sequences: all that entered and did not leave."""
        for sequence in self._changed.values():
            at = bisect_left(self._order, (sequence.arrived, sequence.id))
            view = self._running_view(sequence, short=False)
            self._lacking += view.blocks_to_continue - self._views[at].blocks_to_continue
            self._views[at] = view
        self._changed.clear()
        if self._lacking <= self._pool.available:
            return tuple(self._views)
        return tuple(self._running_view(sequences[name], short=True) for _, name in self._order)

    def growth(self, sequence: Sequence) -> int:
        """Blocks that one that runs may still come to need and that nobody promised it."""
        assert sequence.table is not None and sequence.credit is not None
        most = self.blocks_for(sequence.positions_max())
        return max(0, most - len(sequence.table) - sequence.credit.blocks)

    def blocks_at_start(self, sequence: Sequence) -> int:
        """Blocks that it must have or be promised to run."""
        known = self.blocks_for(sequence.known())
        return blocks_at_start(known, self.blocks_for(sequence.positions_max()), sequence.preemptions)

    def usable_links(self, sequence: Sequence) -> list[PrefixLink]:
        """What may come from the cache: not the last token, which is sampled from, and nothing that is to be scored."""
        if sequence.scored is not None:
            return []
        return sequence.chain.links(sequence.tokens, 0, (len(sequence.tokens) - 1) // self._block_size)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _running_view(self, sequence: Sequence, *, short: bool) -> SequenceView:
        assert sequence.table is not None and sequence.credit is not None
        held, size = len(sequence.table), self._block_size
        had = held + sequence.credit.blocks
        lacks = max(0, -(-sequence.known() // size) - had)
        to_end = max(0, -(-sequence.positions_max() // size) - had - lacks)
        freed, cost = 0, 0
        if short:
            sole = self._pool.sole(sequence.table)
            freed, cost = sole + had - held, max(0, sequence.computed - (held - sole) * size)
        return SequenceView(
            sequence.id,
            sequence.uncomputed(),
            0,
            sequence.arrived,
            0,
            lacks,
            to_end,
            freed,
            cost,
            sequence.steadfast(),
        )
