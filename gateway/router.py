"""Which prefill and which decode worker serve an attempt: filter, score, pick. A pure function over views."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from service.orders import SequenceOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker as the router sees it.

    address: tells workers apart, whatever they call themselves. fingerprint: of its KV layout; two workers that differ
    cannot hand over. tokens_max: of the longest sequence that it can hold. queued_tokens: prompt tokens not yet
    computed. sequences: running or promised; seats: how many there can be. blocks: free and unpromised, and in all;
    block_size: tokens in each. picked: number of its last pick, which grows over the pool; for ties.
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
    block_size: int = 1


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
    order: SequenceOrder | None = None,
) -> Route | NoRoute:
    """The pair that is likely to answer first. decodes: None for an answer that ends with its first token. tokens: of
    the sequence at its longest. tried: before, in vain; workers of them only if there are no others. order: whose
    branches the decode worker must hold at once.

    Of the workers that can hold the sequence: the prefill worker with the fewest queued tokens, the decode worker with
    the most room. Ties go to the one that was not picked for longest.
    """
    sources = sorted((each for each in prefills if _can_serve(each, tokens)), key=_prefill_score)
    if not sources:
        return NoRoute(pool="prefill")
    if decodes is None:
        routes = [Route(prefill=source.address, decode=None) for source in sources]
        return _first(routes, tried)
    able = (each for each in decodes if _can_serve(each, tokens) and (order is None or holds(each, order)))
    targets = sorted(able, key=_decode_score)
    if not targets:
        return NoRoute(pool="decode")
    routes = [
        Route(prefill=source.address, decode=target.address)
        for source in sources
        for target in targets
        if source.fingerprint == target.fingerprint
    ]
    return _first(routes, tried) if routes else NoRoute(pool="pair")


def holds(worker: WorkerView, order: SequenceOrder) -> bool:
    """Whether a worker that generates has room for all branches of an order at once, when it is idle."""
    if order.branches() == 1:
        return True
    return order.branches() <= worker.seats and order.blocks(worker.block_size) <= worker.total_blocks


def _first(routes: list[Route], tried: Collection[Route]) -> Route:
    """Whatever has least in common with what was tried: the gateway may reach both of a pair that is cut off from each
    other, and then the one that gets nothing seems to have the most room."""
    return min(
        routes,
        key=lambda route: sum(
            (route.prefill == each.prefill) + (route.decode == each.decode) for each in tried
        ),
    )


def _can_serve(worker: WorkerView, tokens: int) -> bool:
    return worker.ready and worker.tokens_max >= tokens


def _prefill_score(worker: WorkerView) -> tuple[int, int]:
    return (worker.queued_tokens, worker.picked)


def _decode_score(worker: WorkerView) -> tuple[float, int]:
    seats_taken = worker.sequences / max(1, worker.seats)
    blocks_taken = 1 - worker.free_blocks / max(1, worker.total_blocks)
    return (max(seats_taken, blocks_taken), worker.picked)
