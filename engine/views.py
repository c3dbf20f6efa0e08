"""What a policy sees of sequences: counts, taken from them and from the pool between two steps.

Made and asked by the core alone. What does not change from one step to the next is not made again: the core says when
it does. Never changes anything else, never decides.
"""

from bisect import bisect_left, insort
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
        self._views: dict[SequenceId, SequenceView] = {}
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
        insort(self._order, (sequence.arrived, sequence.id))
        self._changed[sequence.id] = sequence

    def change(self, sequence: Sequence) -> None:
        """Of one that runs: its blocks, what was promised to it, or how many tokens it has to compute."""
        self._changed[sequence.id] = sequence

    def leave(self, sequence: Sequence) -> None:
        """It runs no more."""
        del self._order[bisect_left(self._order, (sequence.arrived, sequence.id))]
        self._views.pop(sequence.id, None)
        self._changed.pop(sequence.id, None)

    def running(self, sequences: Mapping[SequenceId, Sequence]) -> tuple[SequenceView, ...]:
        """Those that run, in order of arrival. sequences: all that entered and did not leave."""
        for name, sequence in self._changed.items():
            self._views[name] = self._running_view(sequence, short=False)
        self._changed.clear()
        views = self._views
        found = tuple([views[name] for _, name in self._order])
        if sum([one.blocks_to_continue for one in found]) <= self._pool.available:
            return found
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
        sole = self._pool.sole(sequence.table) if short else 0
        shared_tokens = (len(sequence.table) - sole) * self._block_size
        had = len(sequence.table) + sequence.credit.blocks
        lacks = max(0, self.blocks_for(sequence.known()) - had)
        return SequenceView(
            id=sequence.id,
            uncomputed=sequence.uncomputed(),
            blocks_to_start=0,
            blocks_to_continue=lacks,
            blocks_to_end=max(0, self.blocks_for(sequence.positions_max()) - had - lacks),
            blocks_freed=sole + sequence.credit.blocks if short else 0,
            cost_to_resume=max(0, sequence.computed - shared_tokens) if short else 0,
            arrived=sequence.arrived,
            steadfast=sequence.steadfast(),
        )
