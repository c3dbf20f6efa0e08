"""Workers whose blocks are on a device: what is handed over, and nothing else, goes through host memory."""

from dataclasses import replace

import pytest

from engine.cache.staged_cache import StagedKVCache
from service.reports import ReservedReport
from tests.fakes.hash_model import golden
from tests.fakes.lagging_lane import LaggingLane

SCOPE = b"s" * 16


@pytest.fixture
def bench(bench_of):
    return bench_of(cache_of=lambda layout, blocks: StagedKVCache(layout, blocks, LaggingLane()))


def hand_over(bench, order):
    """Returns the blocks that were there before."""
    ticket = bench.ticket(order)
    bench.d.worker.reserve("g", order, ticket)
    _, reserved = bench.d.heard[-1]
    assert isinstance(reserved, ReservedReport)
    ticket = replace(ticket, first_block=reserved.blocks_held)
    bench.p.worker.submit("g", order, bench.hand_off(ticket))
    bench.settle()
    return reserved.blocks_held


def said(bench, order):
    name = order.key.request_id
    return bench.p.tokens(name) + bench.d.tokens(name)


def test_an_answer_on_devices_is_handed_over_and_generated_exactly(bench, order_of):
    order = order_of(max_tokens=9)
    assert hand_over(bench, order) == 0
    assert said(bench, order) == golden([1, 2, 3, 4, 5], 9)


def test_a_second_prompt_that_begins_alike_is_handed_over_exactly(bench, order_of):
    for held, request_id, prompt in ((0, "r", (1, 2, 3, 4, 5)), (1, "s", (1, 2, 3, 4, 9, 9, 9))):
        order = order_of(request_id, prompt=prompt, max_tokens=5, cache_scope=SCOPE)
        assert hand_over(bench, order) == held
        assert said(bench, order) == golden(list(prompt), 5)


def test_a_hand_off_leaves_alone_what_was_computed_where_it_arrives(bench, order_of):
    first = order_of("r", prompt=(1, 2, 3, 4, 5), max_tokens=5, cache_scope=SCOPE)
    bench.d.worker.reserve("g", first, None)
    bench.settle()
    assert said(bench, first) == golden([1, 2, 3, 4, 5], 5)
    second = order_of("s", prompt=(1, 2, 3, 4, 9, 9, 9), max_tokens=5, cache_scope=SCOPE)
    assert hand_over(bench, second) == 1
    assert said(bench, second) == golden([1, 2, 3, 4, 9, 9, 9], 5)
