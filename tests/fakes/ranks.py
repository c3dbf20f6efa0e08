"""Ranks as threads of one process, which put their parts together in memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import torch

from engine.collective import Share

PATIENCE_S = 60


class ThreadRanks:
    """Where `size` ranks meet; each takes part with `of(rank)`. gathered: how often they did. in_turns: between two
    meetings one computes after the other."""

    def __init__(self, size, *, in_turns=False):
        self._turn = threading.Lock() if in_turns else None
        self.size, self.gathered = size, 0
        self._parts = [None] * size
        self._barrier = threading.Barrier(size)

    def of(self, rank):
        return ThreadRank(self, rank)

    def all_gather(self, rank, x):
        self._parts[rank] = x
        with self._others_turn():
            self._barrier.wait(PATIENCE_S)
            together = torch.cat(self._parts, dim=1)
            self.gathered += rank == 0
            self._barrier.wait(PATIENCE_S)
        return together

    def run(self, work):
        """What `work(collective)` returns on each rank, in order."""
        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(lambda rank: self._guarded(work, rank), range(self.size)))

    def _guarded(self, work, rank):
        try:
            with self._turn or nullcontext():
                return work(self.of(rank))
        except BaseException:
            self._barrier.abort()
            raise

    @contextmanager
    def _others_turn(self):
        if self._turn is None:
            yield
            return
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()


class ThreadRank:
    """See engine.collective.Collective."""

    def __init__(self, ranks, rank):
        self._ranks = ranks
        self.share = Share(rank=rank, size=ranks.size)

    def all_gather(self, x):
        assert x.is_contiguous() and x.dtype == torch.float32, (x.stride(), x.dtype)
        return self._ranks.all_gather(self.share.rank, x)
