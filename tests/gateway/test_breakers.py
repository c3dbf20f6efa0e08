"""How long what failed is avoided: seconds, then more of them, and not at all once it works."""

import pytest

from gateway.breakers import FIRST_S, LONGEST_S, Breakers
from gateway.router import Route

PAIR, OTHER = Route(prefill="p", decode="d"), Route(prefill="p", decode="e")


@pytest.fixture
def pairs():
    return Breakers()


def avoided_s(pairs, since):
    """How long from then on the pair is avoided, in tenths of a second."""
    return next(tenths / 10 for tenths in range(1000) if PAIR not in pairs.avoided(since + tenths / 10))


def test_a_pair_that_failed_is_avoided_for_a_while_and_no_other(pairs):
    pairs.failed(PAIR, 100.0)
    assert pairs.avoided(100.0) == {PAIR}
    assert avoided_s(pairs, 100.0) == FIRST_S


def test_failures_of_attempts_that_were_under_way_count_as_one(pairs):
    for moment in (100.0, 100.5, 101.9):
        pairs.failed(PAIR, moment)
    assert avoided_s(pairs, 100.0) == FIRST_S


def test_each_further_failure_counts_twice_as_long_up_to_a_limit(pairs):
    pairs.failed(PAIR, 100.0)
    now, pauses = 100.0, []
    for _ in range(6):
        now += avoided_s(pairs, now)
        pairs.begin(PAIR, now)
        pairs.failed(PAIR, now + 1)
        now += 1
        pauses.append(avoided_s(pairs, now))
    assert pauses == [4, 8, 16, LONGEST_S, LONGEST_S, LONGEST_S]


def test_while_one_attempt_finds_out_the_others_go_on_avoiding_the_pair(pairs):
    pairs.failed(PAIR, 100.0)
    assert PAIR not in pairs.avoided(102.0)
    pairs.begin(PAIR, 102.0)
    assert PAIR in pairs.avoided(103.0)
    assert PAIR not in pairs.avoided(102.0 + FIRST_S), "an attempt that never says is not waited for"


def test_a_hand_off_that_gets_through_makes_all_of_it_forgotten(pairs):
    pairs.failed(PAIR, 100.0)
    pairs.begin(PAIR, 102.0)
    pairs.failed(PAIR, 103.0)
    pairs.worked([PAIR])
    assert pairs.avoided(103.0) == set()
    pairs.failed(PAIR, 104.0)
    assert avoided_s(pairs, 104.0) == FIRST_S


def test_an_attempt_on_a_pair_that_never_failed_leaves_no_trace(pairs):
    pairs.begin(OTHER, 1.0)
    pairs.worked([OTHER])
    assert pairs.avoided(1.0) == set()


def test_a_failure_of_one_that_had_no_other_pair_counts_again_once_the_time_is_over(pairs):
    pairs.failed(PAIR, 100.0)
    pairs.begin(PAIR, 101.0)
    pairs.failed(PAIR, 105.0)
    assert avoided_s(pairs, 105.0) == FIRST_S


def test_an_attempt_on_a_pair_finds_out_for_the_pair_and_for_each_of_its_workers(pairs):
    worker, pair = Route(prefill=None, decode="d"), PAIR
    for route in (worker, pair):
        pairs.failed(route, 100.0)
    assert pairs.avoided(102.0) == set()
    pairs.begin(PAIR, 102.0)
    assert pairs.avoided(103.0) == {worker, pair}
    pairs.failed(worker, 103.0)
    pairs.worked([pair])
    assert pairs.avoided(103.0 + FIRST_S) == {worker}, "the link works, and the worker failed once more"


def test_a_worker_that_failed_is_part_of_every_pair_that_it_is_in():
    assert Route(prefill=None, decode="d") in PAIR.parts()
    assert Route(prefill=None, decode="d") not in OTHER.parts()
    assert Route(prefill="p", decode=None).parts() == {Route(prefill="p", decode=None)}
