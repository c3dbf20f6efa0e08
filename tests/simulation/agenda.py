"""What happens next: the one clock of a history, and the threads that it gives turns to.

Nothing sleeps. A thread is woken for some instant, and gets its turn a random moment later, as on a busy machine.
Time goes on by jumping to the next turn, so that waiting costs nothing.
"""

from heapq import heappop, heappush
from itertools import count
from math import inf


class Agenda:
    def __init__(self):
        self.now = 0.0
        self.steps = 0
        self._heap = []
        self._tie = count()

    def at(self, when, action):
        heappush(self._heap, (max(when, self.now), next(self._tie), action))

    def after(self, seconds, action):
        self.at(self.now + seconds, action)

    def step(self):
        """Let the next thing happen; False when there is nothing that ever will."""
        if not self._heap:
            return False
        self.now, _, action = heappop(self._heap)
        self.steps += 1
        action()
        return True


class Thread:
    """One thread of a process. turn: does its work, and returns in how many seconds of the process's clock it wants
    to be woken if nothing happens, None for never."""

    def __init__(self, process, turn):
        self._process = process
        self._turn = turn
        self._due = inf

    def wake(self, at=None):
        """Have a turn soon, or soon after some instant of the world's clock."""
        agenda = self._process.agenda
        when = (agenda.now if at is None else max(at, agenda.now)) + self._process.lag()
        if when < self._due:
            self._due = when
            agenda.at(when, self._run)

    def _run(self):
        process = self._process
        if process.agenda.now != self._due or not process.alive:
            return
        self._due = inf
        if process.frozen:
            process.on_thaw(self)
            return
        pause_s = self._turn()
        process.moved()
        if pause_s is not None:
            self.wake(process.agenda.now + pause_s / process.rate)


class Process:
    """One process start: its clock, its pace, whether it lives. rate: seconds of its clock in one of the world's."""

    def __init__(self, world, name, *, rate, lag_s):
        self.world = world
        self.agenda = world.agenda
        self.name = name
        self.rate = rate
        self.lag_s = lag_s
        self.alive = True
        self.frozen = False
        self._offset = world.dice.uniform(0, 1000)
        self._pending = []

    def clock(self):
        return self._offset + self.rate * self.agenda.now

    def lag(self):
        """Seconds until a woken thread runs."""
        return self.lag_s * 2 * self.world.dice.random()

    def moved(self):
        """A thread had a turn."""

    def freeze(self):
        """Stop every thread, as SIGSTOP does; the clock goes on."""
        self.frozen = True

    def thaw(self):
        self.frozen = False
        pending, self._pending = self._pending, []
        for thread in pending:
            thread.wake()

    def on_thaw(self, thread):
        self._pending.append(thread)
