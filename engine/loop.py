"""The step thread: drains its inbox, then steps, for ever.

Owns the thread and the inbox. Whoever wants something of the engine posts an action, which runs between two steps.
Never waits for anything but its own inbox. An exception on this thread is a mistake of ours: it is given to
`on_crash` and the thread ends (fail-stop), since a half-done step cannot be trusted.
"""

import threading
from collections import deque
from collections.abc import Callable

from engine.core import EngineCore
from engine.errors import EngineError
from engine.results import StepResult


class InboxFull(EngineError):
    """More actions are waiting than the inbox may hold."""


class EngineLoop:
    """Runs from `start` on; without it, whoever calls `turn` runs it (a simulation).

    on_step: gets what a step did. on_turn: called with the number of steps after each batch of actions and after
    each step, when everything that came of it is known. on_start: called first, on the step thread. on_rest: called
    when there is nothing to do, before it waits. on_compute: called before the first step, and the first after a rest.
    chore: a little work that can wait, done when there is nothing else to do, until it returns that none is left.
    inbox_actions_max: posted actions that may wait at once. clock: seconds, monotonic."""

    def __init__(
        self,
        core: EngineCore,
        *,
        clock: Callable[[], float],
        on_step: Callable[[StepResult], None],
        on_turn: Callable[[int], None],
        on_crash: Callable[[BaseException], None],
        on_start: Callable[[], None] = lambda: None,
        on_compute: Callable[[], None] = lambda: None,
        on_rest: Callable[[], None] = lambda: None,
        chore: Callable[[], bool] = lambda: False,
        inbox_actions_max: int,
    ) -> None:
        self._core = core
        self._clock = clock
        self._on_step = on_step
        self._on_turn = on_turn
        self._on_crash = on_crash
        self._on_start = on_start
        self._on_compute = on_compute
        self._on_rest = on_rest
        self._chore = chore
        self._chores_left = True
        self._inbox: deque[Callable[[], None]] = deque()
        self._inbox_actions_max = inbox_actions_max
        self._wake = threading.Condition()
        self._stopping = False
        self._resting = True
        self._ended = 0.0
        self._steps = 0
        self._stuck = False
        self._thread = threading.Thread(target=self._guarded, name="engine-step", daemon=True)

    @property
    def steps(self) -> int:
        """Steps done since start; moves as long as there is work."""
        return self._steps

    def start(self) -> None:
        self._thread.start()

    def post(self, action: Callable[[], None]) -> None:
        """Run an action on the step thread between two steps, in order. From any thread; never blocks.

        Raises InboxFull.
        """
        with self._wake:
            if len(self._inbox) >= self._inbox_actions_max:
                raise InboxFull(f"{self._inbox_actions_max} actions are waiting")
            self._put(action)

    def insist(self, action: Callable[[], None]) -> None:
        """As `post`, and never refused: for what must not be lost, and has its bound where it comes from."""
        with self._wake:
            self._put(action)

    def stop(self) -> None:
        """Finish the current step and end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def due(self) -> bool:
        """Whether a turn would do anything. A step that found nothing to do is not tried again before an action."""
        return bool(self._inbox) or not (self._stuck or self._core.idle())

    def turn(self) -> None:
        """What was posted, then a step if there is something to compute. For the thread, or for a simulation."""
        with self._wake:
            actions = tuple(self._inbox)
            self._inbox.clear()
        for action in actions:
            action()
        if actions:
            self._on_turn(self._steps)
        if self._core.idle():
            return
        if self._resting:
            self._resting = False
            self._on_compute()
        started = self._clock()
        result = self._core.step(started)
        before, self._ended = self._ended, self._clock()
        if result.load is not None:
            self._core.measured(result.load, self._ended - (before if result.overlapped else started))
        self._steps += 1
        self._stuck = result.empty()
        self._on_step(result)
        self._on_turn(self._steps)

    def _put(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._wake.notify()

    def _guarded(self) -> None:
        try:
            self._on_start()
            self._run()
        except BaseException as crash:
            self._on_crash(crash)

    def _run(self) -> None:
        while self._await_due():
            self.turn()

    def _await_due(self) -> bool:
        """False when it is time to end."""
        if not self._over_or_due():
            self._resting = True
            self._on_rest()
            while self._chores_left and not self._over_or_due():
                self._chores_left = self._chore()
        with self._wake:
            self._wake.wait_for(self._over_or_due)
            return not self._stopping

    def _over_or_due(self) -> bool:
        return self._stopping or self.due()
