"""How many calls of one kind may be open at once, where they are open for long and cost their callers nothing.

Beyond the bound the oldest call of the peer that has most gives way, so that whoever has few is not kept out by whoever
has many. Serves no call and knows no method.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.errors import Exhausted


class BoundedCalls:
    """calls_max: open at once, of all peers together."""

    def __init__(self, calls_max: int) -> None:
        self._calls_max = calls_max
        self._by_peer: dict[str, dict[asyncio.Timeout, None]] = {}
        self._open = 0

    @asynccontextmanager
    async def room(self, peer: str) -> AsyncIterator[None]:
        """For one call, until the block ends. Raises Exhausted within it when the call has to give way. Its initial
        metadata must have been sent: to give up sending it is to lose the status too."""
        if self._open >= self._calls_max:
            self._make_room()
        try:
            async with asyncio.timeout(None) as call:
                self._by_peer.setdefault(peer, {})[call] = None
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
        peer, calls = max(self._by_peer.items(), key=lambda each: len(each[1]))
        oldest = next(iter(calls))
        self._leave(peer, oldest)
        oldest.reschedule(asyncio.get_running_loop().time())

    def _leave(self, peer: str, call: asyncio.Timeout) -> None:
        calls = self._by_peer.get(peer, {})
        if call not in calls:
            return
        del calls[call]
        self._open -= 1
        if not calls:
            del self._by_peer[peer]
