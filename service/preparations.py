"""Submissions that need work before the step thread can take them: done on a thread of their own, one after the other.

Lives on the event loop. What a gateway says of an attempt in the meantime waits for it, so that a cancel never
overtakes what it cancels; what a gateway asked for that has gone is dropped.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from service.guide_compiler import GuideCompiler
from service.guides import GuideRefused
from service.orders import AttemptKey, SequenceOrder

PREPARATIONS_MAX = 1024
AFTERWARDS_MAX = 64
"""Of one attempt: an end for each choice and a cancel are less."""

Action = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Later:
    """work: makes the action, or raises what a submission may raise. Any thread."""

    work: Callable[[], Action]


class TooManyPreparations(Exception):
    """One line."""


def guided(
    begin: Callable[..., None], order: SequenceOrder, compiler: GuideCompiler | None
) -> Action | Later:
    """What begins an order. begin: takes what the order's guide allows, where it has one, as one more argument."""
    guide = order.guide
    if guide is None:
        return begin
    if compiler is None:
        raise GuideRefused("there is no compiler for guides here")
    return Later(lambda: partial(begin, compiler.matcher(guide, order.answered())))


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """prepared: the work. afterwards: what is to follow, in order."""

    prepared: asyncio.Future[Action]
    afterwards: list[Action] = field(default_factory=list)


class Preparations:
    """One at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="preparations")
        self._waiting: dict[tuple[str, AttemptKey], _Waiting] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(
        self, gateway: str, key: AttemptKey, later: Later, take: Callable[[Callable[[], Action]], None]
    ) -> None:
        """Do the work, then give `take` what yields the action, or raises. The same attempt again is ignored. Raises
        TooManyPreparations."""
        name = (gateway, key)
        if name in self._waiting:
            return
        if len(self._waiting) >= PREPARATIONS_MAX:
            raise TooManyPreparations(f"{PREPARATIONS_MAX} requests are being prepared")
        prepared = asyncio.wrap_future(self._thread.submit(later.work))
        waiting = self._waiting[name] = _Waiting(prepared=prepared)
        task = asyncio.create_task(self._prepare(name, waiting, take))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def follow(self, gateway: str, key: AttemptKey, action: Action) -> bool:
        """Have this done once the attempt is submitted. False for one that is not being prepared. Raises
        TooManyPreparations."""
        waiting = self._waiting.get((gateway, key))
        if waiting is None:
            return False
        if len(waiting.afterwards) >= AFTERWARDS_MAX:
            raise TooManyPreparations(f"{AFTERWARDS_MAX} messages wait for one request")
        waiting.afterwards.append(action)
        return True

    def drop(self, gateway: str) -> None:
        """The gateway has gone, and nothing of what it asked for is wanted: what has not begun is not done."""
        for name in [name for name in self._waiting if name[0] == gateway]:
            prepared = self._waiting.pop(name).prepared
            if not prepared.cancel():
                prepared.exception()  # nobody else asks

    async def _prepare(
        self, name: tuple[str, AttemptKey], waiting: _Waiting, take: Callable[[Callable[[], Action]], None]
    ) -> None:
        await asyncio.wait([waiting.prepared])
        if self._waiting.get(name) is not waiting:
            return
        del self._waiting[name]
        take(waiting.prepared.result)
        for action in waiting.afterwards:
            action()
