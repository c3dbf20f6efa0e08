"""A lane of copies on a GPU: a stream of its own, pinned host memory, whole blocks gathered and scattered at once."""

from collections.abc import Sequence

import torch

from engine.cache.copy_lane import Mark
from engine.kernels.triton.blocks import gather_blocks, scatter_blocks


class CudaMark:
    """See copy_lane.Mark. Whoever waits for it sleeps: a core that only looked would be one less for the steps, and
    would pass for one that computes where the device hangs."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()


class CudaCopyLane:
    """See CopyLane. What a copy needs on the device besides is taken from the stream's own memory, so that it is not
    used again before the copy is done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def steps(self) -> Mark:
        return CudaMark(torch.cuda.current_stream(self.device))

    def gather(self, kv: torch.Tensor, blocks: Sequence[int], to: torch.Tensor, after: Mark) -> Mark:
        with torch.cuda.stream(self._stream):
            self._come_after(after)
            to.copy_(gather_blocks(kv, self._ids(blocks)), non_blocking=True)
            return CudaMark(self._stream)

    def scatter(self, kv: torch.Tensor, blocks: Sequence[int], values: torch.Tensor, after: Mark) -> Mark:
        with torch.cuda.stream(self._stream):
            self._come_after(after)
            scatter_blocks(kv, self._ids(blocks), values.to(self.device, non_blocking=True))
            return CudaMark(self._stream)

    def _come_after(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark), mark
        self._stream.wait_event(mark.event)

    def _ids(self, blocks: Sequence[int]) -> torch.Tensor:
        """Pinned, since a copy of other memory waits for the stream."""
        return torch.tensor(blocks, dtype=torch.int64).pin_memory().to(self.device, non_blocking=True)
