"""The bytes of all blocks on one device. Knows positions and bytes; never who owns them."""

import numpy as np
import torch

from engine.cache.layout import KVLayout


class KVCache:
    """[blocks, layers, 2, block_size, kv_heads, head_dim] in the layout's dtype.

    A block is one run of bytes.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device | None = None) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (num_blocks, *layout.block_shape())
        self.tensor = torch.zeros(shape, dtype=layout.dtype, device=device or torch.device("cpu"))

    def block_view(self, block: int) -> memoryview:
        """The block's bytes, writable, without a copy. For a host-resident cache."""
        assert 0 <= block < self.num_blocks, block
        array: np.ndarray[tuple[int], np.dtype[np.uint8]] = (
            self.tensor[block].view(torch.uint8).reshape(-1).numpy()
        )
        return array.data
