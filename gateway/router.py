"""Which prefill and which decode worker serve an attempt: filter, score, pick. A pure function over views."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker as the router sees it.

    fingerprint: of its KV layout; two workers that differ cannot hand over. queued_tokens: prompt tokens not yet
    computed. sequences: running or promised; seats: how many there can be. blocks: free and unpromised, and in all.
    picked: how many picks ago-counter of the pool at its last pick, for ties.
    """

    worker_id: str
    ready: bool
    fingerprint: bytes
    queued_tokens: int
    sequences: int
    seats: int
    free_blocks: int
    total_blocks: int
    picked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The chosen pair, by name."""

    prefill_id: str
    decode_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoute:
    """Nobody can serve. pool: "prefill" or "decode", whichever is missing, or "pair" when none fit together."""

    pool: str


def pick(
    prefills: Iterable[WorkerView], decodes: Iterable[WorkerView], *, blocks_needed: int
) -> Route | NoRoute:
    """The pair that is likely to answer first.

    Of the prefill workers the one with the fewest queued tokens; of the decode workers that could ever hold the
    sequence the one with the most room. Ties go to the one that was not picked for longest.
    """
    sources = sorted((each for each in prefills if each.ready), key=_prefill_score)
    targets = sorted(
        (each for each in decodes if each.ready and each.total_blocks >= blocks_needed), key=_decode_score
    )
    if not sources or not targets:
        return NoRoute(pool="decode" if sources else "prefill")
    for source in sources:
        for target in targets:
            if source.fingerprint == target.fingerprint:
                return Route(prefill_id=source.worker_id, decode_id=target.worker_id)
    return NoRoute(pool="pair")


def _prefill_score(worker: WorkerView) -> tuple[int, int]:
    return (worker.queued_tokens, worker.picked)


def _decode_score(worker: WorkerView) -> tuple[float, int]:
    seats_taken = worker.sequences / max(1, worker.seats)
    blocks_taken = 1 - worker.free_blocks / max(1, worker.total_blocks)
    return (max(seats_taken, blocks_taken), worker.picked)
