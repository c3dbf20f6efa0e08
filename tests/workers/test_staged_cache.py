"""Workers whose blocks are on a device: what is handed over, and nothing else, goes through host memory, beside the
steps. Whatever happens meanwhile, nobody gets a block that is being copied."""

from dataclasses import replace

import pytest

from engine.cache.staged_cache import StagedKVCache
from service.orders import AttemptKey
from service.reports import AdoptedReport, ReservedReport
from tests.fakes.hash_model import golden
from tests.fakes.lagging_lane import LaggingLane

SCOPE = b"s" * 16


@pytest.fixture
def bench(bench_of):
    def cache_of(layout, blocks):
        return StagedKVCache(layout, blocks, LaggingLane(), staged_bytes=layout.block_bytes())

    return bench_of(cache_of=cache_of)


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


PROMPT = (1, 2, 3, 4, 5)
MOMENTS = range(24)


def begin(bench, order):
    """A hand-off, from the reservation to the order."""
    bench.d.worker.reserve("g", order, ticket := bench.ticket(order))
    bench.p.worker.submit("g", order, bench.hand_off(ticket))


def adopted(bench):
    told = [report for _, report in bench.d.heard if isinstance(report, AdoptedReport)]
    return "r" in {report.key.request_id for report in told}


def test_while_blocks_are_copied_to_be_pushed_the_first_token_is_told_and_other_prompts_are_computed(
    bench, order_of
):
    bench.p.copies_stand = True
    begin(bench, order_of(max_tokens=4))
    bench.turn(20)
    bench.p.worker.submit("g", order_of("other", max_tokens=1), None)
    bench.turn(10)
    assert bench.p.tokens() == bench.p.tokens("other") == golden([*PROMPT], 1)
    assert bench.p.endpoint.counters().get("blocks_sent", 0) == 0
    bench.p.copies_stand = False
    bench.settle()
    assert bench.p.tokens() + bench.d.tokens() == golden([*PROMPT], 4)
    assert bench.p.endpoint.counters()["blocks_sent"] == 2


def test_while_blocks_are_copied_to_be_adopted_others_get_their_tokens(bench, order_of):
    bench.d.copies_stand = True
    begin(bench, order_of(max_tokens=4))
    bench.until(bench.d.copying.due)
    bench.alone(order_of("other", max_tokens=5))
    bench.until(lambda: len(bench.d.tokens("other")) == 5)
    assert not adopted(bench) and bench.d.tokens("r") == []
    bench.d.copies_stand = False
    bench.settle()
    assert adopted(bench) and bench.p.tokens() + bench.d.tokens("r") == golden([*PROMPT], 4)


def stop(bench, side, how, order_of):
    """One of the ways in which an attempt is void, told to one worker."""
    if how == "cancelled":
        side.worker.cancel("g", AttemptKey(request_id="r", attempt=1))
    elif how == "its gateway is gone":
        side.worker.drop("g")
    else:
        later = order_of(attempt=2, max_tokens=40)
        if side is bench.p:
            side.worker.submit("g", later, bench.hand_off(bench.ticket(later)))
        else:
            side.worker.reserve("g", later, bench.ticket(later))


@pytest.mark.parametrize("how", ["cancelled", "its gateway is gone", "superseded"])
@pytest.mark.parametrize("name", ["p", "d"])
def test_blocks_that_are_copied_stay_until_that_is_done_though_owner_and_transport_let_go(
    bench, order_of, name, how
):
    side = getattr(bench, name)
    side.copies_stand = True
    begin(bench, order_of(max_tokens=40))
    bench.until(lambda: side.copying.due() and bench.p.core.idle())
    stop(bench, side, how, order_of)
    bench.turn(30)
    assert side.worker.ledger().quarantined == 2
    bench.turn(400)
    assert side.worker.ledger().quarantined == 2, "no lease makes a copy end"
    side.copies_stand = False
    bench.until(lambda: side.worker.ledger().quarantined == 0)
    for each in (bench.p, bench.d):
        each.worker.drop("g")
    bench.settle()


@pytest.mark.parametrize("how", ["cancelled", "its gateway is gone", "superseded"])
@pytest.mark.parametrize("name", ["p", "d"])
@pytest.mark.parametrize("turns", MOMENTS)
def test_whenever_an_attempt_is_void_nobody_elses_blocks_are_touched(bench, order_of, turns, name, how):
    begin(bench, order_of(max_tokens=40))
    bench.turn(turns)
    stop(bench, getattr(bench, name), how, order_of)
    for _ in range(6):
        bench.turn()
        bench.alone(order := order_of(f"other {bench.now}", prompt=range(20), max_tokens=8), gateway="h")
    bench.until(lambda: len(bench.d.tokens(order.key.request_id)) == 8)
    for request_id in {report.key.request_id for gateway, report in bench.d.heard if gateway == "h"}:
        bench.until(lambda name=request_id: len(bench.d.tokens(name)) == 8)
        assert bench.d.tokens(request_id) == golden([*range(20)], 8)
    for side in (bench.p, bench.d):
        side.worker.drop("g")
    bench.settle()


def test_a_choice_that_nobody_wants_any_more_when_all_is_there_is_not_adopted(bench, order_of):
    bench.d.copies_stand = True
    begin(bench, order := order_of(max_tokens=4))
    bench.until(bench.d.copying.due)
    bench.d.worker.end_choice("g", order.key, 0)
    bench.d.copies_stand = False
    bench.settle()
    assert not adopted(bench) and bench.d.tokens() == []
    assert bench.p.ends() == [("r", 1, "TRANSFER_FAILED")]


def test_a_ticket_whose_blocks_are_still_copied_is_spent(bench, order_of):
    bench.d.copies_stand = bench.p.copies_stand = True
    begin(bench, order := order_of(max_tokens=4))
    ticket = bench.ticket(order, ticket_id=(1).to_bytes(16, "big"))
    bench.until(bench.p.core.idle)
    for side in (bench.p, bench.d):
        side.worker.cancel("g", order.key)
    bench.turn(10)
    bench.p.worker.submit("g", order, bench.hand_off(ticket))
    assert bench.p.ends()[-1] == ("r", 1, "TICKET_REFUSED")
    bench.p.copies_stand = bench.d.copies_stand = False
    bench.settle()
