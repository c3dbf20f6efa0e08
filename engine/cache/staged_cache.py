"""The bytes of all blocks on a device, and a place in host memory for each. Never decides when to copy."""

import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import cycle

import torch

from engine.cache.copy_lane import CopyLane, Mark
from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from engine.collective import WHOLE, Share

STAGED_BYTES = 8 << 20
"""Of each stage: enough that to begin a copy costs little beside it."""


class StagedKVCache(KVCache):
    """See KVCache. `tensor` is on the lane's device, and has the rank's heads; `block_view` shows the place in host
    memory, whose pages are taken from the system when they are first written.

    Copies go beside the steps, through two stages in turn: the host copies one while the lane copies the other. The
    caller of to_host waits for the lane; after from_host only the steps that come later do.
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
        self._at_once = min(num_blocks, max(1, staged_bytes // layout.block_bytes()))
        shape = (self._at_once, *self._own.shape[1:])
        self._stages = [_Stage(lane.host_memory(shape, layout.dtype)) for _ in range(2)]

    def populate(self) -> bool:
        """Nothing: few blocks are ever handed over at once."""
        return False

    def to_host(self, blocks: Sequence[int]) -> None:
        self._lane.after_steps()
        under_way: deque[tuple[Sequence[int], _Stage]] = deque()
        for run, stage in self._runs(blocks):
            if len(under_way) == len(self._stages):
                self._land(*under_way.popleft())
            stage.mark = self._lane.gather(self.tensor, run, stage.memory[: len(run)])
            under_way.append((run, stage))
        for landing in under_way:
            self._land(*landing)

    def from_host(self, blocks: Sequence[int]) -> None:
        self._lane.after_steps()
        last: Mark | None = None
        for run, stage in self._runs(blocks):
            stage.wait()
            values = stage.memory[: len(run)]
            values.copy_(self._own[list(run)])
            stage.mark = last = self._lane.scatter(self.tensor, run, values)
        if last is not None:
            self._lane.steps_after(last)

    def _runs(self, blocks: Sequence[int]) -> Iterator[tuple[Sequence[int], "_Stage"]]:
        """As many blocks at once as a stage holds."""
        firsts = range(0, len(blocks), self._at_once)
        for first, stage in zip(firsts, cycle(self._stages), strict=False):
            yield blocks[first : first + self._at_once], stage

    def _land(self, run: Sequence[int], stage: "_Stage") -> None:
        stage.wait()
        self._own[list(run)] = stage.memory[: len(run)]


class _Stage:
    """Host memory that copies go through. mark: of the last one."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.mark: Mark | None = None

    def wait(self) -> None:
        if self.mark is not None:
            self.mark.wait()
