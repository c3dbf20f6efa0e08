"""How the ranks of one engine stand to each other: which share is whose, and how parts are put together.

A rank is one of several processes that compute a step together, each with its share of the model. What connects them is
an argument: nothing here knows a network.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """rank: in [0, size). size: how many ranks there are."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, (self.rank, self.size)

    def of(self, count: int) -> slice:
        """Which of `count` things side by side are this rank's: as many for each, but for the last ones, which may have
        fewer or none."""
        each = -(-count // self.size)
        return slice(min(self.rank * each, count), min((self.rank + 1) * each, count))


WHOLE = Share(rank=0, size=1)


class Collective(Protocol):
    """What the ranks of one step say to each other. All of them make the same calls in the same order."""

    @property
    def share(self) -> Share: ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [T, n] of each rank, T >= 1, on the backend's device -> [T, size * n] for all of them: side by side,
        in the order of the ranks, contiguous. Waits for the others. Raises RankLost."""
        ...


class Alone:
    """A collective of one."""

    share = WHOLE

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


ALONE = Alone()
