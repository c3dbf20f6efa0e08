"""A lane of copies on a device, beside the steps: what a cache there asks of it. Knows blocks as bytes.

Copies of one lane are done in the order in which they were asked for. They and the steps are in no order but that which
`after_steps` and `steps_after` make, and the host sees nothing of a copy before it has waited for its mark.
"""

from collections.abc import Sequence
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in a lane."""

    def wait(self) -> None:
        """The caller waits until all that was asked for before is done."""
        ...


class CopyLane(Protocol):
    """See the module. One caller at a time, on the step thread."""

    device: torch.device

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host that copies come from and go to, of any contents."""
        ...

    def after_steps(self) -> None:
        """What is asked for from now on is done after what the steps have begun so far."""
        ...

    def gather(self, kv: torch.Tensor, blocks: Sequence[int], to: torch.Tensor) -> Mark:
        """Copy these blocks of the cache kv [blocks, ...] into host memory [n, ...]."""
        ...

    def scatter(self, kv: torch.Tensor, blocks: Sequence[int], values: torch.Tensor) -> Mark:
        """Copy host memory [n, ...], which stays as it is until the mark, into these blocks, no two the same."""
        ...

    def steps_after(self, mark: Mark) -> None:
        """What the steps begin from now on is done after this one of the lane's marks. The caller waits for nothing."""
        ...
