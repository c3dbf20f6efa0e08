"""Which pair is picked: a table of situations."""

from dataclasses import replace

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
        ([worker("a", free_blocks=10), worker("b", free_blocks=11)], [D], ("b", "d")),
        ([worker("a", queued_tokens=900), worker("full", free_blocks=0)], [D], ("a", "d")),
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
        ([worker("still", frozen=True, picked=-1), worker("busy", queued_tokens=9)], [D], ("busy", "d")),
        ([P], [worker("still", frozen=True), worker("full", sequences=8)], ("p", "full")),
        ([worker("still", frozen=True)], [worker("too", frozen=True)], ("still", "too")),
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


def test_what_is_cached_makes_up_for_as_much_work_in_the_queue_and_no_more():
    idle = worker("idle")
    for queued, best in ((39, "warm"), (41, "idle")):
        warm = worker("warm", cached_tokens=40, queued_tokens=queued, picked=9)
        assert pick([idle, warm], [D], tokens=60).prefill == best


def test_the_decode_worker_with_least_to_receive_is_picked_among_equals_but_room_counts_more():
    warm = worker("warm", cached_tokens=64, picked=9)
    assert pick([P], [worker("idle"), warm], tokens=60).decode == "warm"
    busier = replace(warm, sequences=1)
    assert pick([P], [worker("idle"), busier], tokens=60).decode == "idle"
    assert pick([P], [worker("idle"), replace(busier, cached_tokens=8192)], tokens=60).decode == "warm"
    assert pick([P], [worker("idle"), replace(warm, free_blocks=40)], tokens=60).decode == "idle"


def test_the_pair_is_weighed_together_where_not_all_can_hand_over_to_all():
    sources = [worker("warm", cached_tokens=60), worker("cold", fingerprint=b"g")]
    targets = [worker("full", sequences=8), worker("idle", fingerprint=b"g")]
    assert pick(sources, targets, tokens=60) == Route(prefill="cold", decode="idle")
    targets[0] = worker("roomy", sequences=0)
    assert pick(sources, targets, tokens=60) == Route(prefill="warm", decode="roomy")


def test_an_answer_of_one_token_goes_where_its_prompt_is_cached():
    assert pick([P, worker("warm", cached_tokens=16, picked=9)], None, tokens=60).prefill == "warm"


def test_a_hot_prefix_is_spread_as_soon_as_its_workers_queue_is_longer_than_the_prefix():
    """All at once: 1,000 tokens that one worker has, and 100 that are new each time."""
    queued = {"hot": 0, "b": 0, "c": 0}
    for number in range(90):
        views = [
            worker(name, queued_tokens=tokens, cached_tokens=1000 if name == "hot" else 0, picked=number)
            for name, tokens in queued.items()
        ]
        name = pick(views, [D], tokens=60).prefill
        queued[name] += 100 if name == "hot" else 1100
    assert min(queued.values()) > 0
    assert max(queued.values()) - min(queued.values()) <= 1100


def test_a_hot_prefix_is_spread_over_the_decode_workers():
    running = {"hot": 0, "b": 0}
    for _ in range(8):
        views = [
            worker(name, sequences=count, cached_tokens=1000 if name == "hot" else 0)
            for name, count in running.items()
        ]
        running[pick([P], views, tokens=60).decode] += 1
    assert running == {"hot": 4, "b": 4}


def test_a_pair_that_just_failed_is_picked_only_when_there_is_no_other():
    broken = [Route(prefill="p", decode="d")]
    full = worker("e", sequences=8)
    assert pick([P], [D, full], tokens=60, broken=broken).decode == "e"
    assert pick([P, worker("q", queued_tokens=9)], [D], tokens=60, broken=broken).prefill == "q"
    assert pick([P], [D], tokens=60, broken=broken) == broken[0]


def test_a_worker_of_an_earlier_attempt_is_better_than_a_pair_that_just_failed():
    sources, targets = [P, worker("q")], [D, worker("e")]
    tried, broken = [Route(prefill="p", decode="d")], [Route(prefill="q", decode="e")]
    route = pick(sources, targets, tokens=60, tried=tried, broken=broken)
    assert route in (Route(prefill="p", decode="e"), Route(prefill="q", decode="d"))
