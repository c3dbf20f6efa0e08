"""The named instants of one request, from which every latency we speak of is derived.

Whoever sees an instant marks it with its own clock's reading; metrics, benchmarks and the simulator read the
same list. It measures nothing itself and knows no clock.
"""

from enum import Enum, auto


class Instant(Enum):
    """In the order in which a request without trouble passes them."""

    ACCEPTED = auto()
    RESERVED = auto()
    SUBMITTED = auto()
    FIRST_TOKEN = auto()
    ADOPTED = auto()
    FINISHED = auto()


class Timeline:
    """Seconds on one monotonic clock, per instant. The first mark stands: a later attempt moves nothing
    back."""

    def __init__(self) -> None:
        self._seconds: dict[Instant, float] = {}

    def mark(self, instant: Instant, now: float) -> None:
        self._seconds.setdefault(instant, now)

    def at(self, instant: Instant) -> float | None:
        """When it happened, None while it has not."""
        return self._seconds.get(instant)

    def between(self, first: Instant, second: Instant) -> float | None:
        """Seconds from one instant to the other, None while either is missing."""
        start, end = self.at(first), self.at(second)
        return None if start is None or end is None else end - start

    def time_to_first_token(self) -> float | None:
        return self.between(Instant.ACCEPTED, Instant.FIRST_TOKEN)

    def time_per_output_token(self, tokens: int) -> float | None:
        """Mean seconds per token after the first; None for answers of one token. tokens: in the whole
        answer."""
        spent = self.between(Instant.FIRST_TOKEN, Instant.FINISHED)
        return None if spent is None or tokens < 2 else spent / (tokens - 1)
