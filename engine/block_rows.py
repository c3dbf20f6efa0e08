"""The block tables of those that run, side by side in one array, as a batch wants them.

A copy of what the tables say, kept up to date by the core, so that no step has to put it together again. Never owns a
block.
"""

from collections.abc import Sequence

import numpy as np

from engine.batch import Int32s, Int64s

ROWS_AT_FIRST = 16
WIDTH_AT_FIRST = 64
NOTHING = -1


class BlockRows:
    """int32 [rows, width], NOTHING behind the end of each table. Grows to what runs at once and to the longest table;
    rows are used again."""

    def __init__(self) -> None:
        self._blocks = np.full((ROWS_AT_FIRST, WIDTH_AT_FIRST), NOTHING, np.int32)
        self._lengths = np.zeros(ROWS_AT_FIRST, np.int32)
        self._free = list(range(ROWS_AT_FIRST - 1, -1, -1))

    def open(self, blocks: Sequence[int]) -> int:
        """A row for a table with these blocks."""
        if not self._free:
            self._add_rows()
        row = self._free.pop()
        self.extend(row, blocks)
        return row

    def extend(self, row: int, blocks: Sequence[int]) -> None:
        """The table has these, too, at its end."""
        first = int(self._lengths[row])
        self._lengths[row] = end = first + len(blocks)
        while self._blocks.shape[1] < end:
            self._blocks = np.pad(self._blocks, ((0, 0), (0, self._blocks.shape[1])), constant_values=NOTHING)
        self._blocks[row, first:end] = blocks

    def replace(self, row: int, position: int, block: int) -> None:
        """One block of the table is another one now."""
        self._blocks[row, position] = block

    def close(self, row: int) -> None:
        """The table runs no more."""
        self._blocks[row] = NOTHING
        self._lengths[row] = 0
        self._free.append(row)

    def lengths(self, rows: Int64s) -> Int32s:
        """Blocks of each of these."""
        return self._lengths.take(rows)

    def at(self, rows: Int64s, positions: Int32s) -> Int32s:
        """One block of each of these."""
        return self._blocks[rows, positions]

    def tables(self, rows: Int64s, width: int) -> Int32s:
        """[len(rows), width]: the beginning of each of these, as a copy."""
        return self._blocks[:, :width].take(rows, axis=0)

    def _add_rows(self) -> None:
        count = len(self._lengths)
        self._blocks = np.pad(self._blocks, ((0, count), (0, 0)), constant_values=NOTHING)
        self._lengths = np.pad(self._lengths, (0, count))
        self._free = list(range(2 * count - 1, count - 1, -1))
