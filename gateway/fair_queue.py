"""In what order waiting requests go: each tenant gets its share of the tokens, whatever the others ask for.

A pure policy. A tenant is charged, when a request of its goes, the tokens that this may cost divided by its weight; the
tenant that was charged least goes next. One that had nothing waiting starts where the others are, so that nobody saves
up; what a request turns out not to have cost is given back. Within a tenant, whoever came first goes first.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class Ticketed(Generic[Item]):
    """One that waits. tokens: at most; rank: less goes first within its tenant."""

    tenant: str
    tokens: int
    rank: float
    item: Item
    gone: bool = False


@dataclass(slots=True)
class _Lane(Generic[Item]):
    """A tenant's. charged: tokens by weight. waiting_tokens: of those in the heap that have not gone."""

    charged: float
    heap: list[tuple[float, int, Ticketed[Item]]] = field(default_factory=list)
    waiting_tokens: int = 0

    def first(self) -> Ticketed[Item] | None:
        while self.heap and self.heap[0][2].gone:
            heappop(self.heap)
        return self.heap[0][2] if self.heap else None


class FairQueue(Generic[Item]):
    """weight: of a tenant, above 0; one of weight 2 gets twice the tokens."""

    def __init__(self, weight: Callable[[str], float] = lambda tenant: 1.0) -> None:
        self._weight = weight
        self._lanes: dict[str, _Lane[Item]] = {}
        self._level = 0.0
        self._order = count()
        self.waiting_tokens = 0

    def push(self, tenant: str, tokens: int, rank: float, item: Item) -> Ticketed[Item]:
        lane = self._lanes.setdefault(tenant, _Lane(self._level))
        if lane.waiting_tokens == 0:
            lane.charged = max(lane.charged, self._level)
        entry = Ticketed(tenant, tokens, rank, item)
        heappush(lane.heap, (rank, next(self._order), entry))
        self._count(lane, tokens)
        return entry

    def first(self) -> Ticketed[Item] | None:
        """Who goes next; None when nobody waits."""
        found = [(lane.charged, tenant) for tenant, lane in self._lanes.items() if lane.first() is not None]
        return self._lanes[min(found)[1]].first() if found else None

    def go(self, entry: Ticketed[Item]) -> None:
        """One goes, and its tenant is charged; the level is that of the one whose turn it is."""
        lane, first = self._lanes[entry.tenant], self.first()
        assert first is not None, "one that goes has waited"
        self._level = max(self._level, self._lanes[first.tenant].charged)
        lane.charged += entry.tokens / self._weight(entry.tenant)
        self.leave(entry)

    def leave(self, entry: Ticketed[Item]) -> None:
        """One goes, or waits no more; nothing happens the second time."""
        if not entry.gone:
            entry.gone = True
            self._count(self._lanes[entry.tenant], -entry.tokens)
            self._forget()

    def give_back(self, tenant: str, tokens: float) -> None:
        """Of what the tenant was charged; no further than to where the others are."""
        lane = self._lanes.get(tenant)
        if lane is not None:
            floor = min(lane.charged, self._level)
            lane.charged = max(floor, lane.charged - tokens / self._weight(tenant))

    def ahead(self, tenant: str, tokens: int) -> float:
        """Tokens that would go before a new request of the tenant, that one aside: what waits of its own, and of each
        other what goes meanwhile by its weight."""
        own = self._lanes.get(tenant)
        waits = own.waiting_tokens if own is not None else 0
        turn = (waits + tokens) / self._weight(tenant)
        others = sum(
            min(lane.waiting_tokens, turn * self._weight(other))
            for other, lane in self._lanes.items()
            if other != tenant
        )
        return waits + others

    def _count(self, lane: _Lane[Item], tokens: int) -> None:
        lane.waiting_tokens += tokens
        self.waiting_tokens += tokens

    def _forget(self) -> None:
        """Lanes in which nobody waits and that are not ahead of the others."""
        empty = [
            tenant
            for tenant, lane in self._lanes.items()
            if lane.first() is None and lane.charged <= self._level
        ]
        for tenant in empty:
            del self._lanes[tenant]
