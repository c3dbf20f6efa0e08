"""A decode worker whose answers outgrow its blocks: what it tells, what it keeps, what it gives back."""

from dataclasses import replace

import pytest

from decode_worker.policy import DecodePolicy
from engine.cache.swap_space import SwapSpace
from engine.sequence import PREEMPTIONS_MAX
from service.orders import PREEMPTIONS_MAX as PREEMPTIONS_TOLD_MAX
from service.reports import EndCause, EndedReport, ReservedReport
from tests.fakes.forcing_policy import Forcing
from tests.fakes.hash_model import golden
from tests.workers.conftest import Bench

PROMPT = (1, 2, 3, 4, 5)


def bench_that_gives_up(*lengths, swap_blocks=0, blocks=40):
    bench = Bench(blocks)
    policy = Forcing(DecodePolicy(budget_tokens=16, seats=4), *lengths).watch(bench.d)
    bench.d.core._policy = bench.d.worker._policy = policy
    bench.d.core._swap = SwapSpace(bench.d.cache, swap_blocks) if swap_blocks else None
    return bench


def begin(bench, order, gateway="g"):
    ticket = bench.ticket(order)
    bench.d.worker.reserve(gateway, order, ticket)
    bench.p.worker.submit(gateway, order, bench.hand_off(ticket))


def ended(bench):
    return [report for _, report in bench.d.heard if isinstance(report, EndedReport)]


@pytest.mark.parametrize("position", range(1, 8))
def test_what_is_given_back_is_told_with_how_often_and_goes_on_as_another_attempt(order_of, position):
    bench = bench_that_gives_up(len(PROMPT) + position)
    order = order_of(max_tokens=9)
    begin(bench, order)
    while not ended(bench):
        bench.turn()
    (report,) = ended(bench)
    assert (report.key, report.cause, report.preemptions) == (order.key, EndCause.PREEMPTED, 1)
    assert bench.d.worker.counts() == {"preemptions": 1}
    bench.settle()
    said = bench.p.tokens() + bench.d.tokens()
    assert said == golden([1, 2, 3, 4, 5], 9)[:position]
    key = order.key._replace(attempt=2)
    begin(bench, replace(order, key=key, token_ids=(*PROMPT, *said), preemptions=1))
    bench.settle()
    assert said + bench.p.tokens(attempt=2) + bench.d.tokens(attempt=2) == golden([1, 2, 3, 4, 5], 9)
    for side in (bench.p, bench.d):
        assert side.worker.tokens().balanced() and side.worker.tokens().live == 0


def test_what_is_swapped_out_goes_on_by_itself_and_nobody_hears_of_it(order_of):
    bench = bench_that_gives_up(9, swap_blocks=8)
    begin(bench, order_of(max_tokens=9))
    bench.settle()
    assert bench.p.tokens() + bench.d.tokens() == golden([1, 2, 3, 4, 5], 9)
    assert ended(bench) == [] and bench.d.worker.ledger().owners == ()
    assert bench.d.worker.counts() == {"preemptions": 1, "swap_outs": 1}
    assert bench.p.worker.counts() == {"prefix_cache_queries": 5, "prefix_cache_hits": 0}


@pytest.mark.parametrize("how", ["cancel", "drop"])
def test_a_request_that_leaves_while_swapped_out_leaves_the_host_memory_idle(order_of, how):
    """Case 13."""
    bench = bench_that_gives_up(9, swap_blocks=8)
    order = order_of(max_tokens=9)
    begin(bench, order)
    while not bench.d.core.swapping():
        bench.turn()
    assert [each.owner.kind for each in bench.d.worker.ledger().owners] == ["swapped"]
    assert bench.d.worker.load(0).running_sequences == 1
    if how == "cancel":
        bench.d.worker.cancel("g", order.key)
    else:
        bench.d.worker.drop("g")
    assert bench.d.worker.ledger().owners == () and bench.d.core.idle()
    begin(bench, order_of("next"))
    bench.settle()
    assert bench.p.tokens("next") + bench.d.tokens("next") == golden([1, 2, 3, 4, 5], 6)


def test_nobody_new_is_granted_anything_before_those_swapped_out_are_back(order_of):
    bench = bench_that_gives_up(9, swap_blocks=8)
    begin(bench, order_of(max_tokens=9))
    while not bench.d.core.swapping():
        bench.turn()
    newer = order_of("newer")
    bench.d.worker.reserve("g", newer, bench.ticket(newer))
    granted = [report.key for _, report in bench.d.heard if isinstance(report, ReservedReport)]
    assert newer.key not in granted
    while newer.key not in granted:
        bench.turn()
        granted = [report.key for _, report in bench.d.heard if isinstance(report, ReservedReport)]
    assert not bench.d.core.swapping()
    bench.d.worker.cancel("g", newer.key)
    bench.settle()


def promised(bench, order):
    bench.d.worker.reserve("g", order, bench.ticket(order))
    return bench.d.worker.ledger().promised


@pytest.mark.parametrize(("preemptions", "blocks"), [(0, 3), (1, 3), (PREEMPTIONS_MAX, 10)])
def test_a_grant_is_the_prompt_and_one_block_or_everything_after_two_preemptions(
    order_of, preemptions, blocks
):
    bench = Bench()
    assert promised(bench, order_of(max_tokens=35, preemptions=preemptions)) == blocks


def test_a_short_answer_is_promised_no_more_than_it_can_need(order_of):
    assert promised(Bench(), order_of(max_tokens=2)) == 2


def test_gateway_and_workers_mean_the_same_by_often_enough():
    assert PREEMPTIONS_TOLD_MAX == PREEMPTIONS_MAX


@pytest.mark.parametrize("past", [{"preemptions": 1}, {"prompt_tokens": 4}], ids=["given up", "lost"])
def test_one_that_comes_back_is_not_refused_by_a_queue_that_is_full(order_of, past):
    bench = Bench(blocks=4)
    for number in range(9):
        order = order_of(f"r{number}", max_tokens=9)
        bench.d.worker.reserve("g", order, bench.ticket(order))
    full = order_of("full", max_tokens=9)
    bench.d.worker.reserve("g", full, bench.ticket(full))
    assert bench.d.ends() == [("full", 1, "EXHAUSTED")]
    resumed = order_of("resumed", max_tokens=9, **past)
    bench.d.worker.reserve("g", resumed, bench.ticket(resumed))
    assert bench.d.ends() == [("full", 1, "EXHAUSTED")]
    bench.d.worker.drop("g")
    bench.settle()
