"""Both workers with all their threads, blocks on devices: what the threads do beside each other changes no answer."""

from contextlib import contextmanager
from functools import partial
from queue import Queue

from engine.cache.copying import Copying
from engine.cache.staged_cache import StagedKVCache
from engine.loop import EngineLoop
from service.reports import ReservedReport
from tests.fakes.hash_model import golden
from tests.fakes.lagging_lane import LaggingLane

PATIENCE_S = 60
ROUNDS, REQUESTS, TOKENS = 5, 4, 6


@contextmanager
def running(side, turns):
    """One side of a bench on threads of its own. turns: is told of each turn of its steps, and of a crash. Afterwards
    nothing is left to be done, and nobody owns anything."""
    loop = EngineLoop(
        side.core,
        clock=side.bench.clock,
        on_step=side.worker.on_step,
        on_turn=lambda steps: turns.put(None),
        on_crash=turns.put,
        inbox_actions_max=1000,
    )
    copying = Copying(loop.insist, turns.put)
    assert side.cache.copy_beside(copying.begin)
    side.take_event = lambda event: loop.insist(partial(side.worker.on_transfer, event))
    for each in (side.endpoint, copying, loop):
        each.start()
    yield loop
    for each in (loop, copying):
        each.stop()
    side.endpoint.close()
    loop.turn()
    side.assert_balanced()
    assert side.owns_nothing()


def test_answers_that_are_handed_over_at_the_same_time_are_exact(bench_of, order_of):
    def cache_of(layout, blocks):
        return StagedKVCache(layout, blocks, LaggingLane(), staged_bytes=3 * layout.block_bytes())

    bench, turns = bench_of(blocks=100, cache_of=cache_of), Queue()

    def until(holds):
        while not holds():
            crash = turns.get(timeout=PATIENCE_S)
            assert crash is None, crash

    with running(bench.p, turns) as sending, running(bench.d, turns) as receiving:
        for turn in range(ROUNDS):
            orders = [
                order_of(f"{turn} {n}", prompt=range(turn, turn + 5 * n + 7), max_tokens=TOKENS)
                for n in range(REQUESTS)
            ]
            tickets = [bench.ticket(order) for order in orders]
            for order, ticket in zip(orders, tickets, strict=True):
                receiving.insist(partial(bench.d.worker.reserve, "g", order, ticket))
            until(lambda seen=turn: _reserved(bench.d) == REQUESTS * (seen + 1))
            for order, ticket in zip(orders, tickets, strict=True):
                sending.insist(partial(bench.p.worker.submit, "g", order, bench.hand_off(ticket)))
            names = [order.key.request_id for order in orders]
            until(lambda names=names: all(len(bench.d.tokens(name)) == TOKENS - 1 for name in names))
            for name, order in zip(names, orders, strict=True):
                said = bench.p.tokens(name) + bench.d.tokens(name)
                assert said == golden([*order.token_ids], TOKENS)


def _reserved(side):
    return sum(isinstance(report, ReservedReport) for _, report in side.heard)
