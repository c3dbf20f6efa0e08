"""Workers that are told anything in any order, by anybody: each answers, neither crashes, and nothing is left."""

import random
from dataclasses import replace

import pytest

from kvtransfer.identity import Identity
from prefill_worker.worker import ENDPOINT_CHARS_MAX, ENDPOINTS_MAX
from service.reports import AdoptedReport, HandedOverReport, ReservedReport, TokenEnd, TokenReport
from tests.fakes.hash_model import VOCAB, golden


def reserve(bench, order, gateway="g", **ticket):
    ticket = bench.ticket(order, **ticket)
    bench.d.worker.reserve(gateway, order, ticket)
    return ticket


def submit(bench, order, ticket, gateway="g", endpoints=("mem://d",)):
    hand_off = None if ticket is None else bench.hand_off(ticket, endpoints)
    bench.p.worker.submit(gateway, order, hand_off)


def both(bench, order, gateway="g"):
    submit(bench, order, reserve(bench, order, gateway), gateway)


def busy(side):
    """Whether the one request of a test is still with this worker."""
    load = side.worker.load(0)
    return load.running_sequences + load.waiting_sequences > 0


def kinds(side):
    return [type(report) for _, report in side.heard if not isinstance(report, TokenReport)]


def test_an_answer_is_computed_handed_over_and_generated_exactly(bench, order_of):
    both(bench, order_of(max_tokens=9))
    bench.settle()
    assert bench.p.tokens() + bench.d.tokens() == golden([1, 2, 3, 4, 5], 9)
    assert (kinds(bench.p), kinds(bench.d)) == ([HandedOverReport], [ReservedReport, AdoptedReport])
    positions = [report.position for _, report in bench.d.heard if isinstance(report, TokenReport)]
    assert positions == list(range(1, 9))
    assert bench.d.heard[-1][1].end is TokenEnd.LENGTH
    assert (bench.p.worker.load(0).finished_sequences, bench.d.worker.load(0).finished_sequences) == (1, 1)


def test_an_answer_goes_on_where_another_attempt_stopped(bench, order_of):
    tokens = golden([1, 2, 3, 4, 5], 9)
    order = order_of(attempt=2, max_tokens=9, token_ids=(1, 2, 3, 4, 5, *tokens[:4]))
    both(bench, order)
    bench.settle()
    assert bench.p.tokens() + bench.d.tokens() == tokens[4:]
    assert bench.p.heard[0][1].position == 4


def test_one_token_needs_no_ticket(bench, order_of):
    submit(bench, order_of(max_tokens=1), None)
    bench.settle()
    assert bench.p.tokens() == golden([1, 2, 3, 4, 5], 1)
    assert bench.p.heard[-1][1].end is TokenEnd.LENGTH


def test_more_tokens_need_one(bench, order_of):
    submit(bench, order_of(), None)
    assert bench.p.ends() == [("r", 1, "INVALID")]
    assert bench.p.core.idle()


@pytest.mark.parametrize(
    "endpoints",
    [(), ("mem://d",) * (ENDPOINTS_MAX + 1), ("x" * (ENDPOINT_CHARS_MAX + 1),), ("mem://d", "x" * 10_000)],
)
def test_a_target_that_cannot_be_dialled_is_refused_and_hurts_no_other_transfer(bench, order_of, endpoints):
    order = order_of("odd")
    submit(bench, order, bench.ticket(order), endpoints=endpoints)
    assert bench.p.ends() == [("odd", 1, "INVALID")]
    both(bench, order_of())
    bench.settle()
    assert len(bench.p.tokens()) == 1 and len(bench.d.tokens()) == 5


def test_a_target_that_is_not_there_fails_the_transfer_and_frees_the_blocks(bench, order_of):
    order = order_of()
    submit(bench, order, bench.ticket(order), endpoints=("mem://nobody",))
    bench.settle()
    assert bench.p.ends() == [("r", 1, "TRANSFER_FAILED")]


# A hand-off takes about ten turns here: each of them is a moment at which something else can happen.
TURNS = list(range(14))


@pytest.mark.parametrize("turns", TURNS)
def test_the_same_said_twice_at_any_moment_is_said_once(bench, order_of, turns):
    order = order_of()
    ticket = reserve(bench, order)
    submit(bench, order, ticket)
    bench.turn(turns)
    if busy(bench.d):
        bench.d.worker.reserve("g", order, ticket)
    if busy(bench.p):
        submit(bench, order, ticket)
    bench.settle()
    assert bench.p.tokens() + bench.d.tokens() == golden([1, 2, 3, 4, 5], 6)
    assert kinds(bench.d).count(ReservedReport) == 1
    assert bench.p.ends() == bench.d.ends() == []


@pytest.mark.parametrize("turns", TURNS)
def test_a_cancel_at_any_moment_is_acknowledged_and_frees_everything(bench, order_of, turns):
    order = order_of(max_tokens=40)
    both(bench, order)
    bench.turn(turns)
    for side in (bench.p, bench.d):
        side.worker.cancel("g", order.key)
        side.worker.cancel("g", order.key)
        side.assert_balanced()
    bench.settle()
    assert bench.p.ends().count(("r", 1, "CANCELLED")) == bench.d.ends().count(("r", 1, "CANCELLED")) == 2
    assert bench.p.ends()[-1] == bench.d.ends()[-1] == ("r", 1, "CANCELLED")


def test_a_cancel_before_anything_is_acknowledged_and_forgotten(bench, order_of):
    order = order_of()
    for side in (bench.p, bench.d):
        side.worker.cancel("g", order.key)
        assert side.ends() == [("r", 1, "CANCELLED")]
    both(bench, order)
    bench.settle()
    assert len(bench.d.tokens()) == 5


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("before_closed", [True, False])
def test_a_ticket_that_comes_again_after_its_end_does_no_harm(bench, order_of, turns, before_closed):
    """The transport may have closed a transfer, and the worker not have heard of it yet."""
    order = order_of(max_tokens=40)
    ticket = reserve(bench, order)
    submit(bench, order, ticket)
    bench.turn(turns)
    for side in (bench.p, bench.d):
        side.worker.cancel("g", order.key)
        side.endpoint.turn(0)
        side.endpoint.turn(0)
        if not before_closed:
            side.take_events()
    bench.d.worker.reserve("g", order, ticket)
    submit(bench, order, ticket)
    bench.turn(5)
    for side in (bench.p, bench.d):
        side.worker.cancel("g", order.key)
    bench.settle()


@pytest.mark.parametrize("turns", TURNS)
def test_a_newer_attempt_makes_the_older_one_void_at_any_moment(bench, order_of, turns):
    both(bench, order_of(attempt=1, max_tokens=30))
    bench.turn(turns)
    both(bench, order_of(attempt=2, max_tokens=6))
    both(bench, order_of(attempt=1, max_tokens=30))
    bench.settle()
    assert bench.p.tokens(attempt=2) + bench.d.tokens(attempt=2) == golden([1, 2, 3, 4, 5], 6)
    for side in (bench.p, bench.d):
        if side.ends()[0][2] == "CANCELLED":
            assert side.ends()[0] == ("r", 1, "CANCELLED")
        assert ("r", 1, "INVALID") in side.ends()


@pytest.mark.parametrize("turns", TURNS)
def test_another_gateway_can_neither_end_nor_take_over_a_request(bench, order_of, turns):
    order = order_of()
    both(bench, order)
    bench.turn(turns)
    live = [(busy(side), side) for side in (bench.p, bench.d)]
    for side in (bench.p, bench.d):
        side.worker.cancel("thief", order.key)
        side.worker.drop("thief")
    both(bench, order, gateway="thief")
    both(bench, replace(order, key=order.key._replace(attempt=9)), gateway="thief")
    for alive, side in live:
        if alive:
            assert side.ends("thief")[-2:] == [("r", 1, "INVALID"), ("r", 9, "INVALID")]
        side.worker.drop("thief")
    bench.settle()
    mine = [
        report.token_id
        for side in (bench.p, bench.d)
        for owner, report in side.heard
        if owner == "g" and isinstance(report, TokenReport)
    ]
    assert mine == golden([1, 2, 3, 4, 5], 6)


@pytest.mark.parametrize("turns", TURNS)
def test_a_gateway_that_is_gone_leaves_nothing_and_takes_nobody_with_it(bench, order_of, turns):
    for number in range(3):
        both(bench, order_of(f"gone{number}", max_tokens=30), gateway="gone")
    both(bench, order_of())
    bench.turn(turns)
    for side in (bench.p, bench.d):
        side.worker.drop("gone")
        side.worker.drop("gone")
        side.assert_balanced()
    bench.settle()
    assert bench.p.tokens() + bench.d.tokens() == golden([1, 2, 3, 4, 5], 6)


def test_more_than_the_queue_holds_are_refused(bench, order_of):
    for number in range(10):
        submit(bench, order_of(f"p{number}", max_tokens=1), None)
    submit(bench, order_of("back", prompt_tokens=4, max_tokens=2), None)
    assert bench.p.ends() == [("p8", 1, "EXHAUSTED"), ("p9", 1, "EXHAUSTED")]
    for number in range(14):
        reserve(bench, order_of(f"d{number}"))
    assert bench.d.ends() == [("d12", 1, "EXHAUSTED"), ("d13", 1, "EXHAUSTED")], (
        "four seats and a queue of eight"
    )
    for side in (bench.p, bench.d):
        side.worker.drop("g")
    bench.settle()


def test_those_that_wait_are_let_in_as_others_leave(bench_of, order_of):
    bench = bench_of(blocks=6)
    orders = {f"r{number}": order_of(f"r{number}") for number in range(5)}
    tickets = {name: reserve(bench, order) for name, order in orders.items()}
    assert kinds(bench.d) == [ReservedReport, ReservedReport], "three blocks each"
    assert bench.d.worker.load(0).waiting_sequences == 3
    told = 0
    while told < 5 or busy(bench.d):
        granted = [report.key.request_id for _, report in bench.d.heard if isinstance(report, ReservedReport)]
        for name in granted[told:]:
            submit(bench, orders[name], tickets[name])
        told = len(granted)
        bench.turn()
    bench.settle()
    assert granted == list(orders), "in order of asking"
    for name in orders:
        assert bench.p.tokens(name) + bench.d.tokens(name) == golden([1, 2, 3, 4, 5], 6)


def test_blocks_that_were_still_written_into_go_to_the_next_as_soon_as_they_are_free(bench_of, order_of):
    bench = bench_of(blocks=6)
    orders = [order_of(f"r{number}") for number in range(3)]
    tickets = [reserve(bench, order) for order in orders]
    submit(bench, orders[0], tickets[0])
    while bench.d.worker.ledger().owned == 0:
        bench.turn()
    bench.d.worker.cancel("g", orders[0].key)
    assert kinds(bench.d).count(ReservedReport) == 2, "the blocks are not free yet"
    bench.turn(3)
    assert kinds(bench.d).count(ReservedReport) == 3
    for order in orders:
        bench.d.worker.cancel("g", order.key)
        bench.p.worker.cancel("g", order.key)
    bench.settle()


@pytest.mark.parametrize("length", [3, 4, 5, 8])
def test_an_answer_with_no_token_left_for_it_is_none_for_a_decode_worker(bench, order_of, length):
    """Its last position would need a block that nobody promised."""
    reserve(bench, order_of(prompt=range(length), max_tokens=1))
    assert bench.d.ends() == [("r", 1, "INVALID")]
    assert bench.d.owns_nothing()


def test_a_ticket_that_leaves_blocks_out_is_refused_since_none_are_held_here(bench, order_of):
    reserve(bench, order_of(), first_block=1)
    assert bench.d.ends() == [("r", 1, "TICKET_REFUSED")]


def test_a_ticket_of_another_worker_is_refused_by_both_and_begins_nothing(bench, order_of):
    order = order_of()
    stranger = Identity(worker_id="other", epoch=1)
    reserve(bench, order, target_id=stranger.worker_id)
    submit(bench, order, bench.ticket(order, source_id=stranger.worker_id))
    reserve(bench, order, target_epoch=3)
    submit(bench, order, bench.ticket(order, source_epoch=3))
    assert bench.p.ends() == bench.d.ends() == [("r", 1, "TICKET_REFUSED")] * 2
    assert bench.p.core.idle() and bench.p.owns_nothing() and bench.d.owns_nothing()


def test_a_ticket_that_another_request_has_is_refused(bench, order_of):
    ticket = reserve(bench, order_of("first"))
    bench.d.worker.reserve("g", order_of("second"), ticket)
    submit(bench, order_of("first"), ticket)
    submit(bench, order_of("second"), ticket)
    assert bench.d.ends() == bench.p.ends() == [("second", 1, "TICKET_REFUSED")]
    bench.settle()


@pytest.mark.parametrize("first_token", [VOCAB, 2**32 - 1])
def test_a_first_token_outside_the_vocabulary_is_not_adopted(bench, order_of, first_token):
    order = order_of()
    ticket = reserve(bench, order)
    bench.p.endpoint.open(bench.hand_off(ticket).sealed, ticket, ("mem://d",))
    block = memoryview(bytearray(bench.p.cache.layout.block_bytes()))
    bench.p.endpoint.push(ticket.ticket_id, 0, [block] * ticket.num_blocks)
    bench.p.endpoint.finish(ticket.ticket_id, ticket.num_tokens, ((0, first_token),))
    while not bench.d.ends():
        bench.p.endpoint.turn(0)
        bench.d.turn()
    assert bench.d.ends() == [("r", 1, "TRANSFER_FAILED")]
    bench.p.events.clear()
    bench.settle()


def test_a_transport_that_has_ended_refuses_and_begins_nothing(bench, order_of):
    order = order_of()
    for side in (bench.p, bench.d):
        side.endpoint.close()
    both(bench, order)
    assert bench.p.ends() == bench.d.ends() == [("r", 1, "EXHAUSTED")]
    assert bench.p.core.idle() and bench.p.owns_nothing() and bench.d.owns_nothing()


@pytest.mark.parametrize("seed", range(60))
def test_whatever_two_hostile_gateways_say_nothing_crashes_and_nothing_is_left(bench_of, order_of, seed):
    dice = random.Random(seed)
    bench = bench_of(blocks=dice.randrange(4, 20))
    tickets = []
    for _ in range(120):
        order = order_of(
            request_id=f"r{dice.randrange(3)}",
            attempt=dice.randrange(1, 4),
            prompt=range(dice.choice((1, 4, 5, 8))),
            max_tokens=dice.randrange(1, 9),
        )
        ticket = bench.ticket(order)
        if tickets and dice.random() < 0.4:
            order, ticket = dice.choice(tickets)
        tickets.append((order, ticket))
        gateway, side = dice.choice(("g", "h")), dice.choice((bench.p, bench.d))
        match dice.randrange(6):
            case 0 | 1:
                bench.d.worker.reserve(gateway, order, ticket)
            case 2 | 3:
                submit(bench, order, ticket if dice.random() < 0.9 else None, gateway)
            case 4:
                side.worker.cancel(gateway, order.key)
            case 5 if dice.random() < 0.2:
                side.worker.drop(gateway)
        for each in dice.sample((bench.p, bench.d), dice.randrange(3)):
            dice.choice((each.turn, each.take_events, lambda each=each: each.endpoint.turn(0)))()
        bench.now += 0.01
    for side in (bench.p, bench.d):
        side.worker.drop("g")
        side.worker.drop("h")
    bench.settle()
