"""A lane of copies on the processor that does nothing before somebody waits for it: see `CopyLane`.

Whoever reads a copy, or writes over its source, without having waited, gets what it deserves. Steps may lag too.
"""

from collections import deque

import torch


class LaggingLane:
    """Work given to `step` is done when a copy comes after it; what a test does itself is done at once."""

    device = torch.device("cpu")

    def __init__(self):
        self._steps, self._stepped = deque(), 0
        self._copies, self._copied = deque(), 0

    def step(self, work):
        self._steps.append(work)

    def host_memory(self, shape, dtype):
        return torch.full(tuple(shape), 77, dtype=dtype)

    def steps(self):
        return _Mark(self, self._stepped + len(self._steps), 0)

    def gather(self, kv, blocks, to, after):
        blocks = list(blocks)
        return self._asked(lambda: to.copy_(kv[blocks]), after)

    def scatter(self, kv, blocks, values, after):
        blocks = list(blocks)
        assert len(set(blocks)) == len(blocks)
        return self._asked(lambda: kv.index_put_((torch.tensor(blocks),), values), after)

    def do(self, steps, copies):
        """What is left of the first so many, in order, and before each copy the steps that it comes after."""
        while self._copied < copies:
            self._copied += 1
            after, copy = self._copies.popleft()
            self.do(after, 0)
            copy()
        while self._stepped < steps:
            self._stepped += 1
            self._steps.popleft()()

    def _asked(self, copy, after):
        self._copies.append((after.steps, copy))
        return _Mark(self, 0, self._copied + len(self._copies))


class _Mark:
    def __init__(self, lane, steps, copies):
        self._lane, self.steps, self._copies = lane, steps, copies

    def wait(self):
        self._lane.do(self.steps, self._copies)
