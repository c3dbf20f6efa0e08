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
        self._finishing = False
        self._closed = asyncio.Event()

    def __len__(self) -> int:
        """Messages that wait."""
        return len(self._messages)

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def put(self, message: Message) -> None:
        """Queue a message. After `close` or `finish` it is dropped; one too many closes."""
        if self.closed or self._finishing:
            return
        if len(self._messages) >= self._messages_max:
            self.close()
            return
        self._messages.append(message)
        self._wake.set()

    def finish(self) -> None:
        """Take nothing more; close when what waits was taken."""
        self._finishing = True
        self._wake.set()

    def close(self) -> None:
        """End the stream; what still waits is not sent."""
        self._closed.set()
        self._messages.clear()
        self._wake.set()

    async def wait_closed(self) -> None:
        """A reader that is busy with a message may never come back for the end: wait here to cut it."""
        await self._closed.wait()

    async def drain(self) -> AsyncIterator[Message]:
        """Messages as they come, until closed. One reader."""
        while not self.closed:
            while self._messages:
                yield self._messages.popleft()
            if self._finishing:
                self.close()
            self._wake.clear()
            if not self._messages and not self.closed:
                await self._wake.wait()
