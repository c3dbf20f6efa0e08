"""The bytes of all blocks on a device, and a place in host memory for each. Never decides when to copy."""

import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import cycle

import torch

from engine.cache.copy_lane import CopyLane, Mark
from engine.cache.copying import Action, Begin, Copy, at_once, nothing
from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from engine.collective import WHOLE, Share

STAGED_BYTES = 8 << 20
"""Of each stage: enough that to begin a copy costs little beside it."""


class StagedKVCache(KVCache):
    """See KVCache. `tensor` is on the lane's device, and has the rank's heads; `block_view` shows the place in host
    memory, whose pages are taken from the system when they are first written.

    Copies go beside the steps, through two stages in turn: the host copies one while the lane copies the other. Until
    it is told who makes them, whoever asks for a copy makes it and waits. From any one thread.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        lane: CopyLane,
        memory: mmap.mmap | None = None,
        share: Share = WHOLE,
        *,
        staged_bytes: int = STAGED_BYTES,
    ) -> None:
        super().__init__(layout, num_blocks, memory, share)
        self.tensor = torch.zeros(self._own.shape, dtype=layout.dtype, device=lane.device)
        self._lane = lane
        self._begin: Begin = at_once
        at_once_max = min(num_blocks, max(1, staged_bytes // layout.block_bytes()))
        self._stages = _Stages(lane, self.tensor, at_once_max)
        self._stages_of_swapping = _Stages(lane, self.tensor, at_once_max)

    def populate(self) -> bool:
        """Nothing: few blocks are ever handed over at once."""
        return False

    def copy_beside(self, begin: Begin) -> bool:
        self._begin = begin
        return True

    def to_host(self, blocks: Sequence[int], read: Action, then: Action) -> None:
        self._begin(self._out(tuple(blocks), self._lane.steps(), read), then)

    def from_host(self, blocks: Sequence[int], then: Action) -> None:
        blocks = tuple(blocks)
        self._begin(self._stages.fill(blocks, self._own, blocks, self._lane.steps()), then)

    def store(self, blocks: Sequence[int], memory: KVCache, places: Sequence[int]) -> None:
        at_once(self._stages_of_swapping.drain(blocks, memory.tensor, places, self._lane.steps()), nothing)

    def restore(self, blocks: Sequence[int], memory: KVCache, places: Sequence[int]) -> None:
        at_once(self._stages_of_swapping.fill(blocks, memory.tensor, places, self._lane.steps()), nothing)

    def _out(self, blocks: Sequence[int], since: Mark, read: Action) -> Copy:
        yield from self._stages.drain(blocks, self._own, blocks, since)
        read()


class _Stages:
    """Two pieces of host memory that copies between a device's blocks and host memory go through in turn. One thread
    at a time, one copy after the other. kv: [blocks, ...] on the device. blocks_max: of each stage."""

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
