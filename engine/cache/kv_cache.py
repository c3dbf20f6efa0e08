"""The bytes of all blocks in host memory. Knows positions and bytes; never who owns them."""

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np
import torch

from engine.cache.layout import KVLayout
from engine.collective import WHOLE, Share

_MADV_POPULATE_WRITE = 23  # madvise(2), since Linux 5.14
_POPULATED_AT_ONCE_BYTES = 2 << 20
"""A large page: some milliseconds at most."""


class KVCache:
    """[blocks, *layout.block_shape()] in the layout's dtype; `tensor` is what a rank computes with: its own heads.

    A block is one run of bytes, of all heads. Memory is zero, and taken from the system when it is populated or first
    written, whichever comes first.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, memory: mmap.mmap | None = None, share: Share = WHOLE
    ) -> None:
        """memory: zero, of as many bytes, that other ranks see too; it is kept. None: some of its own."""
        self.layout = layout
        self.num_blocks = num_blocks
        memory = memory or mmap.mmap(-1, num_blocks * layout.block_bytes())
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(
                mmap.MADV_HUGEPAGE
            )  # a few large pages: fewer faults, and faster reads across layers
        self._populated = 0
        flat = torch.frombuffer(memory, dtype=layout.dtype)
        self._host = flat.view(num_blocks, *layout.block_shape())
        self._own = self.tensor = self._host[..., share.of(layout.kv_heads), :]

    def block_view(self, block: int) -> memoryview:
        """The block's bytes in host memory, writable, without a copy. See to_host and from_host."""
        assert 0 <= block < self.num_blocks, block
        array: np.ndarray[tuple[int], np.dtype[np.uint8]] = (
            self._host[block].view(torch.uint8).reshape(-1).numpy()
        )
        return array.data

    def populate(self) -> bool:
        """Take some more memory from the system, in the order of the blocks, so that whoever writes it need not wait.
        False when there is no more to take, or none is given."""
        left = self.num_blocks * self.layout.block_bytes() - self._populated
        if left <= 0:
            return False
        # Not by mmap's own method: that one keeps the interpreter meanwhile.
        place = ctypes.c_void_p(self._host.data_ptr() + self._populated)
        size = ctypes.c_size_t(min(left, _POPULATED_AT_ONCE_BYTES))
        if ctypes.CDLL(None).madvise(place, size, _MADV_POPULATE_WRITE) != 0:
            return False  # an older system: then by whoever writes first
        self._populated += _POPULATED_AT_ONCE_BYTES
        return True

    def to_host(self, blocks: Sequence[int]) -> None:
        """Said before views of these blocks are read: what was computed is in host memory from now on. Here it is."""

    def from_host(self, blocks: Sequence[int]) -> None:
        """Said after views of these blocks were written: what is computed next sees it. Here it does."""
