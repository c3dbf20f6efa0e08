"""What has come of a request's answers and its client has not read yet: one batch for each choice, which grows.

Between the coroutine that follows the attempts at a request and the one that its client reads. A client that reads late
is told more at once and keeps no worker, and nobody else, waiting. Bounded by the request: a journal takes no more
tokens than were asked for. One reader, event loop only.
"""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from gateway.mailbox import Mailbox, Unwanted
from gateway.request import Token, TokenBatch


class Arrivals:
    """unread: choices that the reader wants no more of, which it adds to."""

    def __init__(self, unread: Collection[int]) -> None:
        self._unread = unread
        self._told: set[int] = set()
        self._held: dict[int, TokenBatch | _Grown] = {}
        self._mailboxes: list[Mailbox] = []
        self._reader: asyncio.Future[None] | None = None
        self._work: asyncio.Future[None] | None = None

    def put(self, batch: TokenBatch) -> None:
        held = self._held.get(batch.choice)
        if held is None:
            self._held[batch.choice] = batch
        elif isinstance(held, _Grown):
            held.add(batch)
        else:
            self._held[batch.choice] = _Grown(held, batch)
        self._wake()

    def end(self, work: "asyncio.Future[None]") -> None:
        """No more comes. work: is done; how it ended is how the answers do. Only the first end counts."""
        self._work = self._work or work
        self._wake()

    def fail(self, error: Exception) -> None:
        """The answers end in this way, whatever comes of the work."""
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failed.set_exception(error)
        failed.exception()  # nobody may ask any more
        self.end(failed)

    async def take(self) -> list[TokenBatch]:
        """Everything that has come; waits for something. Nothing once all was taken and no more comes, unless that
        raises."""
        if not self._held and self._work is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        held, self._held = self._held, {}
        if not held and self._work is not None:
            self._work.result()
        return [each.batch() if isinstance(each, _Grown) else each for each in held.values()]

    @contextmanager
    def followed(self, mailbox: Mailbox) -> Iterator[None]:
        """While this runs, the mailbox is told which choices are not read any more."""
        for choice in self._told:
            mailbox.put("", Unwanted(choice=choice))
        self._mailboxes.append(mailbox)
        try:
            yield
        finally:
            self._mailboxes.remove(mailbox)

    def look(self) -> None:
        """For the reader, after each batch: it may have said that it wants no more of a choice."""
        if len(self._unread) == len(self._told):
            return
        for choice in sorted(set(self._unread) - self._told):
            self._told.add(choice)
            for mailbox in self._mailboxes:
                mailbox.put("", Unwanted(choice=choice))

    def wanted(self, choice: int) -> bool:
        return choice not in self._told

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)


class _Grown:
    """Batches of one choice, as one."""

    __slots__ = ("_first", "_last", "_tokens")

    def __init__(self, first: TokenBatch, second: TokenBatch) -> None:
        self._first = first
        self._last = second
        self._tokens: list[Token] = [*first.tokens, *second.tokens]

    def add(self, batch: TokenBatch) -> None:
        self._last = batch
        self._tokens += batch.tokens

    def batch(self) -> TokenBatch:
        """What is told of the prompt comes with the first of its tokens, the end with the last ones."""
        return self._first._replace(tokens=tuple(self._tokens), end=self._last.end)
