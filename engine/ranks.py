"""The rank that plans and those that follow: what they are told, and what is done on both sides.

One rank has the scheduler, the ledger and the sampler. The others hear of each step as a Batch, run it on their share
of the model, and forget it: they plan nothing and sample nothing. How they are told is an argument; nothing here knows
a network.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from engine.batch import Batch, ModelRunner
from engine.cache.copy_lane import CopyLane
from engine.cache.copying import Action, Begin, nothing
from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from engine.cache.staged_cache import StagedKVCache
from engine.collective import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class ToHost:
    """Blocks, by their ids, are wanted in host memory. See KVCache."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FromHost:
    """Blocks, by their ids, were written in host memory. See KVCache."""

    blocks: tuple[int, ...]


Work: TypeAlias = Batch | ToHost | FromHost


class Followers(Protocol):
    """All other ranks, as the one that plans reaches them. What one of them is refused for is raised as CapacityError;
    one that is gone, or does not answer in time, as RankLost."""

    @property
    def collective(self) -> Collective: ...

    def loaded(self, free_bytes: int | None) -> int | None:
        """Wait until each has its share of the model. free_bytes: see `Loaded`; returns the least of all ranks."""
        ...

    def open(self, num_blocks: int, layout: KVLayout) -> mmap.mmap:
        """Let each have its cache over one memory, which is zero and holds whole blocks, and be ready for work."""
        ...

    def tell(self, work: Work) -> None:
        """To be done next, in order."""
        ...

    def await_done(self) -> None:
        """Wait until each has done what it was told last. To be asked once for each ToHost and FromHost."""
        ...


class LedRunner:
    """A ModelRunner of all ranks. own: of this one."""

    def __init__(self, own: ModelRunner, followers: Followers) -> None:
        self._own = own
        self._followers = followers

    def run(self, batch: Batch) -> torch.Tensor:
        self._followers.tell(batch)
        return self._own.run(batch)


class LedStagedCache(StagedKVCache):
    """A StagedKVCache of all ranks: each copies its own heads, and who asks for a copy waits for all."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        lane: CopyLane,
        memory: mmap.mmap,
        followers: Followers,
    ) -> None:
        super().__init__(layout, num_blocks, lane, memory, followers.collective.share)
        self._followers = followers

    def copy_beside(self, begin: Begin) -> bool:
        """Not yet: who plans is the one that others answer, and copies would be a second one."""
        return False

    def to_host(self, blocks: Sequence[int], read: Action, then: Action) -> None:
        if blocks:
            self._followers.tell(ToHost(blocks=tuple(blocks)))
            super().to_host(blocks, nothing, nothing)
            self._followers.await_done()
        read()
        then()

    def from_host(self, blocks: Sequence[int], then: Action) -> None:
        if blocks:
            self._followers.tell(FromHost(blocks=tuple(blocks)))
            super().from_host(blocks, nothing)
            self._followers.await_done()
        then()

    def store(self, blocks: Sequence[int], memory: KVCache, places: Sequence[int]) -> None:
        """By way of its own host memory, which has the heads of all."""
        KVCache.store(self, blocks, memory, places)

    def restore(self, blocks: Sequence[int], memory: KVCache, places: Sequence[int]) -> None:
        KVCache.restore(self, blocks, memory, places)


class Follower:
    """A rank that does as it is told, one thing after the other."""

    def __init__(self, runner: ModelRunner, cache: KVCache) -> None:
        self._runner = runner
        self._cache = cache

    def do(self, work: Work) -> bool:
        """Whether somebody waits to hear that it is done. Raises RankLost."""
        match work:
            case Batch():
                self._runner.run(work)
                return False
            case ToHost(blocks=blocks):
                self._cache.to_host(blocks, nothing, nothing)
            case FromHost(blocks=blocks):
                self._cache.from_host(blocks, nothing)
        return True
