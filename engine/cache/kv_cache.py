"""The bytes of all blocks in host memory. Knows positions and bytes; never who owns them."""

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np
import torch

from engine.cache.copying import Action, Begin, nothing
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

    def copy_beside(self, begin: Begin) -> bool:
        """From now on who asks for a copy does not wait for it. False where there is none to wait for."""
        return False

    def to_host(self, blocks: Sequence[int], read: Action, then: Action) -> None:
        """Bring what was computed to host memory, where it already is here. Until `then` somebody keeps the blocks, and
        nobody writes them.

        read: views of them may be read from now on; called on whichever thread copies. then: called afterwards on the
        caller's. What is asked for later, of no blocks too, is called later."""
        read()
        then()

    def from_host(self, blocks: Sequence[int], then: Action) -> None:
        """Views of these blocks were written: bring that to where it is computed with, where it already is here. Until
        `then`, which is called on the caller's thread, somebody keeps the blocks, and nobody else writes, or
        computes with, either."""
        then()

    def store(self, blocks: Sequence[int], memory: "KVCache", places: Sequence[int]) -> None:
        """Copy blocks to these places of other host memory. The caller waits."""
        self.to_host(blocks, nothing, nothing)
        for place, block in zip(places, blocks, strict=True):
            memory.block_view(place)[:] = self.block_view(block)

    def restore(self, blocks: Sequence[int], memory: "KVCache", places: Sequence[int]) -> None:
        """Copy what was stored into these blocks. The caller waits."""
        for place, block in zip(places, blocks, strict=True):
            self.block_view(block)[:] = memory.block_view(place)
        self.from_host(blocks, nothing)
