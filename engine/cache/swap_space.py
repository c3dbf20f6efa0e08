"""Host memory for the blocks of sequences that were given up, and its own ledger.

free + owned = total, always. What was stored for somebody stays until it is restored or dropped. Called by the core
alone, on the step thread; copies bytes, and never decides who comes here or goes back.
"""

from collections import Counter
from collections.abc import Sequence

from engine.cache.block_pool import OwnedBlocks
from engine.cache.block_table import Owner, OwnerKind
from engine.cache.kv_cache import KVCache
from engine.sequence import SequenceId


class SwapSpace:
    """blocks: as many of the cache's blocks as fit here. Memory is taken from the system when it is first used."""

    def __init__(self, cache: KVCache, blocks: int) -> None:
        self._cache = cache
        self._memory = KVCache(cache.layout, blocks)
        self._free = list(range(blocks))
        self._owned: dict[SequenceId, list[int]] = {}

    @property
    def free(self) -> int:
        """Blocks."""
        return len(self._free)

    def store(self, who: SequenceId, blocks: Sequence[int]) -> None:
        """Copy these blocks of the cache. The caller has looked whether they fit."""
        assert who not in self._owned, who
        assert len(blocks) <= len(self._free), f"{len(blocks)} blocks for {len(self._free)} places"
        self._owned[who] = [self._free.pop() for _ in blocks]
        self._cache.store(blocks, self._memory, self._owned[who])

    def restore(self, who: SequenceId, first: int, blocks: Sequence[int]) -> None:
        """Copy what was stored, from its block `first` on, into these blocks of the cache, and keep nothing of it."""
        self._cache.restore(blocks, self._memory, self._owned[who][first:])
        self.drop(who)

    def drop(self, who: SequenceId) -> None:
        """It will not come back."""
        self._free += self._owned.pop(who)

    def owners(self) -> tuple[OwnedBlocks, ...]:
        return tuple(
            OwnedBlocks(owner=Owner(OwnerKind.SWAPPED, who[0]), blocks=len(places))
            for who, places in self._owned.items()
        )

    def violations(self) -> tuple[str, ...]:
        """A recount; empty when the books balance."""
        times = Counter([*self._free, *(place for places in self._owned.values() for place in places)])
        found = [
            f"swapped block {place} is there {count} times" for place, count in times.items() if count > 1
        ]
        lost = self._memory.num_blocks - len(times)
        return (*found, f"{lost} swapped blocks are nowhere") if lost else tuple(found)
