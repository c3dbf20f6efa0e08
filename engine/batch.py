"""The validated work of one step: what a ModelRunner executes.

Built by the core from a Plan. Flat and of varying length: prompt chunks and single tokens mix. Plain lists, so
that the types below know no device; the runner turns them into its own tensors.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchItem:
    """A run of consecutive tokens of one sequence.

    tokens: the ids to compute; first_position: absolute position of tokens[0]; block_table: ids of all blocks up
    to and including the one that holds the run's last token; wants_logits: whether the row of the last token is
    sampled from.
    """

    tokens: tuple[int, ...]
    first_position: int
    block_table: tuple[int, ...]
    wants_logits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """The contents of block `source` are wanted in block `target` too. Ids of two blocks."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """All runs of one step, in order. At least one, each with at least one token. copies: done in order,
    before anything is computed."""

    items: tuple[BatchItem, ...]
    copies: tuple[BlockCopy, ...] = ()

    def num_tokens(self) -> int:
        return sum(len(item.tokens) for item in self.items)


class ModelRunner(Protocol):
    """Batch to logits on one device."""

    def run(self, batch: Batch) -> torch.Tensor:
        """Compute the batch and write its KV.

        Returns float32 logits [count of items that want logits, vocab_size], in item order. What a row holds is
        a function of its sequence's tokens alone, never of the rest of the batch.
        """
        ...
