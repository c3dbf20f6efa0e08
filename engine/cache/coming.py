"""Prefixes that somebody is computing or receiving, and that will soon be cached.

Whoever wants the same prefix may do better to wait for it than to begin it again. Counts links; promises nothing.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import takewhile

from engine.cache.prefix_chain import PrefixLink


class Coming:
    def __init__(self) -> None:
        self._hashes: Counter[bytes] = Counter()
        self._by: dict[Hashable, list[bytes]] = {}

    def announce(self, who: Hashable, links: Iterable[PrefixLink]) -> None:
        """`who` is going to have these."""
        assert who not in self._by, who
        self._by[who] = [link.hash for link in links]
        self._hashes.update(self._by[who])

    def settle(self, who: Hashable, links: Iterable[PrefixLink]) -> None:
        """These are cached now."""
        left = self._by.get(who)
        if left is not None:
            self._take(who, {link.hash for link in links} & set(left))

    def drop(self, who: Hashable) -> None:
        """No more is to be expected from it."""
        if who in self._by:
            self._take(who, set(self._by[who]))
            del self._by[who]

    def count(self, links: Sequence[PrefixLink]) -> int:
        """How many of the leading links somebody is going to have."""
        return sum(1 for _ in takewhile(lambda link: self._hashes[link.hash] > 0, links))

    def _take(self, who: Hashable, hashes: set[bytes]) -> None:
        self._by[who] = [each for each in self._by[who] if each not in hashes]
        for each in hashes:
            self._hashes[each] -= 1
            if not self._hashes[each]:
                del self._hashes[each]
