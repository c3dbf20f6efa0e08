"""A lane of copies on the processor that does nothing before somebody waits for it: see `CopyLane`.

Whoever reads a copy, or writes over its source, without having waited, gets what it deserves. Steps may lag too.
"""

import torch


class LaggingLane:
    """Work given to `step` is done when a copy comes after it; what a test does itself is done at once."""

    device = torch.device("cpu")

    def __init__(self):
        self._steps, self._copies, self._after = [], [], 0

    def step(self, work):
        self._steps.append(work)

    def host_memory(self, shape, dtype):
        return torch.full(tuple(shape), 77, dtype=dtype)

    def after_steps(self):
        self._after = len(self._steps)

    def gather(self, kv, blocks, to):
        blocks = list(blocks)
        return self._asked(lambda: to.copy_(kv[blocks]))

    def scatter(self, kv, blocks, values):
        blocks = list(blocks)
        assert len(set(blocks)) == len(blocks)
        return self._asked(lambda: kv.index_put_((torch.tensor(blocks),), values))

    def steps_after(self, mark):
        mark.wait()

    def _asked(self, copy):
        self._copies.append((self._after, copy))
        return _Mark(self._copies, self._steps, len(self._copies))


class _Mark:
    def __init__(self, copies, steps, place):
        self._copies, self._steps, self._place = copies, steps, place

    def wait(self):
        """Do what is left, in order, and before each copy the steps that it comes after."""
        for index, (after, copy) in enumerate(self._copies[: self._place]):
            for turn, work in enumerate(self._steps[:after]):
                self._steps[turn] = _nothing
                work()
            self._copies[index] = (0, _nothing)
            copy()


def _nothing():
    pass
