"""An event loop whose clock jumps to the next timer as soon as nothing else is to be done."""

import asyncio


class VirtualTime(asyncio.SelectorEventLoop):
    def __init__(self):
        super().__init__()
        self._now = 0.0

    def time(self):
        return self._now

    def _run_once(self):
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0].when())
        super()._run_once()


def run(main):
    """The result of a coroutine, whose seconds take no time."""
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(main)
