"""Runs checks in processes, each of which may crash, spoil its GPU or hang, and reports every one. Needs the standard
library alone.

A process runs one check after the other until something goes wrong in it, and ends with that: where a kernel has asked
for what is not there, the GPU refuses whatever its process asks afterwards. A check that does not answer in time is
given up with its process. Never tries one again: what goes wrong once has gone wrong.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:  # which imports triton, that must not be before it is said where it runs
    from benchmarks.gpu_place import Check

Outcome: TypeAlias = float | str
"""The error as a share of what is allowed, or what went wrong."""

_SPAWNING = get_context("spawn")


class Limits(NamedTuple):
    """Seconds. check_s: from when a process is given a check, which it may have to start for. whole_s: for all of them
    together; what has not answered then is given up."""

    check_s: float
    whole_s: float


def run_all(every: "Sequence[Check]", processes: int, limits: Limits) -> Iterator[tuple[str, Outcome]]:
    """(name, outcome) of each, in order, as soon as it is known. processes: at most so many at once."""
    crew = _Crew(every, processes, limits)
    try:
        for number, check in enumerate(every):
            while number not in crew.outcomes:
                crew.turn()
            yield check.name, crew.outcomes[number]
    finally:
        crew.end()


def end_with_parent() -> None:
    """From now on this process ends when the one that started it is gone, however that was."""

    def watch() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Crew:
    """outcomes: what is known, by the number of the check."""

    def __init__(self, every: "Sequence[Check]", processes: int, limits: Limits) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self._waiting = deque(enumerate(every))
        self._limits = limits
        self._give_up = time.monotonic() + limits.whole_s
        self._threads = max(1, len(os.sched_getaffinity(0)) // processes)
        self._processes_max = processes
        self._idle: list[_Process] = []
        self._busy: list[_Process] = []

    def turn(self) -> None:
        """Give out what can be, and wait until one answers or is late."""
        now = time.monotonic()
        while self._waiting and now < self._give_up and len(self._busy) < self._processes_max:
            self._begin(min(now + self._limits.check_s, self._give_up))
        if not self._busy:
            late = f"not begun in {self._limits.whole_s:.0f} s"
            self.outcomes |= {number: late for number, _ in self._waiting}
            return
        first_late = min(process.late for process in self._busy)
        answered = wait([process.connection for process in self._busy], max(0.0, first_late - now))
        now = time.monotonic()
        for process in list(self._busy):
            if process.connection in answered:
                self._done(process, process.answer())
            elif now >= process.late:
                self._done(process, f"no answer in {now - process.since:.0f} s: its process was killed")

    def end(self) -> None:
        for process in self._busy + self._idle:
            process.kill()

    def _begin(self, late: float) -> None:
        number, check = self._waiting.popleft()
        process = self._idle.pop() if self._idle else _Process(self._threads)
        process.begin(number, check.run, late)
        self._busy.append(process)

    def _done(self, process: "_Process", outcome: Outcome) -> None:
        self.outcomes[process.number] = outcome
        self._busy.remove(process)
        if isinstance(outcome, str):
            process.kill()
        else:
            self._idle.append(process)


class _Process:
    """number: of the check that it was given last. since, late: on the monotonic clock."""

    def __init__(self, threads: int) -> None:
        self.connection, theirs = _SPAWNING.Pipe()
        self._process = _SPAWNING.Process(target=_run_each, args=(theirs, threads))
        self._process.start()
        theirs.close()

    def begin(self, number: int, run: Callable[[], float], late: float) -> None:
        self.number, self.since, self.late = number, time.monotonic(), late
        with suppress(ConnectionError):  # then it does not answer either
            self.connection.send(run)

    def answer(self) -> Outcome:
        try:
            return self.connection.recv()  # type: ignore[no-any-return]
        except (EOFError, ConnectionError):
            return "the process died"

    def kill(self) -> None:
        """Nobody waits for it: a driver may not let go of it."""
        self._process.kill()
        self.connection.close()


def _run_each(connection: Connection, threads: int) -> None:
    """In each process, which has this one's environment, and has imported nothing yet."""
    end_with_parent()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from benchmarks import gpu_interpreter

        gpu_interpreter.install()
    while True:
        outcome = _outcome(connection.recv())
        connection.send(outcome)
        if isinstance(outcome, str):
            os._exit(1)


def _outcome(run: Callable[[], float]) -> Outcome:
    try:
        return run()
    except Exception as error:  # whatever a kernel that cannot be compiled or launched raises
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
