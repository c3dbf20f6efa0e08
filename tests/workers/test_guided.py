"""Answers that must follow a guide: the same whoever computes them and however often they begin again."""

from dataclasses import replace

import pytest

from decode_worker.policy import DecodePolicy
from engine.cache.swap_space import SwapSpace
from service.orders import Choice
from tests.fakes.constraints import END, Odd, follows
from tests.fakes.forcing_policy import Forcing
from tests.workers.conftest import Bench

SEEDED = {"temperature": 1.5, "choices": (Choice(index=0, seed=7),)}
LENGTH = 8
WAYS = [{}, SEEDED]


def odd(order, **limits):
    """At the order's tokens, as a compiler would make it."""
    constraint = Odd(**{"length": LENGTH, **limits})
    for token in order.answered():
        constraint.advance(token)
    return constraint


def split(bench, order, **limits):
    bench.split(order, lambda: (odd(order, **limits),))


def alone(bench, order, **limits):
    bench.alone(order, lambda: (odd(order, **limits),))


def answer(order, begin=split, bench=None, **limits):
    bench = bench or Bench()
    begin(bench, order, **limits)
    bench.settle()
    assert bench.p.worker.tokens().balanced() and bench.d.worker.tokens().balanced()
    return bench.token_ids()


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_follows_its_guide_and_is_the_same_handed_over_and_computed_in_one_place(order_of, way):
    order = order_of(max_tokens=30, **way)
    tokens = answer(order)
    assert follows(tokens) and len(tokens) == LENGTH + 1 and tokens[-1] == END
    assert answer(order, alone) == tokens


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("begin", [split, alone])
@pytest.mark.parametrize("position", range(1, LENGTH + 1))
def test_whatever_was_emitted_before_an_attempt_the_rest_is_the_same(order_of, way, begin, position):
    order = order_of(max_tokens=30, **way)
    tokens = answer(order)
    resumed = replace(order, token_ids=(*order.token_ids, *tokens[:position]))
    assert answer(resumed, begin) == tokens[position:]


@pytest.mark.parametrize("begin", [split, alone])
def test_each_of_three_choices_is_what_it_would_be_by_itself(order_of, begin):
    seeds = (3, 4, 5)
    order = order_of(
        max_tokens=30,
        temperature=1.5,
        choices=tuple(Choice(index=n, seed=seed) for n, seed in enumerate(seeds)),
    )
    bench = Bench()
    begin(bench, order)
    bench.settle()
    singles = [answer(replace(order, choices=(Choice(index=0, seed=seed),))) for seed in seeds]
    assert [bench.token_ids(number) for number in range(3)] == singles
    assert len(set(map(tuple, singles))) == 3


def test_an_answer_that_was_swapped_out_goes_on_within_its_guide(order_of):
    bench = Bench()
    policy = Forcing(DecodePolicy(budget_tokens=16, seats=4), 9).watch(bench.d)
    bench.d.core._policy = bench.d.worker._policy = policy
    bench.d.core._swap = SwapSpace(bench.d.cache, 8)
    order = order_of(max_tokens=30)
    assert answer(order, bench=bench) == answer(order)
    assert bench.d.worker.counts()["swap_outs"] == 1


@pytest.mark.parametrize("begin", [split, alone])
@pytest.mark.parametrize("dead_end", [0, 1, 4])
def test_an_answer_that_cannot_go_on_ends_by_its_cause_and_gives_everything_back(order_of, begin, dead_end):
    bench = Bench()
    order = order_of(
        max_tokens=30, choices=(Choice(index=0, seed=1), Choice(index=1, seed=2)), temperature=1.0
    )
    begin(bench, order, dead_end=dead_end)
    bench.until(lambda: bench.p.ends() + bench.d.ends())
    assert {cause for _, _, cause in bench.p.ends() + bench.d.ends()} == {"GUIDE_FAILED"}
    for side in (bench.p, bench.d):
        side.worker.cancel("g", order.key)
    bench.settle()
    assert len(bench.token_ids()) == dead_end
    begin(bench, replace(order, key=order.key._replace(request_id="next")))
    bench.settle()
    assert bench.p.worker.tokens().balanced() and bench.d.worker.tokens().balanced()


def test_a_first_token_outside_the_guide_ends_the_answer_where_it_was_handed_over(order_of):
    """A worker believes no other one: what was drawn elsewhere is followed here too."""
    bench, order = Bench(), order_of(max_tokens=30)
    ticket = bench.ticket(order)
    bench.d.worker.reserve("g", order, ticket, odd(order, dead_end=0))
    bench.p.worker.submit("g", order, bench.hand_off(ticket), odd(order))
    bench.until(bench.d.ends)
    assert bench.d.ends() == [("r", 1, "GUIDE_FAILED")]
    bench.settle()
