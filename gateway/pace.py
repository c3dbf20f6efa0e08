"""How fast requests are served, measured while there is too much to do, and what that says of those that come.

Pure: time is an argument. Tokens of prompts and of answers are counted apart, since other workers make them at another
speed; and only while there is too much to do: a service that is not full shows what is asked of it and not what it can
do.
"""

import math
from dataclasses import dataclass

HALF_LIFE_S = 10.0
MEASURED_MIN_S = 0.5
"""Before that nothing is known, and nothing is predicted."""
REMEMBERED = 0.95
"""Of what requests were like, at each new one."""


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of prompts, and of answers: as many as there may be, or as there were."""

    prompts: float
    answers: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.prompts + other.prompts, self.answers + other.answers)

    def scaled(self, factor: float) -> "Work":
        return Work(self.prompts * factor, self.answers * factor)


NO_WORK = Work(0.0, 0.0)


class Pace:
    """now: seconds, never less than before."""

    def __init__(self, now: float) -> None:
        self._seen = now
        self._busy_s = 0.0
        self._done = self._claimed = self._used = NO_WORK
        self._served_s = 0.0

    def tick(self, now: float, *, full: bool) -> None:
        """Time has passed. full: whether there was too much to do until now."""
        passed, self._seen = now - self._seen, now
        if full:
            kept = math.exp2(-passed / HALF_LIFE_S)
            self._busy_s = self._busy_s * kept + passed
            self._done = self._done.scaled(kept)

    def did(self, work: Work, *, full: bool) -> None:
        """So much is done, at the time of the last tick."""
        if full:
            self._done += work

    def ended(self, claimed: Work, used: Work, seconds: float) -> None:
        """A request is done: what it might have cost and what it did, and how long it ran. One that was cut short by
        its deadline says nothing of that."""
        self._claimed = self._claimed.scaled(REMEMBERED) + claimed
        self._used = self._used.scaled(REMEMBERED) + used
        self._served_s = self._served_s * REMEMBERED + seconds

    def wait_s(self, work: Work) -> float:
        """How long so much takes, of what requests may cost; 0 while that is not known."""
        if self._busy_s < MEASURED_MIN_S:
            return 0.0
        expected, done = self._expected(work), self._done
        prompts = expected.prompts / done.prompts if done.prompts else 0.0
        answers = expected.answers / done.answers if done.answers else 0.0
        return max(prompts, answers) * self._busy_s

    def service_s(self, work: Work) -> float:
        """How long one request of this cost runs, 0 while that is not known."""
        used, expected = self._used, self._expected(work)
        tokens = used.prompts + used.answers
        return (expected.prompts + expected.answers) * self._served_s / tokens if tokens else 0.0

    def _expected(self, work: Work) -> Work:
        """Of answers, as much as others had of what they might have."""
        share = self._used.answers / self._claimed.answers if self._claimed.answers else 1.0
        return Work(work.prompts, work.answers * share)
