"""What a policy sees of sequences: counts, taken from them and from the pool between two steps.

Made and asked by the core alone. Never changes anything, never decides.
"""

from collections.abc import Collection

from engine.cache.block_pool import BlockPool, Match
from engine.cache.coming import Coming
from engine.cache.prefix_chain import PrefixLink
from engine.policy import SequenceView
from engine.scheduling.admission import blocks_at_start
from engine.sequence import Sequence, State

NOTHING = Match(blocks=0, owned=0)


class SequenceViews:
    """coming: what those that run are going to put into the cache."""

    def __init__(self, pool: BlockPool, block_size: int, coming: Coming) -> None:
        self._pool = pool
        self._block_size = block_size
        self._coming = coming

    def entering(self, sequence: Sequence) -> SequenceView:
        """One that waits, or that was swapped out."""
        links = self.usable_links(sequence)
        match = self._pool.match(links) if links else NOTHING
        waits = sequence.state is State.WAITING
        needed = self.blocks_at_start(sequence)
        return SequenceView(
            id=sequence.id,
            uncomputed=sequence.uncomputed() - match.blocks * self._block_size * waits,
            length=len(sequence.tokens),
            blocks_to_start=needed - match.owned,
            blocks_to_end=self.blocks_for(sequence.positions_max()) - needed,
            arrived=sequence.arrived,
            coming=self._coming.count(links[match.blocks :]) * self._block_size * waits,
        )

    def running(self, sequences: Collection[Sequence]) -> tuple[SequenceView, ...]:
        """Those that run."""
        lacking = sum(map(self._lacks, sequences))
        short = lacking > self._pool.available
        return tuple(self._running_view(sequence, short) for sequence in sequences)

    def growth(self, sequence: Sequence) -> int:
        """Blocks that one that runs may still come to need and that nobody promised it."""
        assert sequence.table is not None and sequence.credit is not None
        most = self.blocks_for(sequence.positions_max())
        return max(0, most - len(sequence.table) - sequence.credit.blocks)

    def blocks_at_start(self, sequence: Sequence) -> int:
        """Blocks that it must have or be promised to run."""
        known = self.blocks_for(len(sequence.tokens))
        return blocks_at_start(known, self.blocks_for(sequence.positions_max()), sequence.preemptions)

    def usable_links(self, sequence: Sequence) -> list[PrefixLink]:
        """What may come from the cache: not the last token, which is sampled from."""
        return sequence.chain.links(sequence.tokens, 0, (len(sequence.tokens) - 1) // self._block_size)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _running_view(self, sequence: Sequence, short: bool) -> SequenceView:
        assert sequence.table is not None and sequence.credit is not None
        sole = self._pool.sole(sequence.table) if short else 0
        shared_tokens = (len(sequence.table) - sole) * self._block_size
        lacks = self._lacks(sequence)
        return SequenceView(
            id=sequence.id,
            uncomputed=sequence.uncomputed(),
            length=len(sequence.tokens),
            blocks_to_start=0,
            blocks_to_continue=lacks,
            blocks_to_end=max(0, self.growth(sequence) - lacks),
            blocks_freed=sole + sequence.credit.blocks if short else 0,
            cost_to_resume=max(0, sequence.computed - shared_tokens) if short else 0,
            arrived=sequence.arrived,
            steadfast=sequence.steadfast(),
        )

    def _lacks(self, sequence: Sequence) -> int:
        """Blocks for its known tokens that it neither has nor was promised."""
        assert sequence.table is not None and sequence.credit is not None
        return max(0, self.blocks_for(len(sequence.tokens)) - len(sequence.table) - sequence.credit.blocks)
