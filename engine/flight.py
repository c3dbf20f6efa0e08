"""A step that was begun, and whose tokens nobody has read."""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import torch

from engine.batch import Int64s
from engine.runs import Draws
from engine.sampling import Drawing
from engine.scheduling.pace import Load
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """draws: for whom a token is drawn, from these rows of logits, in order; they may have gone on since. positions:
    int64 [n], of these tokens. drawing: by which they are drawn already; None where that needs a look at the tokens so
    far. load: of the device. ahead: whether a later step reads them."""

    draws: Draws
    positions: Int64s
    logits: torch.Tensor
    drawing: Drawing | None
    load: Load
    ahead: bool

    def __post_init__(self) -> None:
        rows = self.logits.shape[0]
        assert rows == len(self.complete), f"{rows} rows for {len(self.complete)} sequences"

    @property
    def overlapped(self) -> bool:
        """Whether the device computes it beside what is done until somebody reads it."""
        return self.ahead and self.drawing is not None and not self.drawing.settled

    @property
    def complete(self) -> Ordered[Sequence]:
        return self.draws.sequences


def timed(begun: Flight | None, landed: Flight | None) -> Flight | None:
    """Which of them a step's time went to, where it has begun the one and left it in the air, and landed the other."""
    if begun is not None and not begun.overlapped:
        return begun
    return landed if landed is not None and (landed.overlapped or not landed.ahead) else None
