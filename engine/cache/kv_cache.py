"""The bytes of all blocks in host memory. Knows positions and bytes; never who owns them."""

import mmap

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
        self.tensor = flat.view(num_blocks, *layout.block_shape())

    def block_view(self, block: int) -> memoryview:
        """The block's bytes, writable, without a copy."""
        assert 0 <= block < self.num_blocks, block
        array: np.ndarray[tuple[int], np.dtype[np.uint8]] = (
            self.tensor[block].view(torch.uint8).reshape(-1).numpy()
        )
        return array.data
