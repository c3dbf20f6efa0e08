"""What a process has to say to one peer over a long-lived stream: ordered, bounded, never waited for.

Lives on the event loop. `put` never blocks: a peer that does not read fast enough overflows its own outbox, and its
stream is then ended, which is what a dead peer gets.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

Message = TypeVar("Message")


class Outbox(Generic[Message]):
    """Messages in order of `put`. messages_max: how many may wait."""

    def __init__(self, messages_max: int) -> None:
        self._messages: deque[Message] = deque()
        self._messages_max = messages_max
        self._wake = asyncio.Event()
        self._closed = False
        self._finishing = False

    @property
    def closed(self) -> bool:
        return self._closed

    def put(self, message: Message) -> None:
        """Queue a message. After `close` or `finish` it is dropped."""
        if self._closed or self._finishing:
            return
        if len(self._messages) >= self._messages_max:
            self.close()
            return
        self._messages.append(message)
        self._wake.set()

    def finish(self) -> None:
        """Take nothing more; the stream ends when what waits was sent."""
        self._finishing = True
        self._wake.set()

    def close(self) -> None:
        """End the stream; what still waits is not sent."""
        self._closed = True
        self._messages.clear()
        self._wake.set()

    async def drain(self) -> AsyncIterator[Message]:
        """Messages as they come, until `close`, or until there are none after `finish`. One reader."""
        while not self._closed:
            while self._messages:
                yield self._messages.popleft()
            if self._finishing:
                self.close()
                return
            self._wake.clear()
            if not self._messages and not self._closed:
                await self._wake.wait()
