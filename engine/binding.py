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
from engine.runs import Runs
from engine.sequence import Progress, Sequence
from engine.views import SequenceViews


class Binder:
    """rows: block ids of those that run. views: told what changes."""

    def __init__(self, pool: BlockPool, block_size: int, rows: BlockRows, views: SequenceViews) -> None:
        self._pool = pool
        self._block_size = block_size
        self._rows = rows
        self._views = views

    def batch(self, runs: Runs, earlier: Flight | None) -> Batch:
        """Bind the blocks that the work will write, and lay it out. The place where memory safety is asserted."""
        size = self._block_size
        missing = runs.ends - self._rows.lengths(runs.rows) * size
        for at in (missing > 0).nonzero()[0].tolist():
            self.extend(runs.progress[at].sequence, self._views.blocks_for(int(missing[at])))
        tokens = _tokens(runs) if earlier is None else _read_tokens(runs.progress)
        batch = self._laid_out(runs, tokens)
        if self._pool.unwritable(batch.slots // size):
            copies = self._unshared(runs.progress, self._rows.at(runs.rows, runs.firsts // size))
            batch = self._laid_out(runs, tokens, copies)
            assert not self._pool.unwritable(batch.slots // size), "a block that is not the writer's alone"
        return batch if earlier is None else replace(batch, unread=_unread(runs.progress, batch, earlier))

    def _laid_out(self, runs: Runs, tokens: list[int], copies: tuple[BlockCopy, ...] = ()) -> Batch:
        return lay_out(
            runs.shape,
            token_ids=tokens,
            firsts=runs.firsts,
            block_tables=self._rows.tables(runs.rows, self._views.blocks_for(runs.longest)),
            block_size=self._block_size,
            copies=copies,
        )

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
            self._pool.grow(table, blocks - promised)
        if sequence.row is not None:
            self._rows.extend(sequence.row, table.ids(before))
            self._views.change(sequence)


def _tokens(runs: Runs) -> list[int]:
    """What the runs compute, one after the other."""
    if runs.steady:
        return [one.tokens[-1] for one in runs.draws.sequences]
    return [
        token for one, count in runs.progress for token in one.tokens[one.computed : one.computed + count]
    ]


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
