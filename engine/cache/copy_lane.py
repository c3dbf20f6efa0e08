"""A lane of copies on a device, beside the steps: what a cache there asks of it. Knows blocks as bytes.

Copies of one lane are done in the order in which they were asked for. Each comes after the steps that it is told to
come after; beyond that they and the steps are in no order, and the host sees nothing of a copy before it has waited for
its mark.
"""

from collections.abc import Sequence
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in a lane, or among the steps."""

    def wait(self) -> None:
        """The caller waits until all that was asked for before is done."""
        ...


class CopyLane(Protocol):
    """See the module. From any thread, except `steps`."""

    device: torch.device

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host that copies come from and go to, of any contents."""
        ...

    def steps(self) -> Mark:
        """After all that the steps have begun so far. For the thread that begins them, which waits for nothing."""
        ...

    def gather(self, kv: torch.Tensor, blocks: Sequence[int], to: torch.Tensor, after: Mark) -> Mark:
        """Copy these blocks of the cache kv [blocks, ...] into host memory [n, ...]. after: a mark of the steps."""
        ...

    def scatter(self, kv: torch.Tensor, blocks: Sequence[int], values: torch.Tensor, after: Mark) -> Mark:
        """Copy host memory [n, ...], which stays as it is until the mark, into these blocks, no two the same."""
        ...
