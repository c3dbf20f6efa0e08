"""Several answers to one prompt: computed once, handed over once, and each what it would be alone."""

import itertools

import pytest

from decode_worker.reservations import ReservationState
from kvtransfer.events import Committed
from service.orders import Choice
from service.reports import TokenReport
from tests.fakes.hash_model import golden

SEEDS = (11, 22, 33)


def choices_of(seeds):
    return tuple(Choice(index=number, seed=seed) for number, seed in enumerate(seeds))


def both(bench, order, gateway="g"):
    ticket = bench.ticket(order)
    bench.d.worker.reserve(gateway, order, ticket)
    bench.p.worker.submit(gateway, order, bench.hand_off(ticket))
    return ticket


def told(bench, choice=0, request_id="r"):
    """(position, token) of one choice, as both workers have said it."""
    return sorted(
        (report.position, report.token_id)
        for side in (bench.p, bench.d)
        for _, report in side.heard
        if isinstance(report, TokenReport) and (report.key.request_id, report.choice) == (request_id, choice)
    )


def alone(bench_of, order_of, seed, **order):
    bench = bench_of()
    both(bench, order_of(choices=(Choice(index=0, seed=seed),), **order))
    bench.settle()
    return told(bench)


@pytest.mark.parametrize("length", [1, 4, 5, 7, 8])
def test_three_choices_are_three_single_runs_and_their_prompt_is_computed_and_sent_once(
    bench_of, order_of, length
):
    asked = {"prompt": range(1, length + 1), "max_tokens": 9, "temperature": 1.0}
    bench = bench_of()
    sent = count_pushed(bench)
    both(bench, order_of(choices=choices_of(SEEDS), **asked))
    bench.settle()
    for number, seed in enumerate(SEEDS):
        assert told(bench, number) == alone(bench_of, order_of, seed, **asked)
    assert bench.p.worker.tokens().computed == length
    assert bench.d.worker.tokens().computed == 3 * 8
    assert sent == [-(-length // 4)]


def count_pushed(bench):
    """Blocks that the source has given to the transport."""
    push, sent = bench.p.endpoint.push, [0]

    def counted(ticket_id, first, blocks):
        sent[0] += len(blocks)
        push(ticket_id, first, blocks)

    bench.p.endpoint.push = counted
    return sent


def test_a_choice_that_ends_with_its_first_token_does_not_go_on_and_the_others_do(bench_of, order_of):
    asked = {"max_tokens": 9, "temperature": 1.0}
    first = {seed: alone(bench_of, order_of, seed, **asked)[0][1] for seed in range(30)}
    ends, stays = next(pair for pair in itertools.permutations(first, 2) if first[pair[0]] != first[pair[1]])
    stop = frozenset({first[ends]})
    bench = bench_of()
    both(bench, order_of(choices=choices_of((ends, stays)), stop_token_ids=stop, **asked))
    bench.settle()
    assert told(bench, 0) == [(0, first[ends])]
    assert told(bench, 1) == alone(bench_of, order_of, stays, stop_token_ids=stop, **asked)


@pytest.mark.parametrize("turns", range(14))
def test_a_choice_that_nobody_reads_any_more_ends_at_any_moment_and_the_others_do_not(
    bench_of, order_of, turns
):
    bench = bench_of()
    order = order_of(choices=choices_of(SEEDS), max_tokens=20, temperature=1.0)
    both(bench, order)
    bench.turn(turns)
    bench.d.worker.end_choice("thief", order.key, 0)
    bench.d.worker.end_choice("g", order.key, 1)
    bench.d.worker.end_choice("g", order.key, 7)
    bench.d.assert_balanced()
    bench.settle()
    for number in (0, 2):
        expected = alone(bench_of, order_of, SEEDS[number], max_tokens=20, temperature=1.0)
        assert told(bench, number) == expected
    assert len(told(bench, 1)) < 20
    assert bench.d.ends() == []


@pytest.mark.parametrize("turns", range(14))
def test_a_cancel_at_any_moment_frees_the_blocks_of_every_choice(bench, order_of, turns):
    order = order_of(choices=choices_of(SEEDS), max_tokens=40)
    both(bench, order)
    bench.turn(turns)
    for side in (bench.p, bench.d):
        side.worker.cancel("g", order.key)
        side.assert_balanced()
    bench.settle()


def test_choices_wait_for_a_seat_and_blocks_for_each_of_them(bench_of, order_of):
    bench = bench_of(blocks=12)
    first, second = (order_of(name, choices=choices_of(SEEDS), max_tokens=8) for name in "ab")
    assert first.blocks(block_size=4) == 1 + 1 + 3 * 2
    tickets = [bench.ticket(order) for order in (first, second)]
    for order, ticket in zip((first, second), tickets, strict=True):
        bench.d.worker.reserve("g", order, ticket)
    states = [bench.d.worker._reservations.find(ticket.ticket_id).state for ticket in tickets]
    assert states == [ReservationState.GRANTED, ReservationState.ASKING]
    assert bench.d.worker.ledger().promised == 8
    for order in (first, second):
        bench.d.worker.cancel("g", order.key)
    bench.settle()


@pytest.mark.parametrize(("seeds", "blocks"), [(range(5), 40), (range(3), 7)])
def test_what_can_never_be_held_at_once_is_refused(bench_of, order_of, seeds, blocks):
    """Four seats, and eight blocks for three choices."""
    bench = bench_of(blocks=blocks)
    order = order_of(choices=choices_of(seeds), max_tokens=8)
    bench.d.worker.reserve("g", order, bench.ticket(order))
    assert bench.d.ends() == [("r", 1, "INVALID")]


@pytest.mark.parametrize("first_tokens", [(), ((3, 1),), ((0, 1), (0, 2)), ((0, 1), (1, 97))])
def test_first_tokens_that_cannot_be_are_not_adopted(bench, order_of, first_tokens):
    order = order_of(choices=choices_of(SEEDS))
    ticket = bench.ticket(order)
    bench.d.worker.reserve("g", order, ticket)
    bench.p.endpoint.open(bench.hand_off(ticket).sealed, ticket, ("mem://d",))
    block = memoryview(bytearray(bench.p.cache.layout.block_bytes()))
    bench.p.endpoint.push(ticket.ticket_id, 0, [block] * ticket.num_blocks)
    bench.p.endpoint.finish(ticket.ticket_id, ticket.num_tokens, first_tokens)
    while not bench.d.ends():
        bench.p.endpoint.turn(0)
        bench.d.turn()
    assert bench.d.ends() == [("r", 1, "TRANSFER_FAILED")]
    assert not any(isinstance(event, Committed) for event in bench.p.events)
    bench.p.events.clear()
    bench.settle()


def test_greedy_choices_are_all_the_golden_answer(bench, order_of):
    both(bench, order_of(choices=choices_of(SEEDS), max_tokens=6))
    bench.settle()
    for number in range(3):
        assert [token for _, token in told(bench, number)] == golden([1, 2, 3, 4, 5], 6)
