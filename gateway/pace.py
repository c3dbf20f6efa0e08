"""How fast requests are served, measured while they have to wait, and what that says of those that come.

Pure: time is an argument. It counts tokens as they are done, of prompts and answers alike, and only while somebody
waits: a service that is not full shows what is asked of it and not what it can do.
"""

import math

HALF_LIFE_S = 10.0
MEASURED_MIN_S = 0.5
"""Before that nothing is known, and nothing is predicted."""
REMEMBERED = 0.95
"""Of what requests were like, at each new one."""


class Pace:
    """now: seconds, never less than before."""

    def __init__(self, now: float) -> None:
        self._seen = now
        self._busy_s = 0.0
        self._tokens = 0.0
        self._claimed = self._used = 0.0
        self._served_s = 0.0

    def tick(self, now: float, *, full: bool) -> None:
        """Time has passed. full: whether somebody waited until now."""
        passed, self._seen = now - self._seen, now
        if full:
            kept = math.exp2(-passed / HALF_LIFE_S)
            self._busy_s = self._busy_s * kept + passed
            self._tokens *= kept

    def did(self, tokens: int, *, full: bool) -> None:
        """Tokens are done, at the time of the last tick."""
        if full:
            self._tokens += tokens

    def ended(self, claimed: int, used: int, seconds: float) -> None:
        """A request is done: what it might have cost and what it did, in tokens, and how long it ran."""
        self._claimed = self._claimed * REMEMBERED + claimed
        self._used = self._used * REMEMBERED + used
        self._served_s = self._served_s * REMEMBERED + seconds

    def wait_s(self, tokens: float) -> float:
        """How long so many tokens take that requests may cost, 0 while that is not known."""
        if self._busy_s < MEASURED_MIN_S or self._tokens <= 0:
            return 0.0
        return self._expected(tokens) * self._busy_s / self._tokens

    def service_s(self, tokens: float) -> float:
        """How long one request runs that may cost so many tokens, 0 while that is not known."""
        return self._expected(tokens) * self._served_s / self._used if self._used else 0.0

    def _expected(self, tokens: float) -> float:
        """Of so many that may be needed, how many are."""
        return tokens * self._used / self._claimed if self._claimed else tokens
