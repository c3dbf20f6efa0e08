"""The validated work of one step, laid out flat: what a ModelRunner executes.

Built by the core from a Plan. Prompt chunks and single tokens mix. Numpy arrays, so that the types below know no
device; the runner turns them into its own tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Int32s: TypeAlias = NDArray[np.int32]
Int64s: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """The contents of block `source` are wanted in block `target` too. Ids of two blocks."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """Tokens of a batch that an earlier step draws and nobody has read. places: int64 [k], in T. indices: int64 [k],
    which of the drawn ones they are. drawn: int64 [n], where they were drawn."""

    places: Int64s
    indices: Int64s
    drawn: torch.Tensor

    def put_into(self, token_ids: torch.Tensor) -> None:
        """token_ids: of the batch or of one that begins with it, on the device of those that were drawn."""
        places, indices = (torch.from_numpy(each) for each in (self.places, self.indices))
        if self.drawn.device.type != "cpu":
            places, indices = (
                each.pin_memory().to(self.drawn.device, non_blocking=True) for each in (places, indices)
            )
        token_ids[places] = self.drawn[indices]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """All runs of one step, in order: S of them with T tokens together. At least one, each of consecutive tokens of one
    sequence, and at least one token.

    token_ids: int64 [T]. positions: int32 [T], absolute. slots: int64 [T], where each token's KV goes: block id *
    block size + offset. query_starts: int32 [S + 1], where each run begins in T, and T. context_lengths: int32 [S],
    tokens of the sequence up to the run's last one. block_tables: int32 [S, most blocks]; what a run does not need is
    -1 or a block of the same sequence. rows: int64 [n], ascending places in T whose logits are wanted. copies: done in
    order, before anything is computed. unread: what token_ids do not hold.
    """

    token_ids: Int64s
    positions: Int32s
    slots: Int64s
    query_starts: Int32s
    context_lengths: Int32s
    block_tables: Int32s
    rows: Int64s
    copies: tuple[BlockCopy, ...] = ()
    unread: Unread | None = None

    def num_tokens(self) -> int:
        return len(self.token_ids)


class ModelRunner(Protocol):
    """Batch to logits on one device."""

    def run(self, batch: Batch) -> torch.Tensor:
        """Compute the batch and write its KV.

        Returns float32 logits [rows, vocab_size], in the order of `batch.rows`. What a row holds is a function of its
        sequence's tokens alone, never of the rest of the batch.
        """
        ...


class Shape:
    """What of a batch does not change while the same sequences take as many tokens each, step after step.

    counts: int32 [S], tokens of each run, at least one. wanted: bool [S], whether logits of its last token are."""

    def __init__(self, counts: Int32s, wanted: NDArray[np.bool_]) -> None:
        self.counts = counts
        self.starts: Int32s = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=self.starts[1:])
        self.rows: Int64s = (self.starts[1:][wanted] - 1).astype(np.int64)
        self._runs: Int64s = np.repeat(np.arange(len(counts)), counts)
        self._steps: Int32s = np.arange(len(self._runs), dtype=np.int32) - self.starts[:-1][self._runs]
        self._single = len(self._runs) == len(counts)

    def positions(self, firsts: Int32s) -> Int32s:
        """int32 [T]. firsts: of each run's first token."""
        return firsts if self._single else firsts[self._runs] + self._steps

    def blocks(self, tables: Int32s, indices: Int32s) -> Int64s:
        """int64 [T]: of each token the block that is at this index of its run's table."""
        return tables[self._runs, indices].astype(np.int64)


def lay_out(
    shape: Shape,
    *,
    token_ids: Sequence[int],
    firsts: Int32s,
    block_tables: Int32s,
    block_size: int,
    copies: tuple[BlockCopy, ...] = (),
) -> Batch:
    """firsts: the position of each run's first token. token_ids: of all runs in order."""
    positions = shape.positions(firsts)
    indices = positions // block_size
    blocks = shape.blocks(block_tables, indices)
    assert blocks.min() >= 0, "a block table ends before its sequence's last token"
    return Batch(
        token_ids=np.array(token_ids, np.int64),
        positions=positions,
        slots=(blocks - indices) * block_size + positions,
        query_starts=shape.starts,
        context_lengths=firsts + shape.counts,
        block_tables=block_tables,
        rows=shape.rows,
        copies=copies,
    )
