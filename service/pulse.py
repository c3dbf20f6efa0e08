"""Whether an engine moves: the judgement of a worker on its own step thread.

The worker's shell asks it at even intervals and tells health and gateways. A thread that computes uses the processor,
and one that is idle answers an empty action; one that does neither is frozen, however busy it looks from outside,
unless it is short of processor. It counts looks, not seconds: while the whole process stands still nothing is held
against the thread. Ends nothing and restarts nothing.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable

LOOK_INTERVAL_S = 0.05
STILL_LOOKS_MAX = 12
DEVICE_LOOKS_MAX = 100
"""Where the thread waits for a device: longer than its longest step, of which nothing is seen from here."""
TURN_LOOKS_MAX = 1200
"""A step of a minute is no step: whatever computes so long turns in a circle."""

_PROC = "/proc"
_TASKS = f"{_PROC}/self/task"


class Stillness:
    """Looks in a row that found nothing moved. looks_max: from so many on it counts."""

    def __init__(self, looks_max: int) -> None:
        self._looks_max = looks_max
        self._looks = 0

    def look(self, *, moved: bool) -> bool:
        """Whether nothing has moved for so long."""
        self._looks = 0 if moved else self._looks + 1
        return self._looks >= self._looks_max


class Pulse:
    """insist: runs an action on the step thread between two steps. processor_ns: that the thread has used so far.
    starved: whether it, or one that it waits for, would compute if it had a processor. still_looks_max: after so many
    without a move it is frozen."""

    def __init__(
        self,
        insist: Callable[[Callable[[], None]], None],
        processor_ns: Callable[[], int],
        starved: Callable[[], bool],
        still_looks_max: int = STILL_LOOKS_MAX,
    ) -> None:
        self._insist = insist
        self._processor_ns = processor_ns
        self._starved = starved
        self._used_ns = 0
        self._answered = True
        self._still = Stillness(still_looks_max)
        self._endless = Stillness(TURN_LOOKS_MAX)

    def frozen(self) -> bool:
        """Whether the thread has neither computed nor answered for too long, though it could have. To be asked every
        LOOK_INTERVAL_S."""
        used_ns, answered = self._processor_ns(), self._answered
        if answered:
            self._answered = False
            self._insist(self._answer)
        moved = answered or used_ns != self._used_ns or self._starved()
        still = self._still.look(moved=moved)
        endless = self._endless.look(moved=answered)
        self._used_ns = used_ns
        return still or endless

    def _answer(self) -> None:
        self._answered = True


class EngineThreads:
    """The step thread and those that compute for it, seen from any other. helpers: kernel ids of the latter, also
    in other processes."""

    def __init__(self, helpers: Iterable[int] = ()) -> None:
        self._ids = tuple(helpers)
        self._clock: int | None = None

    def start(self) -> None:
        """To be called on the step thread."""
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._ids += (threading.get_native_id(),)

    def used_ns(self) -> int:
        """Processor time of the step thread; 0 before it has started, and when it is gone."""
        if self._clock is None:
            return 0
        try:
            return time.clock_gettime_ns(self._clock)
        except OSError:
            return 0

    def starved(self) -> bool:
        """Whether any of them runs, or would if it had a processor: one that waits for a lock does not. A helper on a
        borrowed core may get none for a long time where others want that core, and the step thread waits for it."""
        return any(_runnable(thread) for thread in self._ids)


def other_threads() -> frozenset[int]:
    """Kernel ids of all threads of this process but the calling one; none where the system does not say."""
    try:
        found = frozenset(map(int, os.listdir(_TASKS)))
    except OSError:
        return frozenset()
    return found - {threading.get_native_id()}


def _runnable(thread: int) -> bool:
    try:
        with open(f"{_PROC}/{thread}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state == "R"
