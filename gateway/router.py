"""Which prefill and which decode worker serve an attempt: filter, weigh, pick. A pure function over views.

Everything is weighed in one unit: the time that a prefill worker takes for one prompt token.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import product

from service.orders import SequenceOrder

FULL_TOKENS = 1024
"""What it weighs that a worker has no room left; half of it for one that is half full."""
TRANSFER_WEIGHT = 1 / 32
"""What it weighs to send a token to a decode worker rather than find it there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker as the router sees it.

    address: tells workers apart, whatever they call themselves. fingerprint: of its KV layout; two workers that differ
    cannot hand over. tokens_max: of the longest sequence that it can hold. queued_tokens: prompt tokens not yet
    computed. sequences: running or promised; seats: how many there can be. blocks: free and unpromised, and in all;
    block_size: tokens in each. cached_tokens: of the sequence, from its start, that need not be computed or sent here.
    picked: number of its last pick, which grows over the pool; for ties. frozen: there, but nothing moves in it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The chosen pair, by address. decode: None where nothing is handed over."""

    prefill: str
    decode: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoute:
    """Nobody can serve now. pool: "prefill" or "decode", whichever is missing, or "pair" when none fit together."""

    pool: str


def pick(
    prefills: Iterable[WorkerView],
    decodes: Iterable[WorkerView] | None,
    *,
    tokens: int,
    tried: Collection[Route] = (),
    broken: Collection[Route] = (),
    order: SequenceOrder | None = None,
) -> Route | NoRoute:
    """The pair that is likely to answer first. decodes: None for an answer that ends with its first token. tokens: of
    the sequence at its longest. tried: before, in vain; workers of them only if there are no others. broken: pairs of
    which a hand-off has just failed; only if there are no others. order: whose branches the decode worker must hold at
    once.

    Of the workers that can hold the sequence: the prefill worker that will have the prompt done first, since it has
    most of it cached, least to do before or most room, with the decode worker that has most room and least to receive.
    What is cached makes up for so much work in the queue and no more, so that others get what many ask for. Ties go to
    the one that was not picked for longest. One that is frozen is picked only if there are no others: it may move
    again, and is lost soon if not.
    """
    sources = [each for each in prefills if _can_serve(each, tokens)]
    if not sources:
        return NoRoute(pool="prefill")
    if decodes is None:
        return _route(min(sources, key=lambda source: _rank(source, None, tried, broken)))
    able = (each for each in decodes if _can_serve(each, tokens))
    targets = [each for each in able if order is None or holds(each, order)]
    if not targets:
        return NoRoute(pool="decode")
    pairs = [pair for pair in product(sources, targets) if pair[0].fingerprint == pair[1].fingerprint]
    if not pairs:
        return NoRoute(pool="pair")
    return _route(*min(pairs, key=lambda pair: _rank(pair[0], pair[1], tried, broken)))


def holds(worker: WorkerView, order: SequenceOrder) -> bool:
    """Whether a worker that generates has room for all branches of an order at once, when it is idle."""
    if order.branches() == 1:
        return True
    return order.branches() <= worker.seats and order.blocks(worker.block_size) <= worker.total_blocks


def _rank(
    source: WorkerView, target: WorkerView | None, tried: Collection[Route], broken: Collection[Route]
) -> tuple[int, bool, int, float, int, int]:
    """The least is the best."""
    route = _route(source, target)
    cost, picked = (_decode_cost(target), target.picked) if target is not None else (0.0, 0)
    frozen = source.frozen + (target is not None and target.frozen)
    weight = _prefill_cost(source) + cost
    return (frozen, route in broken, _overlap(route, tried), weight, source.picked, picked)


def _route(source: WorkerView, target: WorkerView | None = None) -> Route:
    return Route(prefill=source.address, decode=target.address if target is not None else None)


def _overlap(route: Route, tried: Collection[Route]) -> int:
    """Whatever has least in common with what was tried: the gateway may reach both of a pair that is cut off from each
    other, and then the one that gets nothing seems to have the most room."""
    return sum((route.prefill == each.prefill) + (route.decode == each.decode) for each in tried)


def _can_serve(worker: WorkerView, tokens: int) -> bool:
    return worker.ready and worker.tokens_max >= tokens


def _prefill_cost(source: WorkerView) -> float:
    """Tokens to compute before the first one is sampled, less the prompt, which is as long everywhere. Without free
    blocks it would wait until others are handed over."""
    return source.queued_tokens - source.cached_tokens + FULL_TOKENS * _blocks_taken(source)


def _decode_cost(target: WorkerView) -> float:
    seats_taken = target.sequences / max(1, target.seats)
    return FULL_TOKENS * max(seats_taken, _blocks_taken(target)) - TRANSFER_WEIGHT * target.cached_tokens


def _blocks_taken(worker: WorkerView) -> float:
    return 1 - worker.free_blocks / max(1, worker.total_blocks)
