"""The bytes of all blocks in host memory. Knows positions and bytes; never who owns them."""

import mmap
from collections.abc import Sequence

import numpy as np
import torch

from engine.cache.layout import KVLayout


class KVCache:
    """[blocks, *layout.block_shape()] in the layout's dtype.

    A block is one run of bytes. Memory is zero, and taken from the system only when it is first written.
    """

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        memory = mmap.mmap(-1, num_blocks * layout.block_bytes())
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(
                mmap.MADV_HUGEPAGE
            )  # a few large pages: fewer faults, and faster reads across layers
        flat = torch.frombuffer(memory, dtype=layout.dtype)
        self._host = flat.view(num_blocks, *layout.block_shape())
        self.tensor = self._host

    def block_view(self, block: int) -> memoryview:
        """The block's bytes in host memory, writable, without a copy. See to_host and from_host."""
        assert 0 <= block < self.num_blocks, block
        array: np.ndarray[tuple[int], np.dtype[np.uint8]] = (
            self._host[block].view(torch.uint8).reshape(-1).numpy()
        )
        return array.data

    def to_host(self, blocks: Sequence[int]) -> None:
        """Said before views of these blocks are read: what was computed is in host memory from now on. Here it is."""

    def from_host(self, blocks: Sequence[int]) -> None:
        """Said after views of these blocks were written: what is computed next sees it. Here it does."""
