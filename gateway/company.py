"""Choices that share an attempt: from the prompt on while they stand at the same tokens, and each by itself afterwards.

The orchestrator holds one for each way that it follows. Decides nothing, talks to nobody.
"""

from dataclasses import dataclass, replace

from gateway.admission import Place
from gateway.arrivals import Arrivals
from gateway.journal import Journal
from gateway.request import TokenBatch
from gateway.router import Route
from service.orders import AGE_MS_MAX, SequenceOrder


class Parted(Exception):
    """These choices share no attempt any more: each goes on by itself. attempts: how many there have been."""

    def __init__(self, attempts: int) -> None:
        super().__init__(f"parted after {attempts} attempts")
        self.attempts = attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """journals: at least one. wire_id: name of their attempts between our processes. accepted: when the request was, in
    seconds on the gateway's clock. tried: routes of former attempts. full: addresses of workers that took no more since
    the last attempt that was taken up. place: the request's. arrivals: where its tokens go."""

    journals: tuple[Journal, ...]
    wire_id: str
    accepted: float
    tried: list[Route]
    full: set[str]
    place: Place
    arrivals: Arrivals

    def alone(self, journal: Journal) -> "Company":
        """One of these on its own."""
        return replace(self, journals=(journal,), wire_id=journal.wire_id, tried=list(self.tried), full=set())

    def begun(self) -> bool:
        """Whether there are tokens already."""
        return any(map(len, self.journals))

    def parted(self) -> bool:
        """Whether several of them stand at tokens of their own."""
        return len(self.journals) > 1 and self.begun()

    def take(self, batches: list[TokenBatch], computed: bool) -> None:
        """What an attempt adds. computed: whether it has computed the prompt."""
        if computed:
            self.place.computed()
        tokens = 0
        for batch in batches:
            tokens += len(batch.tokens)
            self.arrivals.put(batch)
        self.place.took(tokens)

    def note_full(self, address: str | None) -> None:
        """An attempt was refused there; None for one that was taken up."""
        if address is None:
            self.full.clear()
        else:
            self.full.add(address)

    def preempted(self, times: int) -> bool:
        """A worker gave the sequence up, for the so manieth time. False where none had a right to: several are never
        given up."""
        return len(self.journals) == 1 and self.journals[0].preempted(times)

    def age_ms(self, now: float) -> int:
        """Since the request was accepted, as far as orders can say it."""
        return min(max(0, int((now - self.accepted) * 1000)), AGE_MS_MAX)

    def order(self, attempt: int) -> SequenceOrder:
        """The next attempt at all of them; what older ones sent ahead of its turn is void."""
        orders = []
        for journal in self.journals:
            journal.begin()
            orders.append(journal.order(attempt))
        choices = tuple(choice for each in orders for choice in each.choices)
        key = orders[0].key._replace(request_id=self.wire_id)
        return replace(orders[0], key=key, choices=choices)
