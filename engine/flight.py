"""A step that was begun, and whose tokens nobody has read."""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import torch

from engine.sampling import Drawing
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """complete: for whom a token is drawn, from these rows of logits, in order. drawing: by which it is already; None
    where that needs a look at the tokens so far."""

    complete: Ordered[Sequence]
    logits: torch.Tensor
    drawing: Drawing | None

    def __post_init__(self) -> None:
        rows = self.logits.shape[0]
        assert rows == len(self.complete), f"{rows} rows for {len(self.complete)} sequences"
