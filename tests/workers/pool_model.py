"""Both workers of a pair as counts of blocks: small enough to look at every state that can be reached.

The two policies and the arithmetic of promises are production's; block tables, transfers and the model are numbers. One
position is one block. A request goes from asking (for a reservation) to queued and computing (its prompt), held (until
the hand-over), running, swapped if it is given up, and done. Where the worker that generates is alone, it goes from
asking to reading (its prompt, there) and running.
"""

from dataclasses import dataclass, replace
from enum import IntEnum

from decode_worker.policy import DecodePolicy
from engine.policy import SequenceView, View
from engine.scheduling.admission import Room, blocks_at_start
from engine.sequence import PREEMPTIONS_MAX
from prefill_worker.policy import PrefillPolicy

NOW = 1000.0
PROMPT_POLICY_TOKENS = 2


class Phase(IntEnum):
    NEW = 0
    ASKING = 1
    QUEUED = 2
    COMPUTING = 3
    HELD = 4
    RUNNING = 5
    SWAPPED = 6
    DONE = 7
    READING = 8


BUSY = (Phase.RUNNING, Phase.READING)
"""In the worker that generates."""


@dataclass(frozen=True, slots=True)
class One:
    """A request. tokens: known; computed: of them, where prompts are computed; held, credit: blocks where it is
    generated."""

    phase: Phase
    tokens: int
    computed: int = 0
    held: int = 0
    credit: int = 0
    preemptions: int = 0


@dataclass(frozen=True, kw_only=True)
class PairModel:
    """limits: (prompt, longest) of each request, in tokens. shared: blocks at the start that all have in common. swap:
    whether there is host memory. alone: whether the worker that generates computes the prompts, too. A state is a tuple
    of requests, in order of arrival."""

    limits: tuple[tuple[int, int], ...]
    prompt_blocks: int
    blocks: int
    shared: int = 0
    swap: bool = False
    headroom: float = 0.0
    passing_s: float = 0.0
    seats: int = 4
    alone: bool = False

    def first(self):
        return tuple(One(Phase.NEW, prompt) for prompt, _ in self.limits)

    def successors(self, state):
        """Every state that one event leads to."""
        after = [self.generate(state, stops) for stops in (None, *self._in(state, *BUSY))]
        after.append(self.compute(state))
        new = self._in(state, Phase.NEW)
        if new:
            after.append(self.arrive(state, new[0]))
        for number in self._in(state, Phase.HELD):
            after.append(self.hand_over(state, number))
            after.append(self.lose(state, number))
        live = [n for n, one in enumerate(state) if one.phase not in (Phase.NEW, Phase.DONE)]
        after += [self._with(state, number, One(Phase.DONE, 0)) for number in live]
        return [self.grant(each) for each in after]

    def onward(self, state):
        """What happens next when nothing else does: nobody comes, leaves or stops early."""
        for number in self._in(state, Phase.HELD):
            return self.grant(self.hand_over(state, number))
        computed = self.compute(state)
        return self.grant(computed if computed != state else self.generate(state, None))

    def over(self, state):
        return all(one.phase in (Phase.NEW, Phase.DONE) for one in state)

    def arrive(self, state, number):
        return self._with(state, number, replace(state[number], phase=Phase.ASKING))

    def grant(self, state):
        asking = self._in(state, Phase.ASKING)
        if self._in(state, Phase.SWAPPED) or not asking:
            return state
        seated = self._in(state, Phase.QUEUED, Phase.COMPUTING, Phase.HELD, *BUSY)
        room = Room(
            free_blocks=self.available(state),
            seats=self.seats - len(seated),
            growing_blocks=sum(self._growth(state, n) for n in seated),
            headroom=self.headroom,
        )
        views = tuple(self._entering(state, number) for number in asking)
        for view in self._decode().grant(views, room=room, now=NOW):
            number = view.id[1]
            one = state[number]
            held = min(self.shared, one.tokens - self.alone)
            credit = self._start(number, one) - held
            phase = Phase.READING if self.alone else Phase.QUEUED
            state = self._with(state, number, replace(one, phase=phase, held=held, credit=credit))
            self._require_sound(state)
        return state

    def compute(self, state):
        """A step of the worker that computes prompts."""
        taken = sum(state[n].tokens for n in self._in(state, Phase.COMPUTING, Phase.HELD))
        view = View(
            waiting=tuple(self._prompt(state, n) for n in self._in(state, Phase.QUEUED)),
            running=tuple(self._prompt(state, n) for n in self._in(state, Phase.COMPUTING)),
            available_blocks=self.prompt_blocks - taken,
        )
        policy = PrefillPolicy(budget_tokens=PROMPT_POLICY_TOKENS, seats=self.seats, passing_s=self.passing_s)
        for work in policy.plan(view, NOW).work:
            one = state[work.id[1]]
            computed = one.computed + work.tokens
            one = replace(one, phase=Phase.COMPUTING, computed=computed)
            if computed == one.tokens:
                answered = one.tokens == self.limits[work.id[1]][1] - 1
                one = One(Phase.DONE, 0) if answered else replace(one, phase=Phase.HELD)
            state = self._with(state, work.id[1], one)
            taken = sum(state[n].tokens for n in self._in(state, Phase.COMPUTING, Phase.HELD))
            assert taken <= self.prompt_blocks, "more blocks than there are"
        return state

    def hand_over(self, state, number):
        """The sequence is adopted, with its first token."""
        one = state[number]
        bound = one.tokens - one.held
        return self._with(
            state,
            number,
            One(Phase.RUNNING, one.tokens + 1, one.tokens, one.tokens, one.credit - bound, one.preemptions),
        )

    def lose(self, state, number):
        """The hand-over fails, and another attempt begins."""
        one = state[number]
        return self._with(state, number, self._another_attempt(number, one, one.preemptions))

    def generate(self, state, stops):
        """A step of the worker that generates. stops: the request that ends with its token, None for nobody."""
        view = View(
            waiting=(),
            running=tuple(self._running(state, n) for n in self._in(state, *BUSY)),
            available_blocks=self.available(state),
            swapped=tuple(self._entering(state, n) for n in self._in(state, Phase.SWAPPED)),
            headroom=self.headroom,
        )
        plan = self._decode().plan(view, NOW)
        for _, number, _ in plan.preempt:
            state = self._give_up(state, number)
        for work in plan.work:
            if state[work.id[1]].phase is Phase.READING:
                state = self._read(state, work.id[1], work.tokens, work.id[1] == stops)
            else:
                state = self._token(state, work.id[1], work.id[1] == stops)
            self._require_sound(state)
        return state

    def available(self, state):
        having = [one for one in state if one.held or one.credit]
        common = [one for one in having if one.held >= self.shared > 0]
        own = sum(one.held + one.credit for one in having) - self.shared * max(0, len(common) - 1)
        return self.blocks - own

    def _give_up(self, state, number):
        one = state[number]
        assert one.preemptions < PREEMPTIONS_MAX, "given up too often"
        times = one.preemptions + 1
        if self.swap:
            return self._with(state, number, One(Phase.SWAPPED, one.tokens, preemptions=times))
        return self._with(state, number, self._another_attempt(number, one, times))

    def _another_attempt(self, number, one, preemptions):
        """Whoever lacks one token only gets it where prompts are computed, and asks for no reservation."""
        last = one.tokens == self.limits[number][1] - 1 and not self.alone
        return One(Phase.QUEUED if last else Phase.ASKING, one.tokens, preemptions=preemptions)

    def _read(self, state, number, count, stops):
        """Some of a prompt; with its last token the first one of the answer comes."""
        one = state[number]
        assert one.credit >= count, "a prompt has all its blocks"
        one = replace(one, held=one.held + count, credit=one.credit - count)
        if one.held == one.tokens:
            one = replace(one, phase=Phase.RUNNING, tokens=one.tokens + 1)
            if stops or one.tokens == self.limits[number][1]:
                one = One(Phase.DONE, 0)
        return self._with(state, number, one)

    def _token(self, state, number, stops):
        one = state[number]
        if one.phase is Phase.SWAPPED:
            held = one.tokens - 1
            one = replace(one, phase=Phase.RUNNING, held=held, credit=self._start(number, one) - held)
            self._require_sound(self._with(state, number, one))
        credit = one.credit - 1 if one.credit else 0
        one = replace(one, tokens=one.tokens + 1, held=one.held + 1, credit=credit)
        self._require_sound(self._with(state, number, one))
        if stops or one.tokens == self.limits[number][1]:
            one = One(Phase.DONE, 0)
        return self._with(state, number, one)

    def _start(self, number, one):
        return blocks_at_start(one.tokens, self._most(number, one), one.preemptions)

    def _most(self, number, one):
        return max(one.tokens, self.limits[number][1] - 1)

    def _growth(self, state, number):
        one = state[number]
        return self._most(number, one) - one.held - one.credit

    def _entering(self, state, number):
        one = state[number]
        there = any(each.held >= self.shared > 0 for each in state)
        start = self._start(number, one)
        return self._view(
            number,
            one,
            uncomputed=one.tokens,
            blocks_to_start=start - min(self.shared, one.tokens - self.alone) * there,
            blocks_to_end=self._most(number, one) - start,
        )

    def _running(self, state, number):
        one = state[number]
        uncomputed = one.tokens - one.held
        lacks = max(0, uncomputed - one.credit)
        alone = sum(each.held >= self.shared for each in state) == 1
        sole = one.held - (0 if alone else self.shared)
        return self._view(
            number,
            one,
            uncomputed=uncomputed,
            blocks_to_continue=lacks,
            blocks_to_end=self._growth(state, number) - lacks,
            blocks_freed=sole + one.credit,
            cost_to_resume=sole,
            steadfast=one.preemptions >= PREEMPTIONS_MAX,
        )

    def _prompt(self, state, number):
        one = state[number]
        waits = one.phase is Phase.QUEUED
        uncomputed, start = one.tokens - one.computed, one.tokens if waits else 0
        return self._view(number, one, uncomputed=uncomputed, blocks_to_start=start)

    def _view(self, number, one, **counts):
        counts = {"blocks_to_start": 0, **counts}
        return SequenceView(id=("", number, 0), arrived=float(number), **counts)

    def _decode(self):
        return DecodePolicy(budget_tokens=8, seats=self.seats, passing_s=self.passing_s)

    def _require_sound(self, state):
        assert self.available(state) >= 0, "more blocks than there are"

    def _in(self, state, *phases):
        return [number for number, one in enumerate(state) if one.phase in phases]

    def _with(self, state, number, one):
        return (*state[:number], one, *state[number + 1 :])
