"""How many calls of one kind may be open at once, where they are open for long and cost their callers nothing.

Beyond the bound a call gives way of the host that has most, and there of the connection that has most, so that whoever
has few is not kept out by whoever has many. Serves no call and knows no method.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.errors import Exhausted


class BoundedCalls:
    """calls_max: open at once, of all peers together."""

    def __init__(self, calls_max: int) -> None:
        self._calls_max = calls_max
        self._by_host: dict[str, dict[str, dict[asyncio.Timeout, None]]] = {}
        self._open = 0

    @asynccontextmanager
    async def room(self, peer: str) -> AsyncIterator[None]:
        """For one call, until the block ends. peer: the connection that it came on, as gRPC names it. Raises Exhausted
        within it when the call has to give way. Its initial metadata must have been sent: to give up sending it is to
        lose the status too."""
        if self._open >= self._calls_max:
            self._make_room()
        try:
            async with asyncio.timeout(None) as call:
                self._by_host.setdefault(_host(peer), {}).setdefault(peer, {})[call] = None
                self._open += 1
                try:
                    yield
                finally:
                    self._leave(peer, call)
        except TimeoutError:
            if not call.expired():
                raise
            text = "too many calls of this kind are open; this one gave way to others"
            raise Exhausted(text, reason="TOO_MANY_CALLS", retry_after_ms=1000) from None

    def _make_room(self) -> None:
        """Of connections that have as many the newest gives a call up, and of its calls the oldest."""
        connections = max(self._by_host.values(), key=lambda peers: sum(map(len, peers.values())))
        peer, calls = max(reversed(connections.items()), key=lambda each: len(each[1]))
        oldest = next(iter(calls))
        self._leave(peer, oldest)
        oldest.reschedule(asyncio.get_running_loop().time())

    def _leave(self, peer: str, call: asyncio.Timeout) -> None:
        host = _host(peer)
        connections = self._by_host.get(host, {})
        calls = connections.get(peer, {})
        if call not in calls:
            return
        del calls[call]
        self._open -= 1
        if not calls:
            del connections[peer]
        if not connections:
            del self._by_host[host]


def _host(peer: str) -> str:
    """Without the port."""
    return peer.rpartition(":")[0]
