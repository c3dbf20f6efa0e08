"""An asyncio event loop of one simulated process: its time is the process's clock, and it never waits.

Runs the very coroutines that production runs. Whoever simulates gives it turns; between them nothing moves.
"""

import asyncio
from asyncio import events

ROUNDS_MAX = 64


class VirtualLoop(asyncio.BaseEventLoop):
    """on_wake: called when something was put into the loop from outside of its turn. on_crash: gets the exception
    that a callback or a forgotten task ended with."""

    def __init__(self, clock, on_wake, on_crash):
        super().__init__()
        self._clock = clock
        self._on_wake = on_wake
        self._selector = self
        self.set_exception_handler(lambda _, context: on_crash(context))

    def time(self):
        return self._clock()

    def turn(self):
        """Run what is ready and due. Returns in how many seconds something will be due, None for never."""
        events._set_running_loop(self)
        try:
            self._run_once()
            for _ in range(ROUNDS_MAX):
                if not self._ready:
                    break
                self._run_once()
        finally:
            events._set_running_loop(None)
        if self._ready:
            return 0.0
        return max(0.0, self._scheduled[0].when() - self.time()) if self._scheduled else None

    def end(self):
        """Cancel every task and let each run its last: a process that was killed does not, but objects must not
        stay half-run in this one. What they do then has no effect, since the process is dead."""
        for task in asyncio.all_tasks(self):
            task.cancel()
        self.turn()
        left = asyncio.all_tasks(self)
        assert not left, f"tasks that do not end when they are cancelled: {left}"
        self.close()

    def select(self, timeout):
        """For the loop itself, which is its own selector: nothing ever comes from the system."""
        return ()

    def _process_events(self, event_list):
        pass

    def _write_to_self(self):
        self._on_wake()
