"""Who decodes in the next step, and who is let in.

Every sequence that has one token left to compute gets it, each step: generation never waits for a prompt. What is
left of the step's budget goes to prompts that are computed here, oldest first.
"""

from dataclasses import dataclass

from engine.policy import Plan, SequenceView, View, Work
from engine.scheduling.admission import fits
from engine.scheduling.budget import TokenBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePolicy:
    """budget_tokens: per step. seats: sequences that may run at once; reservations take seats too.
    passing_s: how long the first that does not fit may be passed by others."""

    budget_tokens: int
    seats: int
    passing_s: float = 2.0

    def plan(self, view: View, now: float) -> Plan:
        generating = [one for one in view.running if one.uncomputed == 1]
        reading = [one for one in view.running if one.uncomputed > 1]
        started = fits(
            view.waiting, view.available_blocks, self.seats - len(view.running), now, self.passing_s
        )
        budget = TokenBudget(max(0, self.budget_tokens - len(generating)))
        work = [Work(id=one.id, count=1) for one in generating]
        prompts = (Work(id=one.id, count=budget.take(one.uncomputed)) for one in (*reading, *started))
        return Plan(work=(*work, *(each for each in prompts if each.count > 0)))

    def grant(
        self, asking: tuple[SequenceView, ...], *, available_blocks: int, taken_seats: int, now: float
    ) -> tuple[SequenceView, ...]:
        """Which of the reservations that ask, in order of arrival, get their blocks and a seat now."""
        return tuple(fits(asking, available_blocks, self.seats - taken_seats, now, self.passing_s))
