"""A simulated process with an event loop: what workers and gateways have in common."""

from tests.simulation.agenda import Process, Thread
from tests.simulation.virtual_loop import VirtualLoop


class Looped(Process):
    """A process with an event loop and streams that lead to it."""

    def __init__(self, world, name, **pace):
        super().__init__(world, name, **pace)
        self.pipes = []
        self.loop_thread = Thread(self, self._loop_turn)
        self.loop = VirtualLoop(self.clock, self.loop_thread.wake, self._on_crash)
        self.epoch = world.dice.getrandbits(63)

    def end(self):
        """The process is no more: nothing that it still does has an effect."""
        self.alive = False
        self.loop.end()

    def _loop_turn(self):
        now = self.agenda.now
        self.pipes = [pipe for pipe in self.pipes if pipe.arrive(now)]
        pause_s = self.loop.turn()
        for pipe in self.pipes:
            arrival = pipe.next_arrival()
            if arrival is not None:
                self.loop_thread.wake(arrival)
        return pause_s

    def spawn(self, coroutine):
        """Run a coroutine; if it fails, the history fails."""
        task = self.loop.create_task(coroutine)
        task.add_done_callback(self._done)
        self.loop_thread.wake()
        return task

    def _done(self, task):
        if not task.cancelled() and task.exception() is not None:
            self._on_crash({"exception": task.exception()})

    def _on_crash(self, context):
        if self.alive:
            self.world.crashed(context.get("exception") or AssertionError(context["message"]))
