"""A gRPC peer that does what no client does: it leaves messages unfinished, and takes nothing of what it is told."""

import asyncio
from contextlib import asynccontextmanager
from struct import Struct

from benchmarks.raw_client import RawClient

_PREFIX = Struct(">BI")
_HEADERS, _GOAWAY = 1, 7


class RawPeer(RawClient):
    """window_bytes: that it takes of each stream, all in all. begun: streams of which the server has sent a head."""

    def __init__(self, window_bytes):
        self.messages = asyncio.Queue()
        super().__init__(self.messages.put_nowait, window_bytes)
        self.begun = set()
        self._changed = asyncio.Event()

    def leave_unfinished(self, path, length, sent, *, last=False, **more):
        """A call whose message would have so many bytes, of which so many come. last: and it says that this is all.
        more: metadata."""
        self.send(self.begin(path, **more), _PREFIX.pack(0, length) + bytes(sent), last=last)

    async def until(self, holds):
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    def _frame_received(self, kind, flags, stream, payload):
        if kind == _GOAWAY:
            return
        if kind == _HEADERS:
            self.begun.add(stream)
        super()._frame_received(kind, flags, stream, payload)
        self._changed.set()


@asynccontextmanager
async def raw_peer(port, window_bytes=2**31 - 1):
    _, peer = await asyncio.get_running_loop().create_connection(
        lambda: RawPeer(window_bytes), "127.0.0.1", port
    )
    try:
        yield peer
    finally:
        peer.close()
