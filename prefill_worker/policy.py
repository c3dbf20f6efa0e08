"""Which prompts are computed next, and how much of each.

Shortest remaining prompt first, where waiting makes a prompt shorter: a short one does not queue behind a long one,
and a long one does not starve. Several prompts share a step's token budget. What has started is never given up:
its blocks are promised to its end.
"""

from dataclasses import dataclass

from engine.policy import Plan, View, Work
from engine.scheduling.admission import Room, fits
from engine.scheduling.budget import TokenBudget
from engine.scheduling.ordering import by_aged_length


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPolicy:
    """budget_tokens: per step. seats: sequences that may be started at once. ageing_tokens_per_s: how much shorter a
    second of waiting makes a prompt. passing_s: how long the first that does not fit may be passed by others."""

    budget_tokens: int
    seats: int
    ageing_tokens_per_s: float = 512.0
    passing_s: float = 2.0

    def plan(self, view: View, now: float) -> Plan:
        waiting = by_aged_length(view.waiting, now, self.ageing_tokens_per_s)
        room = Room(free_blocks=view.available_blocks, seats=self.seats - len(view.running))
        started = fits(waiting, room, now, self.passing_s)
        budget = TokenBudget(self.budget_tokens)
        order = by_aged_length((*view.running, *started), now, self.ageing_tokens_per_s)
        work = (Work(id=one.id, tokens=budget.take(one.uncomputed)) for one in order)
        return Plan(work=tuple(each for each in work if each.tokens > 0))
