"""The bytes of all blocks on a device, and a place in host memory for each. Never decides when to copy."""

import mmap
from collections.abc import Sequence

import torch

from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from engine.collective import WHOLE, Share


class StagedKVCache(KVCache):
    """See KVCache. `tensor` is on the device, and has the rank's heads; `block_view` shows the place in host memory,
    whose pages are taken from the system when they are first written. Both directions wait for the device."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device,
        memory: mmap.mmap | None = None,
        share: Share = WHOLE,
    ) -> None:
        super().__init__(layout, num_blocks, memory, share)
        self.tensor = torch.zeros(self._own.shape, dtype=layout.dtype, device=device)

    def populate(self) -> bool:
        """Nothing: few blocks are ever handed over at once."""
        return False

    def to_host(self, blocks: Sequence[int]) -> None:
        places = torch.tensor(list(blocks), dtype=torch.int64)
        self._own[places] = self.tensor[places.to(self.tensor.device)].cpu()

    def from_host(self, blocks: Sequence[int]) -> None:
        places = torch.tensor(list(blocks), dtype=torch.int64)
        self.tensor[places.to(self.tensor.device)] = self._own[places].to(self.tensor.device)
