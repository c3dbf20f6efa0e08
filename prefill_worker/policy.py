"""Which prompts are computed next, and how much of each.

The oldest prompt has a guaranteed share of each step's tokens; the rest goes to the shortest remaining prompts first,
the oldest among them. So a short prompt passes a long one that is being computed, and nobody starves: whoever comes
later, a prompt is done within as many steps as it and all older ones would take one after the other in that share (as
long as blocks and seats last). Waiting makes a prompt shorter, too, and a priority is waiting. What has started is
never given up: its blocks are promised to its end.
"""

import math
from collections import Counter
from dataclasses import dataclass

from engine.policy import Plan, SequenceView, View, Work
from engine.scheduling.admission import Room, fits
from engine.scheduling.budget import TokenBudget
from engine.scheduling.ordering import by_aged_length, oldest


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPolicy:
    """budget_tokens: per step. seats: sequences that may be started at once. oldest_share: of the budget, for the
    oldest prompt, in (0, 1]; 1 is first come, first served. ageing_tokens_per_s: how much shorter a second of waiting
    makes a prompt. passing_s: how long the first that does not fit may be passed by others."""

    budget_tokens: int
    seats: int
    oldest_share: float = 0.5
    ageing_tokens_per_s: float = 64.0
    passing_s: float = 2.0

    def plan(self, view: View, now: float) -> Plan:
        room = Room(free_blocks=view.available_blocks, seats=self.seats - len(view.running))
        started = fits(self._in_order(view.waiting, now), room, now, self.passing_s)
        present = (*view.running, *started)
        if not present:
            return Plan(work=())
        budget, first, tokens = TokenBudget(self.budget_tokens), oldest(present), Counter[SequenceView]()
        tokens[first] = budget.take(min(first.uncomputed, self.guaranteed_tokens()))
        for one in by_aged_length(present, now, self.ageing_tokens_per_s):
            tokens[one] += budget.take(one.uncomputed - tokens[one])
        return Plan(work=tuple(Work(one.id, count) for one, count in tokens.items() if count))

    def guaranteed_tokens(self) -> int:
        """What the oldest prompt gets of each step at least, if it needs so many."""
        return math.ceil(self.budget_tokens * self.oldest_share)

    def _in_order(self, waiting: tuple[SequenceView, ...], now: float) -> list[SequenceView]:
        """The oldest starts first, so that those that are shorter cannot take its place for ever."""
        shortest = by_aged_length(waiting, now, self.ageing_tokens_per_s)
        if not shortest:
            return []
        first = oldest(waiting)
        return [first, *(one for one in shortest if one is not first)]
