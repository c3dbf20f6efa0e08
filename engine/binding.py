"""Binds blocks to the work of a step and lays it out: the one place where memory safety is asserted.

Called by the core alone, on the step thread. Changes tables, credits and the rows of block ids; decides nothing.
"""

from collections.abc import Sequence as Ordered
from dataclasses import replace

import numpy as np

from engine.batch import Batch, BlockCopy, Int32s, Unread, lay_out
from engine.block_rows import BlockRows
from engine.cache.block_pool import BlockPool
from engine.flight import Flight
from engine.sequence import Progress, Sequence
from engine.views import SequenceViews


class Binder:
    """rows: block ids of those that run. views: told what changes."""

    def __init__(self, pool: BlockPool, block_size: int, rows: BlockRows, views: SequenceViews) -> None:
        self._pool = pool
        self._block_size = block_size
        self._rows = rows
        self._views = views

    def batch(self, runs: Ordered[Progress], earlier: Flight | None) -> Batch:
        """Bind the blocks that the work will write, and lay it out. The place where memory safety is asserted."""
        assert len({sequence.row for sequence, _ in runs}) == len(runs), "a plan names a sequence once"
        rows = np.array([sequence.row for sequence, _ in runs], np.int32)
        firsts = np.array([sequence.computed for sequence, _ in runs], np.int32)
        known = np.array([sequence.known() for sequence, _ in runs], np.int32)
        counts = np.array([count for _, count in runs], np.int32)
        ends, size = firsts + counts, np.int32(self._block_size)
        assert np.minimum(counts - 1, known - ends).min() >= 0, f"{counts} of {known - firsts}"
        needed = -(-ends // size)
        missing = needed - self._rows.lengths(rows)
        for at in np.flatnonzero(missing > 0).tolist():
            self.extend(runs[at].sequence, int(missing[at]))
        copies = self._unshared(runs, self._rows.at(rows, firsts // size))
        batch = lay_out(
            token_ids=_tokens(runs) if earlier is None else _read_tokens(runs),
            firsts=firsts,
            counts=counts,
            wanted=ends == known,
            block_tables=self._rows.tables(rows, int(needed.max())),
            block_size=self._block_size,
            copies=copies,
        )
        assert not self._pool.unwritable(batch.slots // size), "a block that is not the writer's alone"
        return batch if earlier is None else replace(batch, unread=_unread(runs, batch, earlier))

    def _unshared(self, runs: Ordered[Progress], blocks: Int32s) -> tuple[BlockCopy, ...]:
        """Copy on write: a block that the next run goes on in becomes the sequence's own. blocks: the first that each
        run writes. The last one to write a shared block has it for itself and copies nothing."""
        copies = []
        for at in self._pool.unwritable(blocks):
            sequence = runs[at].sequence
            table, credit, row = sequence.table, sequence.credit, sequence.row
            assert table is not None and credit is not None and row is not None
            first = sequence.computed // self._block_size
            if self._pool.shared(table, first):
                source, target = self._pool.unshare(table, first, credit)
                self._rows.replace(row, first, target)
                self._views.change(sequence)
                copies.append(BlockCopy(source=source, target=target))
            else:
                self._pool.unpublish(table, first)
        return tuple(copies)

    def extend(self, sequence: Sequence, blocks: int) -> None:
        """Blocks that were promised, then blocks that nobody has."""
        table = sequence.table
        assert table is not None and sequence.credit is not None
        before, promised = len(table), min(blocks, sequence.credit.blocks)
        if promised:
            self._pool.extend(table, promised, sequence.credit)
        if promised < blocks:
            credit = self._pool.grant(table.owner, blocks - promised)
            self._pool.extend(table, blocks - promised, credit)
            self._pool.waive(credit)
        if sequence.row is not None:
            self._rows.extend(sequence.row, table.ids(before))
            self._views.change(sequence)


def _tokens(runs: Ordered[Progress]) -> list[int]:
    """What the runs compute, one after the other."""
    if all(count == 1 for _, count in runs):
        return [sequence.tokens[sequence.computed] for sequence, _ in runs]
    return [token for one, count in runs for token in one.tokens[one.computed : one.computed + count]]


def _read_tokens(runs: Ordered[Progress]) -> list[int]:
    """The same, where some are pending: 0 in their places."""
    return [
        token for one, count in runs for token in (one.tokens[one.computed : one.computed + count] or (0,))
    ]


def _unread(runs: Ordered[Progress], batch: Batch, earlier: Flight) -> Unread | None:
    """Those pending tokens."""
    waiting = [at for at, (one, _) in enumerate(runs) if one.computed >= len(one.tokens)]
    if not waiting:
        return None
    assert earlier.drawing is not None
    place_of = {one.id: place for place, one in enumerate(earlier.complete)}
    indices = [place_of[runs[at].sequence.id] for at in waiting]
    return Unread(
        places=batch.query_starts[waiting].astype(np.int64),
        indices=np.array(indices, np.int64),
        drawn=earlier.drawing.tokens,
    )
