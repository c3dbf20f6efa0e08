"""Two pieces of host memory that copies between a device's blocks and other host memory go through in turn: the host
copies one while the lane copies the other.

One thread at a time, one copy after the other, each in small parts. Each byte is moved once by the host. Never decides
what is copied, or when.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import cycle

import torch

from engine.cache.copy_lane import CopyLane, Mark
from engine.cache.copying import Copy


class Stages:
    """kv: [blocks, ...] on the lane's device. blocks_max: of each stage."""

    def __init__(self, lane: CopyLane, kv: torch.Tensor, blocks_max: int) -> None:
        self._lane = lane
        self._kv = kv
        self._blocks_max = blocks_max
        self._stages = [_Stage(lane.host_memory((blocks_max, *kv.shape[1:]), kv.dtype)) for _ in range(2)]

    def drain(self, blocks: Sequence[int], host: torch.Tensor, places: Sequence[int], since: Mark) -> Copy:
        """Blocks as they are after a mark of the steps, to these places of host memory [any, ...]."""
        under_way: deque[tuple[_Stage, Sequence[int]]] = deque()
        for stage, at in self._turns(len(blocks)):
            if len(under_way) == len(self._stages):
                _land(*under_way.popleft(), host)
                yield
            stage.mark = self._lane.gather(self._kv, blocks[at], stage.memory[: len(blocks[at])], since)
            under_way.append((stage, places[at]))
            yield
        for landing in under_way:
            _land(*landing, host)
            yield

    def fill(self, blocks: Sequence[int], host: torch.Tensor, places: Sequence[int], since: Mark) -> Copy:
        """Into blocks that nobody uses any more after a mark of the steps, from these places of host memory."""
        for stage, at in self._turns(len(blocks)):
            stage.wait()
            for place, staged in zip(places[at], stage.memory, strict=False):
                staged.copy_(host[place])
            stage.mark = self._lane.scatter(self._kv, blocks[at], stage.memory[: len(blocks[at])], since)
            yield
        for stage in self._stages:
            stage.wait()

    def _turns(self, count: int) -> Iterator[tuple["_Stage", slice]]:
        """As many blocks at once as a stage holds."""
        firsts = range(0, count, self._blocks_max)
        for first, stage in zip(firsts, cycle(self._stages), strict=False):
            yield stage, slice(first, first + self._blocks_max)


class _Stage:
    """mark: of the last copy through its memory."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.mark: Mark | None = None

    def wait(self) -> None:
        if self.mark is not None:
            self.mark.wait()


def _land(stage: _Stage, places: Sequence[int], host: torch.Tensor) -> None:
    stage.wait()
    for place, staged in zip(places, stage.memory, strict=False):
        host[place].copy_(staged)
