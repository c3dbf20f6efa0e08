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


def lay_out(
    *,
    token_ids: Sequence[int],
    firsts: Int32s,
    counts: Int32s,
    wanted: NDArray[np.bool_],
    block_tables: Int32s,
    block_size: int,
    copies: tuple[BlockCopy, ...] = (),
) -> Batch:
    """firsts, counts: of each run, the position of its first token and its tokens, at least one. token_ids: of all runs
    in order. wanted: whether logits of the run's last token are."""
    starts = np.arange(len(counts) + 1, dtype=np.int32)
    run, positions = starts[:-1], firsts
    if len(token_ids) > len(counts):
        run = np.repeat(run, counts)
        np.cumsum(counts, out=starts[1:])
        positions = np.arange(len(token_ids), dtype=np.int32) + (firsts - starts[:-1])[run]
    index, offset = np.divmod(positions, np.int32(block_size))
    blocks = block_tables.take(run * np.int64(block_tables.shape[1]) + index).astype(np.int64)
    assert blocks.min() >= 0, "a block table ends before its sequence's last token"
    return Batch(
        token_ids=np.array(token_ids, np.int64),
        positions=positions,
        slots=blocks * block_size + offset,
        query_starts=starts,
        context_lengths=firsts + counts,
        block_tables=block_tables,
        rows=(starts[1:][wanted] - 1).astype(np.int64),
        copies=copies,
    )
