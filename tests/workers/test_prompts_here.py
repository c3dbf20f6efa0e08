"""A decode worker by itself: orders without a ticket, whose prompts it computes beside what it generates."""

import itertools
from dataclasses import replace

import pytest

from decode_worker.policy import DecodePolicy
from engine.cache.swap_space import SwapSpace
from service.orders import Beam, Choice
from service.reports import AdoptedReport, EndedReport, ReservedReport, TokenReport
from service.token_books import Waste
from tests.fakes.forcing_policy import Forcing
from tests.fakes.hash_model import golden
from tests.workers.conftest import Bench

PROMPT = (1, 2, 3, 4, 5)
SCOPE = b"s" * 16
CHOICES = tuple(Choice(index=number, seed=seed) for number, seed in enumerate((11, 22, 33)))


def told(bench, request_id="r", attempt=1):
    """What both workers have said of a request's tokens, choice by choice and in order."""
    reports = [
        report
        for side in (bench.p, bench.d)
        for _, report in side.heard
        if isinstance(report, TokenReport)
        and (report.key.request_id, report.key.attempt) == (request_id, attempt)
    ]
    return sorted(((each.choice, each.position, each) for each in reports), key=lambda each: each[:2])


WISHES = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.9, "choices": (Choice(index=0, seed=7),)},
    "with logprobs": {"logprobs": 3},
    "greedy with penalties": {"repetition_penalty": 1.8, "frequency_penalty": 1.1, "presence_penalty": -0.4},
    "three choices with penalties and biases": {
        "temperature": 1.0,
        "choices": CHOICES,
        "repetition_penalty": 0.6,
        "presence_penalty": 1.3,
        "logit_bias": ((1, 2.5), (96, 3.0)),
    },
    "one token": {"max_tokens": 1},
    "three choices": {"temperature": 1.0, "choices": CHOICES},
    "three choices of one token": {"temperature": 1.0, "choices": CHOICES, "max_tokens": 1},
    "a search": {"beam": Beam(width=3), "choices": CHOICES[:2]},
}


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 16, 17, 33])
@pytest.mark.parametrize("wish", WISHES)
def test_the_answer_is_bit_by_bit_what_two_workers_give(bench_of, order_of, wish, length):
    order = order_of(
        **{"prompt": range(1, length + 1), "max_tokens": 7, "cache_scope": SCOPE, **WISHES[wish]}
    )
    apart, here = bench_of(), bench_of()
    if order.goes_on():
        apart.split(order)
    else:
        apart.p.worker.submit("g", order, None)
    here.alone(order)
    apart.settle()
    here.settle()
    assert told(here) == told(apart) != []
    assert here.p.worker.tokens().computed == 0


def test_it_says_what_a_source_would_say_before_it_says_that_it_owns_the_sequence(bench, order_of):
    bench.alone(order_of(choices=CHOICES, temperature=1.0))
    bench.settle()
    reports = [report for _, report in bench.d.heard]
    adopted = next(at for at, each in enumerate(reports) if isinstance(each, AdoptedReport))
    assert {each.position for each in reports[:adopted]} == {0} and adopted == 3
    assert all(each.position > 0 for each in reports[adopted + 1 :])


def test_what_is_cached_is_not_computed_and_is_told_with_the_first_token(bench, order_of):
    prompt = range(1, 12)
    for number in range(2):
        bench.alone(order_of(f"r{number}", prompt=prompt, max_tokens=4, cache_scope=SCOPE))
        bench.settle()
    cached = [each.cached_tokens for _, _, each in told(bench, "r1")]
    assert cached == [8, 0, 0, 0]
    assert bench.d.worker.tokens().computed == (11 + 3) + (3 + 3)
    assert bench.d.worker.counts() == {"prefix_cache_queries": 22, "prefix_cache_hits": 8}


def test_a_prompt_that_another_is_computing_is_waited_for_and_shared(bench, order_of):
    prompt = range(1, 42)
    for number in range(2):
        bench.alone(order_of(f"r{number}", prompt=prompt, max_tokens=4, cache_scope=SCOPE))
    bench.settle()
    assert told(bench, "r1")[0][2].cached_tokens == 40
    assert bench.d.tokens("r0") == bench.d.tokens("r1") == golden(list(prompt), 4)


def test_what_it_computed_for_itself_it_takes_from_no_other_worker(bench, order_of):
    prompt = range(1, 12)
    bench.alone(order_of("first", prompt=prompt, max_tokens=4, cache_scope=SCOPE))
    bench.settle()
    order = order_of(prompt=prompt, max_tokens=4, cache_scope=SCOPE)
    ticket = bench.ticket(order)
    bench.d.worker.reserve("g", order, ticket)
    reserved = next(report for _, report in bench.d.heard if isinstance(report, ReservedReport))
    assert reserved.blocks_held == 2
    bench.p.worker.submit("g", order, bench.hand_off(replace(ticket, first_block=2)))
    bench.settle()
    assert bench.p.tokens() + bench.d.tokens("r") == golden(list(prompt), 4)


def test_a_prompt_is_computed_in_chunks_and_the_others_generate_at_every_step(bench, order_of):
    bench.split(order_of("stream", max_tokens=40))
    while len(bench.d.tokens("stream")) < 3:
        bench.turn()
    bench.alone(order_of("late", prompt=range(1, 81), max_tokens=3))
    while not bench.d.tokens("late"):
        before = len(bench.d.tokens("stream"))
        assert bench.d.worker.load(0).waiting_tokens > 0
        bench.turn()
        assert len(bench.d.tokens("stream")) == before + 1
    bench.settle()
    assert bench.d.tokens("late") == golden(list(range(1, 81)), 3)


def test_it_waits_for_blocks_and_a_seat_like_everybody_else(bench_of, order_of):
    bench = bench_of(blocks=12)
    orders = [order_of(f"r{number}", prompt=range(1, 18), max_tokens=4) for number in range(5)]
    for order in orders:
        bench.alone(order)
    load = bench.d.worker.load(0)
    assert (load.running_sequences, load.waiting_sequences, load.waiting_tokens) == (2, 3, 5 * 17)
    bench.settle()
    for order in orders:
        assert bench.d.tokens(order.key.request_id) == golden(list(range(1, 18)), 4)


def test_a_full_queue_refuses_it(bench_of, order_of):
    bench = bench_of(blocks=4)
    for number in range(10):
        bench.alone(order_of(f"r{number}", max_tokens=9))
    assert bench.d.ends() == [("r9", 1, "EXHAUSTED")]
    bench.d.worker.drop("g")
    bench.settle()


@pytest.mark.parametrize(
    ("choices", "blocks"), [((*CHOICES, Choice(index=3, seed=1), Choice(index=4, seed=1)), 40), (CHOICES, 7)]
)
def test_what_can_never_be_held_at_once_is_refused(bench_of, order_of, choices, blocks):
    bench = bench_of(blocks=blocks)
    bench.alone(order_of(choices=choices, max_tokens=8))
    assert bench.d.ends() == [("r", 1, "INVALID")]


TURNS = range(12)
LONG = {"prompt": range(1, 42), "max_tokens": 20}


@pytest.mark.parametrize(
    ("turns", "wish"), list(itertools.product(TURNS, ["greedy", "three choices", "a search"]))
)
@pytest.mark.parametrize("how", ["cancel", "drop"])
def test_one_that_leaves_at_any_moment_leaves_nothing(bench, order_of, turns, wish, how):
    order = order_of(**{**WISHES[wish], **LONG})
    bench.alone(order)
    bench.turn(turns)
    if how == "cancel":
        bench.d.worker.cancel("g", order.key)
        assert bench.d.ends() == [("r", 1, "CANCELLED")]
    else:
        bench.d.worker.drop("g")
    assert bench.d.owns_nothing() and bench.d.core.idle()
    counts = bench.d.worker.tokens()
    waste = Waste.CANCELLED if how == "cancel" else Waste.GATEWAY_LOST
    assert counts.balanced() and counts.live == 0
    assert bench.d.tokens() or wish == "a search" or counts.wasted.get(waste, 0) == counts.computed


@pytest.mark.parametrize("turns", TURNS)
def test_a_newer_attempt_makes_it_void_at_any_moment(bench, order_of, turns):
    bench.alone(order_of(**LONG))
    bench.turn(turns)
    bench.alone(order_of(attempt=2))
    bench.alone(order_of(attempt=2))
    bench.alone(order_of(attempt=1))
    bench.settle()
    assert bench.d.tokens(attempt=2) == golden(list(PROMPT), 6)
    counts = bench.d.worker.tokens()
    assert set(counts.wasted) <= {Waste.SUPERSEDED} and counts.balanced()


@pytest.mark.parametrize("turns", TURNS)
def test_another_gateway_can_neither_end_nor_take_it_over(bench, order_of, turns):
    order = order_of(**LONG)
    bench.alone(order)
    bench.turn(turns)
    bench.d.worker.cancel("thief", order.key)
    bench.d.worker.end_choice("thief", order.key, 0)
    bench.alone(order, gateway="thief")
    bench.settle()
    assert bench.d.tokens() == golden(list(range(1, 42)), 20)


@pytest.mark.parametrize("turns", TURNS)
def test_a_choice_that_nobody_reads_any_more_ends_at_any_moment_and_the_others_do_not(
    bench_of, order_of, turns
):
    order = order_of(**{**WISHES["three choices"], **LONG})
    bench, whole = bench_of(), bench_of()
    whole.alone(order)
    whole.settle()
    bench.alone(order)
    bench.turn(turns)
    bench.d.worker.end_choice("g", order.key, 1)
    bench.settle()
    right = [each for each in told(whole) if each[0] != 1]
    assert [each for each in told(bench) if each[0] != 1] == right
    assert (1, 0) in {each[:2] for each in told(bench)}, "the first token of each choice is told"
    assert bench.d.ends() == []


def test_when_nobody_reads_any_choice_nothing_goes_on(bench, order_of):
    order = order_of(choices=CHOICES, max_tokens=20)
    bench.alone(order)
    for choice in CHOICES:
        bench.d.worker.end_choice("g", order.key, choice.index)
    bench.settle()
    assert len(told(bench)) == 3


def bench_that_gives_up(length, swap_blocks=0):
    bench = Bench()
    policy = Forcing(DecodePolicy(budget_tokens=3, seats=4), length).watch(bench.d)
    bench.d.core._policy = bench.d.worker._policy = policy
    bench.d.core._swap = SwapSpace(bench.d.cache, swap_blocks) if swap_blocks else None
    return bench


@pytest.mark.parametrize("computed", [3, 6])
def test_one_that_is_given_up_before_its_first_token_comes_back_with_how_often(order_of, computed):
    """Its last token is left, and it looks like one that generates."""
    bench = bench_that_gives_up(computed + 1)
    order = order_of(prompt=range(1, computed + 2), max_tokens=9)
    bench.alone(order)
    bench.settle()
    (report,) = [each for _, each in bench.d.heard if isinstance(each, EndedReport)]
    assert (report.cause.name, report.preemptions) == ("PREEMPTED", 1)
    counts = bench.d.worker.tokens()
    assert counts.wasted == {Waste.PREEMPTED: computed} and counts.balanced()
    bench.alone(replace(order, key=order.key._replace(attempt=2), preemptions=1))
    bench.settle()
    assert bench.d.tokens(attempt=2) == golden(list(range(1, computed + 2)), 9)


def test_one_that_is_swapped_out_before_its_first_token_goes_on_by_itself(order_of):
    bench = bench_that_gives_up(4, swap_blocks=8)
    bench.alone(order_of(prompt=range(1, 5), max_tokens=9))
    while not bench.d.core.swapping():
        bench.turn()
    assert bench.d.worker.load(0).running_sequences == 1
    bench.settle()
    assert bench.d.tokens() == golden([1, 2, 3, 4], 9)
    assert bench.d.worker.tokens().wasted == {}


def test_how_often_it_was_given_up_is_known_when_it_goes_on(order_of):
    bench = bench_that_gives_up(4, swap_blocks=8)
    bench.d.core._policy._lengths.append(7)
    bench.alone(order_of(prompt=range(1, 5), max_tokens=9))
    bench.settle()
    assert bench.d.tokens() == golden([1, 2, 3, 4], 9)
    bench = bench_that_gives_up(4, swap_blocks=8)
    bench.d.core._policy._lengths.append(7)
    bench.d.core._swap = SwapSpace(bench.d.cache, 1)  # room for the prompt, not for more
    bench.alone(order_of(prompt=range(1, 5), max_tokens=9))
    bench.settle()
    (report,) = [each for _, each in bench.d.heard if isinstance(each, EndedReport)]
    assert report.preemptions == 2
