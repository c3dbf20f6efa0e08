"""What one worker has cached, as far as it has told: a set of hashes, bounded, empty whenever it is not sure.

Fed with the cache events of the worker's current stream. A number that is missing makes all of it unknown until the
next snapshot. A hint for the router and nothing more: what is really there is found out by the worker.
"""

from collections.abc import Iterable
from itertools import takewhile

from service.cache_events import HASH_BYTES, CacheEvents

BYTES_MAX = 16 << 20
"""Of hashes of one worker, whatever it says about the size of its cache."""


class PrefixMap:
    """hashes_max: as many as the worker has blocks; what it tells beyond is not kept."""

    def __init__(self, hashes_max: int = 0) -> None:
        self._hashes_max = min(hashes_max, BYTES_MAX // HASH_BYTES)
        self._hashes: set[bytes] = set()
        self._sequence: int | None = None

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, prefix_hash: bytes) -> bool:
        return prefix_hash in self._hashes

    @property
    def known(self) -> bool:
        """Whether it has all that the worker has told since its last snapshot."""
        return self._sequence is not None

    def take(self, events: CacheEvents) -> None:
        """Follow what the worker says."""
        if events.snapshot:
            self._hashes.clear()
        elif self._sequence is None or events.sequence != self._sequence + 1:
            self._hashes.clear()
            self._sequence = None
            return
        self._sequence = events.sequence
        self._hashes.difference_update(events.removed)
        self._hashes.update(events.added[: self._hashes_max - len(self._hashes)])

    def leading(self, hashes: Iterable[bytes]) -> int:
        """How many of these, from the first on, are there."""
        return sum(1 for _ in takewhile(self._hashes.__contains__, hashes))
