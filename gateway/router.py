"""Which workers serve an attempt: filter, predict, pick. A pure function over views.

Everything is predicted in milliseconds: until the first token, and what the others are kept waiting. The figures are
those that the workers measured while running; who has none yet is taken to be as fast as the others.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from service.orders import SequenceOrder

PROMPT_TOKEN_MS = 1.0
STEP_MS = 20.0
HAND_OFF_TOKEN_MS = 1 / 32
"""What is taken while nobody has measured anything."""
HAND_OFF_MS = 2.0
"""The trips between processes that a hand-off takes before the prompt is begun."""
FULL_TOKENS = 1024
"""Tokens that one waits for where prompts are computed and no block is free; half of it where half of them are."""
FULL_STEPS = 50
"""Steps that one waits for where no seat or no block is free to generate; half of it where half of them are."""
STEP_SHARE = 0.25
"""By how much of a step a worker lets prompts make it longer for those who generate in it."""
DELAY_STEPS = 2
"""By how many steps in all a prompt may delay those who generate, as long as it could be computed elsewhere."""
LONE_MS = 100.0
"""How long a prompt may be computed where nobody generates: who comes meanwhile shares the steps with what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker as the router sees it.

    address: tells workers apart, whatever they call themselves. fingerprint: of its KV layout; two workers that differ
    cannot hand over. tokens_max: of the longest sequence that it can hold. queued_tokens: prompt tokens not yet
    computed. sequences: running or promised; seats: how many there can be. blocks: free and unpromised, and in all;
    block_size: tokens in each. cached_tokens: of the sequence, from its start, that need not be computed or sent here.
    step_ms, prompt_token_ms, hand_off_token_ms: see `WorkerLoad`. picked: number of its last pick, which grows over the
    pool; for ties. frozen: there, but nothing moves in it.
    """

    address: str
    ready: bool
    fingerprint: bytes
    tokens_max: int
    queued_tokens: int
    sequences: int
    seats: int
    free_blocks: int
    total_blocks: int
    picked: int
    cached_tokens: int = 0
    block_size: int = 1
    frozen: bool = False
    step_ms: float = 0.0
    prompt_token_ms: float = 0.0
    hand_off_token_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The chosen workers, by address. prefill: None where the decode worker computes the prompt as well. decode: None
    where nothing is generated after the first token."""

    prefill: str | None
    decode: str | None

    def worker(self, address: str) -> "Route":
        """One of its workers alone."""
        alone = address == self.prefill
        return Route(prefill=address if alone else None, decode=None if alone else address)

    def meets(self, addresses: Collection[str]) -> bool:
        """Whether one of its workers is among these."""
        return self.prefill in addresses or self.decode in addresses

    def parts(self) -> frozenset["Route"]:
        """Itself, and each of its workers alone."""
        workers = (Route(prefill=self.prefill, decode=None), Route(prefill=None, decode=self.decode))
        return frozenset(each for each in (self, *workers) if each != _NOBODY)


_NOBODY = Route(prefill=None, decode=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoute:
    """Nobody can serve now. pool: "prefill" or "decode", where somebody is missing. away: waiting may help: who could
    serve does not move, or nobody is there at all."""

    pool: str
    away: bool = False


Way: TypeAlias = tuple[WorkerView | None, WorkerView | None]
"""Who computes the prompt, and who generates: the same one when the first is None."""


def pick(
    prefills: Iterable[WorkerView],
    decodes: Iterable[WorkerView],
    order: SequenceOrder,
    *,
    tried: Collection[Route] = (),
    broken: Collection[Route] = (),
    full: Collection[str] = (),
) -> Route | NoRoute:
    """The workers that are likely to answer first. tried: before, in vain; workers of them only if there are no others.
    broken: pairs and single workers that have just failed; only if there are no others. full: addresses of workers that
    took no more a moment ago; only if there are no others.

    Of the workers that can hold the sequence: a pair, the prefill worker that will have the prompt done first with the
    decode worker that has most room and least to receive; or a decode worker by itself, when what it must compute of
    the prompt is too little to be felt by those who generate there, or when there is nobody to do it for it. What is
    cached makes up for so much work in the queue and no more, so that others get what many ask for. Ties go to the one
    that was not picked for longest. One that is frozen is not picked: it may move again, and is lost soon if not.
    """
    computing = [each for each in prefills if _can_serve(each, order)]
    generating = [each for each in decodes if _can_serve(each, order) and holds(each, order)]
    sources, targets = _moving(computing), _moving(generating)
    guess = _Guess.of(sources, targets, len(order.token_ids))
    apart: list[Way]
    if order.goes_on():
        apart = [pair for pair in product(sources, targets) if pair[0].fingerprint == pair[1].fingerprint]
    else:
        apart = [(source, None) for source in sources]
    forced = not any(_hands_over(way, broken) for way in apart)
    ways = [*apart, *((None, target) for target in targets if forced or guess.short(target))]
    if not ways:
        missed = generating if order.goes_on() else (*computing, *generating)
        asked = decodes if order.goes_on() else (*prefills, *decodes)
        away = bool(missed) or not any(each.ready for each in asked)
        return NoRoute(pool="decode" if order.goes_on() else "prefill", away=away)
    return _route(min(ways, key=lambda way: _rank(way, guess, tried, broken, full)))


def holds(worker: WorkerView, order: SequenceOrder) -> bool:
    """Whether a worker that generates has room for all branches of an order at once, when it is idle."""
    if order.branches() == 1:
        return True
    return order.branches() <= worker.seats and order.blocks(worker.block_size) <= worker.total_blocks


@dataclass(frozen=True, slots=True)
class _Guess:
    """Milliseconds, for a sequence of `known` tokens. The other fields: what is taken of workers that have measured
    nothing."""

    known: int
    step_ms: float
    prompt_token_ms: float
    hand_off_token_ms: float

    @classmethod
    def of(cls, sources: Sequence[WorkerView], targets: Sequence[WorkerView], known: int) -> "_Guess":
        everybody = (*sources, *targets)
        return cls(
            known=known,
            step_ms=_mean((each.step_ms for each in targets), STEP_MS),
            prompt_token_ms=_mean((each.prompt_token_ms for each in everybody), PROMPT_TOKEN_MS),
            hand_off_token_ms=_mean((each.hand_off_token_ms for each in sources), HAND_OFF_TOKEN_MS),
        )

    def whole_ms(self, source: WorkerView | None, target: WorkerView | None) -> float:
        """Until the first token, with what the others wait for it."""
        generating = self._room_ms(target) if target is not None else 0.0
        if source is None:
            assert target is not None
            return self._beside_ms(target) + generating
        handing_over = self._hand_off_ms(source, target) if target is not None else 0.0
        return self._prompt_ms(source) + handing_over + generating

    def short(self, target: WorkerView) -> bool:
        """Whether those who generate here, or may soon, hardly feel that this prompt is computed beside them. Nobody
        knows before it was measured how long their steps are."""
        if target.step_ms == 0:
            return False
        return self._work_ms(target) <= (DELAY_STEPS * target.step_ms if target.sequences else LONE_MS)

    def _prompt_ms(self, source: WorkerView) -> float:
        """Without free blocks it would wait until others are handed over."""
        each_ms = source.prompt_token_ms or self.prompt_token_ms
        return each_ms * (source.queued_tokens + self._uncached(source) + FULL_TOKENS * _blocks_taken(source))

    def _hand_off_ms(self, source: WorkerView, target: WorkerView) -> float:
        each_ms = source.hand_off_token_ms or self.hand_off_token_ms
        return HAND_OFF_MS + each_ms * (self.known - min(target.cached_tokens, self.known))

    def _room_ms(self, target: WorkerView) -> float:
        taken = max(target.sequences / max(1, target.seats), _blocks_taken(target))
        return FULL_STEPS * (target.step_ms or self.step_ms) * taken

    def _beside_ms(self, target: WorkerView) -> float:
        """Computing the prompt where others generate: a share of their steps is all that it gets, and each of them
        waits as long as that takes."""
        work_ms, step_ms = self._work_ms(target), target.step_ms or self.step_ms
        if not target.sequences:
            return work_ms
        own_ms = self._uncached(target) * (target.prompt_token_ms or self.prompt_token_ms)
        return work_ms + math.ceil(work_ms / (STEP_SHARE * step_ms)) * step_ms + own_ms * target.sequences

    def _work_ms(self, target: WorkerView) -> float:
        each_ms = target.prompt_token_ms or self.prompt_token_ms
        return each_ms * (target.queued_tokens + self._uncached(target))

    def _uncached(self, worker: WorkerView) -> int:
        return max(1, self.known - worker.cached_tokens)


def _hands_over(way: Way, broken: Collection[Route]) -> bool:
    """Whether nothing is known against having the prompt computed apart, whatever becomes of it afterwards."""
    route = _route(way)
    return route not in broken and Route(prefill=route.prefill, decode=None) not in broken


def _rank(
    way: Way,
    guess: _Guess,
    tried: Collection[Route],
    broken: Collection[Route],
    full: Collection[str],
) -> tuple[bool, bool, int, float, int, int]:
    """The least is the best."""
    route, (source, target) = _route(way), way
    fails = bool(broken) and not route.parts().isdisjoint(broken)
    first, last = (each.picked if each is not None else 0 for each in (source or target, target))
    whole_ms = guess.whole_ms(source, target)
    return (route.meets(full), fails, _overlap(route, tried), whole_ms, first, last)


def _moving(workers: Iterable[WorkerView]) -> list[WorkerView]:
    return [each for each in workers if not each.frozen]


def _route(way: Way) -> Route:
    prefill, decode = (each.address if each is not None else None for each in way)
    return Route(prefill=prefill, decode=decode)


def _overlap(route: Route, tried: Collection[Route]) -> int:
    """Whatever has least in common with what was tried: the gateway may reach both of a pair that is cut off from each
    other, and then the one that gets nothing seems to have the most room."""
    workers = [(route.prefill, each.prefill) for each in tried] + [
        (route.decode, each.decode) for each in tried
    ]
    return sum(one is not None and one == other for one, other in workers)


def _can_serve(worker: WorkerView, order: SequenceOrder) -> bool:
    return worker.ready and worker.tokens_max >= order.length_limit()


def _blocks_taken(worker: WorkerView) -> float:
    return 1 - worker.free_blocks / max(1, worker.total_blocks)


def _mean(measured: Iterable[float], otherwise: float) -> float:
    known = [each for each in measured if each > 0]
    return sum(known) / len(known) if known else otherwise
