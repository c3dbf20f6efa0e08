"""Who decodes in the next step, who is given up when blocks are short, and who is let in.

Every sequence that has one token left to compute gets it, each step, as long as blocks last: generation never waits for
a prompt, and those that run go before new ones. What is left of the step's budget goes to prompts that are computed
here, the first that arrived first, but no more than makes the step a quarter longer, or as much longer as prompts
outnumber those that generate; a step full of generation leaves them a token, so that they get on.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import repeat

from engine.columns import rows_of
from engine.policy import Plan, SequenceView, View, Work
from engine.scheduling.admission import Room, fits
from engine.scheduling.budget import TokenBudget
from engine.scheduling.pace import STEP_SHARE
from engine.scheduling.victim import victims


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePolicy:
    """budget_tokens: per step. seats: sequences that may run at once; reservations and those that were swapped out take
    seats too. passing_s: how long the first that does not fit may be passed by others."""

    budget_tokens: int
    seats: int
    passing_s: float = 2.0

    def plan(self, view: View, now: float) -> Plan:
        generating = [one for one in view.running if one.uncomputed == 1]
        reading = (
            [one for one in view.running if one.uncomputed > 1] if len(generating) < len(view.running) else []
        )
        missing = 0
        if view.available_blocks < len(generating):
            missing = sum([one.blocks_to_continue for one in generating]) - view.available_blocks
        given_up: list[SequenceView] = []
        back: list[SequenceView] = []
        started: list[SequenceView] = []
        if missing > 0:
            given_up = victims(generating, missing)
            free = view.available_blocks + sum(one.blocks_freed for one in given_up)
            generating = _while_blocks_last((one for one in generating if one not in given_up), free)
        elif view.waiting or view.swapped:
            back, started = self._entering(view, now)
        work = rows_of(Work, [one.id for one in (*generating, *back)], repeat(1))
        if prompts := (*reading, *started):
            budget = TokenBudget(self._prompt_tokens(view, len(work), len(prompts)))
            parts = [Work(id=one.id, tokens=budget.take(one.uncomputed)) for one in prompts]
            work += [each for each in parts if each.tokens > 0]
        return Plan(work=tuple(work), preempt=tuple([one.id for one in given_up]))

    def grant(self, asking: tuple[SequenceView, ...], *, room: Room, now: float) -> tuple[SequenceView, ...]:
        """Which of the reservations that ask get what they need to start and a seat now. room: without what waits to
        come back from host memory."""
        return tuple(fits(_by_arrival(asking), room, now, self.passing_s))

    def _prompt_tokens(self, view: View, generating: int, prompts: int) -> int:
        """Tokens of prompts that are computed beside so many sequences that generate."""
        left = self.budget_tokens - generating
        if generating:
            share = max(STEP_SHARE, (prompts - generating) / generating)
            left = int(min(left, share * view.pace.tokens_per_step()))
        return max(1, left)

    def _entering(self, view: View, now: float) -> tuple[list[SequenceView], list[SequenceView]]:
        """Those that come back, and when all have come back those that start."""
        needed = sum(one.blocks_to_continue for one in view.running)
        room = Room(
            free_blocks=view.available_blocks - needed,
            seats=len(view.swapped),
            growing_blocks=sum(one.blocks_to_end for one in view.running),
            headroom=view.headroom,
        )
        back = fits(_by_arrival(view.swapped), room, now, self.passing_s)
        if len(back) < len(view.swapped):
            return back, []
        for one in back:
            room = room.without(one)
        room = replace(room, seats=self.seats - len(view.running) - len(view.swapped))
        return back, fits(_by_arrival(view.waiting), room, now, self.passing_s)


def _by_arrival(views: Iterable[SequenceView]) -> list[SequenceView]:
    return sorted(views, key=lambda one: (one.arrived, one.id))


def _while_blocks_last(views: Iterable[SequenceView], free_blocks: int) -> list[SequenceView]:
    going = []
    for one in views:
        if one.blocks_to_continue <= free_blocks:
            free_blocks -= one.blocks_to_continue
            going.append(one)
    return going
