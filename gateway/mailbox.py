"""What the workers have said about one attempt and its coroutine has not read yet. One reader, event loop only.

Bounded by the attempt itself: a worker sends at most one report per token and a handful besides. The coroutine waits
for nothing but its turn: whoever is late to read an answer is late at `gateway.arrivals`.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from service.reports import Report

READERS_AT_ONCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """The stream to a worker of this attempt broke: it will say nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed:
    """The client waits no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwanted:
    """The client wants no more of this choice."""

    choice: int


Letter: TypeAlias = Report | WorkerLost | DeadlinePassed | Unwanted


class Delivery(NamedTuple):
    """sender: address of the worker that the letter is from, or that it is about; empty for the clock's and the
    client's."""

    sender: str
    letter: Letter


class Turnstile:
    """Lets readers of mailboxes go on, a few in each turn of the event loop, in the order in which they came.

    What comes for one that still stands there joins what it has. So where more comes in than can be passed on,
    messages to clients grow, and not the queues before us. at_once: readers in one turn.
    """

    def __init__(self, at_once: int = READERS_AT_ONCE) -> None:
        self._at_once = at_once
        self._standing: deque[asyncio.Future[None]] = deque()

    def enter(self, reader: "asyncio.Future[None]") -> None:
        """reader: is done when it may go on."""
        self._standing.append(reader)
        if len(self._standing) == 1:
            reader.get_loop().call_soon(self._turn)

    def _turn(self) -> None:
        for _ in range(min(self._at_once, len(self._standing))):
            reader = self._standing.popleft()
            if not reader.done():
                reader.set_result(None)
        if self._standing:
            asyncio.get_running_loop().call_soon(self._turn)


class Mailbox:
    """Deliveries in order of arrival. turnstile: shared by all of a gateway."""

    def __init__(self, turnstile: Turnstile) -> None:
        self._turnstile = turnstile
        self._letters: list[Delivery] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, sender: str, letter: Letter) -> None:
        self._letters.append(Delivery(sender=sender, letter=letter))
        if self._reader is not None:
            self._turnstile.enter(self._reader)
            self._reader = None

    async def take(self) -> list[Delivery]:
        """Everything that has arrived; waits for something."""
        reader = asyncio.get_running_loop().create_future()
        if self._letters:
            self._turnstile.enter(reader)
        else:
            self._reader = reader
        await reader
        letters, self._letters = self._letters, []
        return letters
