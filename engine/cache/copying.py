"""The thread that copies blocks beside the steps, one copy after the other.

Owns the thread and the copies that wait for it. Whoever begins one goes on at once, and is told when it is done. Never
chooses what is copied and never frees a block: what is being copied stays with its owner until then. An exception on
this thread is a mistake of ours: it is given to `on_crash` and the thread ends (fail-stop), since whoever waits would
wait for ever.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

Action: TypeAlias = Callable[[], None]
Copy: TypeAlias = Iterator[None]
"""Makes a part of a copy with each step."""
Begin: TypeAlias = Callable[[Copy, Action], None]
"""Has a copy made, and afterwards an action run on the caller's thread; all of them in the order in which they came."""


def nothing() -> None:
    """Nobody waits for it."""


def at_once(copy: Copy, then: Action) -> None:
    """For a caller that waits."""
    for _ in copy:
        pass
    then()


class Copying:
    """Runs from `start` on; without it, whoever calls `turn` runs it (a simulation). tell: runs an action on the thread
    that begins copies, in order; never refuses. on_start: called first, on the thread. What waits here has its bound
    where it comes from: whoever keeps blocks has each of them copied once."""

    def __init__(
        self,
        tell: Callable[[Action], None],
        on_crash: Callable[[BaseException], None],
        on_start: Action = nothing,
    ) -> None:
        self._tell = tell
        self._on_crash = on_crash
        self._on_start = on_start
        self._waiting: deque[tuple[Copy, Action]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._guarded, name="engine-copy", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin(self, copy: Copy, then: Action) -> None:
        """See Begin. Never blocks."""
        with self._wake:
            self._waiting.append((copy, then))
            self._wake.notify()

    def due(self) -> bool:
        """Whether a turn would do anything."""
        return bool(self._waiting)

    def turn(self) -> None:
        """Some of the oldest copy. For the thread, or for a simulation."""
        copy, then = self._waiting[0]
        if next(copy, self) is self:
            self._waiting.popleft()
            self._tell(then)

    def stop(self) -> None:
        """End the thread, if there is one. Copies that are not done stay so, and nobody is told."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _guarded(self) -> None:
        try:
            self._on_start()
            while self._await_due():
                self.turn()
        except BaseException as crash:
            self._on_crash(crash)

    def _await_due(self) -> bool:
        """False when it is time to end."""
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or self.due())
            return not self._stopping
