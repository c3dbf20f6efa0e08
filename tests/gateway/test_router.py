"""Which pair is picked: a table of situations."""

import pytest

from gateway.router import NoRoute, Route, WorkerView, pick


def worker(address, **changes):
    values = {
        "ready": True,
        "fingerprint": b"f",
        "tokens_max": 100,
        "queued_tokens": 0,
        "sequences": 0,
        "seats": 8,
        "free_blocks": 50,
        "total_blocks": 50,
        "picked": 0,
    }
    return WorkerView(address=address, **{**values, **changes})


P, D = worker("p"), worker("d")


@pytest.mark.parametrize(
    ("prefills", "decodes", "expected"),
    [
        ([P], [D], ("p", "d")),
        ([worker("busy", queued_tokens=9), worker("free", queued_tokens=8)], [D], ("free", "d")),
        ([P], [worker("full", sequences=4), worker("half", sequences=3)], ("p", "half")),
        ([P], [worker("small", sequences=2, seats=4), worker("big", sequences=3, seats=8)], ("p", "big")),
        ([P], [worker("a", free_blocks=10), worker("b", free_blocks=11)], ("p", "b")),
        ([P], [worker("a", sequences=7), worker("b", free_blocks=1)], ("p", "a")),
        (
            [worker("a", picked=2), worker("b", picked=1)],
            [worker("c", picked=3), worker("d", picked=4)],
            ("b", "c"),
        ),
        (
            [P, worker("gone", ready=False, picked=-1)],
            [D, worker("away", ready=False, picked=-1)],
            ("p", "d"),
        ),
        ([worker("short", tokens_max=59, picked=-1), worker("long", tokens_max=60)], [D], ("long", "d")),
        ([P], [worker("short", tokens_max=59, picked=-1), worker("long", tokens_max=60)], ("p", "long")),
        ([P], [worker("other", fingerprint=b"g", picked=-1), D], ("p", "d")),
        ([worker("other", fingerprint=b"g", picked=-1), P], [D], ("p", "d")),
        ([worker("zero", seats=0)], [worker("d", seats=0, total_blocks=0, free_blocks=0)], ("zero", "d")),
    ],
)
def test_the_pair_that_is_likely_to_answer_first(prefills, decodes, expected):
    route = pick(prefills, decodes, tokens=60)
    assert route == Route(prefill=expected[0], decode=expected[1])
    assert pick(reversed(prefills), reversed(decodes), tokens=60) == route


@pytest.mark.parametrize(
    ("prefills", "decodes", "missing"),
    [
        ([], [], "prefill"),
        ([], [D], "prefill"),
        ([P], [], "decode"),
        ([worker("p", ready=False)], [D], "prefill"),
        ([P], [worker("d", tokens_max=59)], "decode"),
        ([worker("p", tokens_max=59)], [D], "prefill"),
        ([P], [worker("d", fingerprint=b"g")], "pair"),
    ],
)
def test_without_a_pair_it_is_said_who_is_missing(prefills, decodes, missing):
    assert pick(prefills, decodes, tokens=60) == NoRoute(pool=missing)


def test_equal_workers_are_picked_in_turn():
    picked, counts = {"a": 0, "b": 0, "c": 0}, {"a": 0, "b": 0, "c": 0}
    for number in range(1, 10):
        views = [worker(name, picked=when) for name, when in picked.items()]
        route = pick([P], views, tokens=1)
        picked[route.decode] = number
        counts[route.decode] += 1
    assert set(counts.values()) == {3}


def test_a_pair_that_was_tried_is_picked_again_only_when_there_is_no_other():
    tried = [Route(prefill="p", decode="d")]
    assert pick([P], [D, worker("e", sequences=7)], tokens=60, tried=tried).decode == "e"
    assert pick([P, worker("q", queued_tokens=9)], [D], tokens=60, tried=tried).prefill == "q"
    assert pick([P], [D], tokens=60, tried=tried) == tried[0]


def test_a_second_attempt_has_neither_worker_of_the_first_where_there_are_others():
    sources = [P, worker("q", queued_tokens=9)]
    targets = [D, worker("e", sequences=7)]
    tried = [Route(prefill="p", decode="d")]
    assert pick(sources, targets, tokens=60, tried=tried) == Route(prefill="q", decode="e")


def test_an_answer_of_one_token_needs_no_decode_worker():
    assert pick([P], None, tokens=60) == Route(prefill="p", decode=None)
    assert pick([worker("gone", ready=False)], None, tokens=60) == NoRoute(pool="prefill")
