"""Counts by name, written by one thread and read by any."""

import threading
from collections import Counter

COMMITTED_OVER = "committed_over."
"""Hand-offs of a source that were committed; what follows is the scheme of the endpoint."""


class Counters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def read(self) -> dict[str, int]:
        """A copy."""
        with self._lock:
            return dict(self._counts)
