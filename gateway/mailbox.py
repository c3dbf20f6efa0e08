"""What the workers have said about one attempt and its coroutine has not read yet. One reader, event loop only.

Bounded by the attempt itself: a worker sends at most one report per token and a handful besides.
"""

import asyncio
from dataclasses import dataclass
from typing import TypeAlias

from service.reports import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """The stream to a worker of this attempt broke: it will say nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed:
    """The client waits no longer."""


Letter: TypeAlias = Report | WorkerLost | DeadlinePassed


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """sender: address of the worker that the letter is from, or that it is about; empty for the clock's."""

    sender: str
    letter: Letter


class Mailbox:
    """Deliveries in order of arrival."""

    def __init__(self) -> None:
        self._letters: list[Delivery] = []
        self._wake = asyncio.Event()

    def put(self, sender: str, letter: Letter) -> None:
        self._letters.append(Delivery(sender=sender, letter=letter))
        self._wake.set()

    async def take(self) -> list[Delivery]:
        """Everything that has arrived; waits for something."""
        await self._wake.wait()
        self._wake.clear()
        letters, self._letters = self._letters, []
        return letters
