"""Pairs of workers and single workers that have just failed: whom the router had better not pick for a while.

The gateway may reach both ends of a link that is cut, and a worker may come back only to break again. A failure counts
for a few seconds, twice as long each time that it is found again, until an attempt succeeds. When its time is over one
attempt finds out, and the others go on avoiding the route until it has. What a worker refuses is no failure of it.
Event loop only; asks nobody.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.router import Route

FIRST_S = 2.0
LONGEST_S = 30.0


@dataclass(slots=True)
class _Break:
    """until: seconds on the gateway's clock. pause_s: how long a failure counts. probed: an attempt is finding out."""

    until: float
    pause_s: float = FIRST_S
    probed: bool = False


class Breakers:
    """At most one entry for each worker and each pair of them. now: seconds, monotonic."""

    def __init__(self) -> None:
        self._breaks: dict[Route, _Break] = {}

    def avoided(self, now: float) -> frozenset[Route]:
        return frozenset(route for route, each in self._breaks.items() if now < each.until)

    def begin(self, route: Route, now: float) -> None:
        """An attempt goes this way."""
        for part in route.parts():
            found = self._breaks.get(part)
            if found is not None and now >= found.until:
                found.until, found.probed = now + FIRST_S, True

    def failed(self, route: Route, now: float) -> None:
        """An attempt broke here: between two workers, or at one. Those that began before the first one failed tell
        nothing new."""
        found = self._breaks.setdefault(route, _Break(until=now))
        if found.probed:
            found.pause_s = min(2 * found.pause_s, LONGEST_S)
        if found.probed or now >= found.until:
            found.until, found.probed = now + found.pause_s, False

    def worked(self, routes: Iterable[Route]) -> None:
        for route in routes:
            self._breaks.pop(route, None)
