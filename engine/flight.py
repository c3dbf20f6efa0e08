"""A step that was begun, and whose tokens nobody has read."""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import torch

from engine.batch import Int64s
from engine.runs import Draws
from engine.sampling import Drawing
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """draws: for whom a token is drawn, from these rows of logits, in order; they may have gone on since. positions:
    int64 [n], of these tokens. drawing: by which they are drawn already; None where that needs a look at the tokens so
    far."""

    draws: Draws
    positions: Int64s
    logits: torch.Tensor
    drawing: Drawing | None

    def __post_init__(self) -> None:
        rows = self.logits.shape[0]
        assert rows == len(self.complete), f"{rows} rows for {len(self.complete)} sequences"

    @property
    def complete(self) -> Ordered[Sequence]:
        return self.draws.sequences
