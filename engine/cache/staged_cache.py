"""The bytes of all blocks on a device, and a place in host memory for each. Never decides when to copy."""

import mmap
from collections.abc import Sequence

import torch

from engine.cache.copy_lane import CopyLane, Mark
from engine.cache.copying import Action, Begin, Copy, at_once, nothing
from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from engine.cache.stages import Stages
from engine.collective import WHOLE, Share

STAGED_BYTES = 8 << 20
"""Of each stage: enough that to begin a copy costs little beside it."""


class StagedKVCache(KVCache):
    """See KVCache. `tensor` is on the lane's device, and has the rank's heads; `block_view` shows the place in host
    memory, whose pages are taken from the system when they are first written.

    Until it is told who makes its copies, whoever asks for one makes it and waits. To swap is always to wait, through
    stages of its own, past what is copied beside.
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
        self._stages = Stages(lane, self.tensor, at_once_max)
        self._stages_of_swapping = Stages(lane, self.tensor, at_once_max)

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
