"""Whether an engine moves: the judgement of a worker on its own step thread.

The worker's shell asks it at even intervals and tells health and gateways. A thread that computes uses the processor,
and one that is idle answers an empty action; one that does neither is frozen, however busy it looks from outside. It
counts looks, not seconds: while the whole process stands still, or is short of processor, nothing is held against the
thread. Ends nothing and restarts nothing.
"""

import threading
import time
from collections.abc import Callable

LOOK_INTERVAL_S = 0.05
STILL_LOOKS_MAX = 12
TURN_LOOKS_MAX = 1200
"""A step of a minute is no step: whatever computes so long turns in a circle."""


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
    """insist: runs an action on the step thread between two steps. processor_ns: that the thread has used so far."""

    def __init__(self, insist: Callable[[Callable[[], None]], None], processor_ns: Callable[[], int]) -> None:
        self._insist = insist
        self._processor_ns = processor_ns
        self._used_ns = 0
        self._answered = True
        self._still = Stillness(STILL_LOOKS_MAX)
        self._endless = Stillness(TURN_LOOKS_MAX)

    def frozen(self) -> bool:
        """Whether the thread has neither computed nor answered for too long. To be asked every LOOK_INTERVAL_S."""
        used_ns, answered = self._processor_ns(), self._answered
        if answered:
            self._answered = False
            self._insist(self._answer)
        still = self._still.look(moved=answered or used_ns != self._used_ns)
        endless = self._endless.look(moved=answered)
        self._used_ns = used_ns
        return still or endless

    def _answer(self) -> None:
        self._answered = True


class ThreadClock:
    """Processor time of one thread, readable from any other."""

    def __init__(self) -> None:
        self._clock: int | None = None

    def start(self) -> None:
        """To be called on the thread that is meant."""
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def used_ns(self) -> int:
        """0 before the thread has started, and when it is gone."""
        if self._clock is None:
            return 0
        try:
            return time.clock_gettime_ns(self._clock)
        except OSError:
            return 0
