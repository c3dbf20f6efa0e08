"""Long work on what clients have written, on threads of its own: parsing a body, tokenising a text, writing an answer.

The faces and the frontend await `run`. One piece of work for each thread at a time, and tenants take turns, by the
bytes that are looked at; within a tenant, whoever came first. Knows no requests and refuses nothing: whoever waits here
holds a place in `gateway.admission`, whose bounds are those of this queue.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gateway.fair_queue import FairQueue

THREADS = 2
"""So that nobody waits behind one long text of somebody else."""
INLINE_BYTES_MAX = 2048
"""Up to here, looking at it costs the event loop less than the way to another thread and back."""

T = TypeVar("T")


class Reading:
    """weight: of a tenant's share of the threads, above 0."""

    def __init__(
        self, weight: Callable[[str], float] = lambda tenant: 1.0, *, threads: int = THREADS
    ) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="reading")
        self._free = threads
        self._queue: FairQueue[_Work] = FairQueue(weight)

    async def run(
        self,
        work: Callable[[], T],
        *,
        tenant: str,
        size_bytes: int,
        inline_bytes_max: int = INLINE_BYTES_MAX,
    ) -> T:
        """What work makes. size_bytes: of what it looks at. Whoever leaves while it waits leaves nothing behind; what
        has begun on a thread is done to its end."""
        if size_bytes <= inline_bytes_max:
            return work()
        waiting = _Work(work, asyncio.get_running_loop())
        entry = self._queue.push(tenant, size_bytes, 0.0, waiting)
        self._look()
        try:
            made: T = await waiting.made
            return made
        finally:
            self._queue.leave(entry)

    def _look(self) -> None:
        """Begin with whoever is next, on each thread that is free."""
        while self._free and (entry := self._queue.first()) is not None:
            self._queue.go(entry)
            self._free -= 1
            entry.item.begin(self._threads, self._done)

    def _done(self) -> None:
        self._free += 1
        self._look()


class _Work:
    """made: what it makes, or raises."""

    def __init__(self, work: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.made: asyncio.Future[Any] = loop.create_future()
        self._work = work
        self._loop = loop

    def begin(self, threads: ThreadPoolExecutor, done: Callable[[], None]) -> None:
        """done: called when the thread is free again."""

        def ended(running: "asyncio.Future[Any]") -> None:
            done()
            error = running.exception()
            if self.made.done():  # whoever asked has gone
                return
            if error is None:
                self.made.set_result(running.result())
            else:
                self.made.set_exception(error)

        self._loop.run_in_executor(threads, self._work).add_done_callback(ended)
