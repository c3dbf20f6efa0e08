"""Which pair is picked: a table of situations."""

from dataclasses import replace

import pytest

from engine.scheduling import pace
from gateway.router import DELAY_STEPS, LONE_MS, STEP_SHARE, NoRoute, Route, WorkerView, pick
from service.orders import AttemptKey, Beam, Choice, SequenceOrder


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


def order_of(tokens=60, known=20, choices=1, beam=None):
    """tokens: of the sequence at its longest; known: of them, at least one less."""
    known = min(known, tokens - 1)
    return SequenceOrder(
        key=AttemptKey(request_id="r", attempt=1),
        choices=tuple(Choice(index=number, seed=0) for number in range(choices)),
        token_ids=tuple(range(known)),
        prompt_tokens=known,
        max_tokens=tokens - known,
        min_tokens=0,
        stop_token_ids=frozenset(),
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        logprobs=None,
        beam=beam,
    )


P, D = worker("p"), worker("d")
ALONE = Route(prefill=None, decode="d")
ORDER = order_of()
ONE_TOKEN = order_of(tokens=21, known=20)


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
        ([worker("still", frozen=True)], [D], (None, "d")),
        ([worker("short", tokens_max=59, picked=-1), worker("long", tokens_max=60)], [D], ("long", "d")),
        ([P], [worker("short", tokens_max=59, picked=-1), worker("long", tokens_max=60)], ("p", "long")),
        ([P], [worker("other", fingerprint=b"g", picked=-1), D], ("p", "d")),
        ([worker("other", fingerprint=b"g", picked=-1), P], [D], ("p", "d")),
        ([worker("zero", seats=0)], [worker("d", seats=0, total_blocks=0, free_blocks=0)], ("zero", "d")),
    ],
)
def test_the_pair_that_is_likely_to_answer_first(prefills, decodes, expected):
    route = pick(prefills, decodes, ORDER)
    assert route == Route(prefill=expected[0], decode=expected[1])
    assert pick(reversed(prefills), reversed(decodes), ORDER) == route


@pytest.mark.parametrize(
    ("prefills", "decodes", "missing"),
    [
        ([], [], "decode"),
        ([P], [], "decode"),
        ([P], [worker("d", ready=False)], "decode"),
        ([P], [worker("d", tokens_max=59)], "decode"),
    ],
)
def test_without_anybody_who_generates_it_is_said_who_is_missing(prefills, decodes, missing):
    nowhere = pick(prefills, decodes, ORDER)
    assert isinstance(nowhere, NoRoute) and nowhere.pool == missing


@pytest.mark.parametrize(
    ("prefills", "decodes", "away"),
    [
        ([P], [worker("still", frozen=True)], True),
        ([worker("still", frozen=True)], [worker("too", frozen=True)], True),
        ([worker("still", frozen=True)], [], True),
        ([P], [worker("gone", ready=False)], True),
        ([P], [worker("still", frozen=True, tokens_max=59)], False),
        ([P], [worker("gone", ready=False), worker("small", tokens_max=59)], False),
        ([P], [worker("still", frozen=True, ready=False)], True),
    ],
)
def test_whoever_is_away_or_stands_still_is_not_picked_and_it_is_said_that_waiting_may_help(
    prefills, decodes, away
):
    assert pick(prefills, decodes, ORDER) == NoRoute(pool="decode", away=away)


def test_equal_workers_are_picked_in_turn():
    picked, counts = {"a": 0, "b": 0, "c": 0}, {"a": 0, "b": 0, "c": 0}
    for number in range(1, 10):
        views = [worker(name, picked=when) for name, when in picked.items()]
        route = pick([P], views, order_of(tokens=4, known=2))
        picked[route.decode] = number
        counts[route.decode] += 1
    assert set(counts.values()) == {3}


def test_a_pair_that_was_tried_is_picked_again_only_when_there_is_no_other():
    tried = [Route(prefill="p", decode="d")]
    assert pick([P], [D, worker("e", sequences=7)], ORDER, tried=tried).decode == "e"
    assert pick([P, worker("q", queued_tokens=9)], [D], ORDER, tried=tried).prefill == "q"
    assert pick([P], [D], ORDER, tried=tried) == tried[0]


def test_a_second_attempt_has_neither_worker_of_the_first_where_there_are_others():
    sources = [P, worker("q", queued_tokens=9)]
    targets = [D, worker("e", sequences=7)]
    tried = [Route(prefill="p", decode="d")]
    assert pick(sources, targets, ORDER, tried=tried) == Route(prefill="q", decode="e")


def test_an_answer_of_one_token_needs_no_decode_worker():
    assert pick([P], [], ONE_TOKEN) == Route(prefill="p", decode=None)
    assert pick([P], [D], ONE_TOKEN) == Route(prefill="p", decode=None)
    assert pick([worker("gone", ready=False)], [], ONE_TOKEN) == NoRoute(pool="prefill", away=True)


def test_what_is_cached_makes_up_for_as_much_work_in_the_queue_and_no_more():
    idle = worker("idle")
    for queued, best in ((14, "warm"), (16, "idle")):
        warm = worker("warm", cached_tokens=15, queued_tokens=queued, picked=9)
        assert pick([idle, warm], [D], ORDER).prefill == best


def test_the_decode_worker_with_least_to_receive_is_picked_among_equals_but_room_counts_more():
    order = order_of(tokens=9000, known=8192)
    source, idle = worker("p", tokens_max=9000), worker("idle", tokens_max=9000)
    warm = replace(idle, address="warm", cached_tokens=64, picked=9)
    busier = replace(warm, sequences=1)
    for other, best in (
        (warm, "warm"),
        (busier, "idle"),
        (replace(busier, cached_tokens=8192), "warm"),
        (replace(warm, free_blocks=40), "idle"),
    ):
        assert pick([source], [idle, other], order).decode == best


def test_the_pair_is_weighed_together_where_not_all_can_hand_over_to_all():
    sources = [worker("warm", cached_tokens=20), worker("cold", fingerprint=b"g")]
    targets = [worker("full", sequences=8), worker("idle", fingerprint=b"g")]
    assert pick(sources, targets, ORDER) == Route(prefill="cold", decode="idle")
    targets[0] = worker("roomy", sequences=0)
    assert pick(sources, targets, ORDER) == Route(prefill="warm", decode="roomy")


def test_an_answer_of_one_token_goes_where_its_prompt_is_cached():
    assert pick([P, worker("warm", cached_tokens=16, picked=9)], [], ONE_TOKEN).prefill == "warm"


def test_a_hot_prefix_is_spread_as_soon_as_its_workers_queue_is_longer_than_the_prefix():
    """All at once: 1,000 tokens that one worker has, and 100 that are new each time."""
    queued, order = {"hot": 0, "b": 0, "c": 0}, order_of(tokens=1200, known=1100)
    for number in range(90):
        views = [
            worker(
                name,
                queued_tokens=tokens,
                cached_tokens=1000 if name == "hot" else 0,
                picked=number,
                tokens_max=1200,
            )
            for name, tokens in queued.items()
        ]
        name = pick(views, [worker("d", tokens_max=1200)], order).prefill
        queued[name] += 100 if name == "hot" else 1100
    assert min(queued.values()) > 0
    assert max(queued.values()) - min(queued.values()) <= 1100


def test_a_hot_prefix_is_spread_over_the_decode_workers():
    running = {"hot": 0, "b": 0}
    for _ in range(8):
        views = [
            worker(name, sequences=count, cached_tokens=1000 if name == "hot" else 0, tokens_max=1200)
            for name, count in running.items()
        ]
        order = order_of(tokens=1200, known=1100)
        running[pick([worker("p", tokens_max=1200)], views, order).decode] += 1
    assert running == {"hot": 4, "b": 4}


def test_a_pair_that_just_failed_is_picked_only_when_there_is_no_other():
    broken = [Route(prefill="p", decode="d")]
    full = worker("e", sequences=8)
    assert pick([P], [D, full], ORDER, broken=broken).decode == "e"
    assert pick([P, worker("q", queued_tokens=9)], [D], ORDER, broken=broken).prefill == "q"
    assert pick([P], [D], ORDER, broken=broken) == ALONE, "what is broken is the way between them"
    broken = [*broken, ALONE]
    assert pick([P], [D], ORDER, broken=broken).decode == "d"


def test_a_worker_of_an_earlier_attempt_is_better_than_a_pair_that_just_failed():
    sources, targets = [P, worker("q")], [D, worker("e")]
    tried, broken = [Route(prefill="p", decode="d")], [Route(prefill="q", decode="e")]
    route = pick(sources, targets, ORDER, tried=tried, broken=broken)
    assert route in (Route(prefill="p", decode="e"), Route(prefill="q", decode="d"))


def test_a_worker_that_failed_is_picked_only_when_there_is_no_other():
    broken = [Route(prefill=None, decode="d")]
    assert pick([P], [D, worker("e", sequences=8)], ORDER, broken=broken).decode == "e"
    assert pick([P], [D], ORDER, broken=broken) == Route(prefill="p", decode="d")
    broken = [Route(prefill="p", decode=None)]
    assert pick([P, worker("q", queued_tokens=9)], [D], ORDER, broken=broken).prefill == "q"


@pytest.mark.parametrize(
    ("prefills", "broken"),
    [
        ([], []),
        ([worker("p", ready=False)], []),
        ([worker("p", tokens_max=59)], []),
        ([worker("p", fingerprint=b"g")], []),
        ([P], [Route(prefill="p", decode=None)]),
        ([P], [Route(prefill="p", decode="d")]),
    ],
)
@pytest.mark.parametrize("known", [1, 58])
def test_without_a_prefill_worker_that_can_hand_over_the_decode_worker_serves_alone(prefills, broken, known):
    assert pick(prefills, [D], order_of(known=known), broken=broken) == ALONE
    if not any(each.ready for each in prefills):
        assert pick(prefills, [D], order_of(known=known, tokens=known + 1)) == ALONE


def test_a_decode_worker_that_failed_by_itself_is_no_reason_to_spare_the_prefill_worker():
    assert pick([P], [D], ORDER, broken=[ALONE]) == Route(prefill="p", decode="d")


MEASURED = {"step_ms": 20.0, "prompt_token_ms": 1.0}
SHORT = int(DELAY_STEPS * 20)
LONE = int(LONE_MS)


@pytest.mark.parametrize(
    ("known", "target", "expected"),
    [
        # What delays nobody by more than it may is computed where it is needed.
        (SHORT, {}, None),
        (SHORT + 1, {"sequences": 1}, "p"),
        (90, {"cached_tokens": 80}, None),
        (90, {"cached_tokens": 40, "sequences": 1}, "p"),
        # Others are before it, or get on slowly.
        (SHORT // 2, {"queued_tokens": SHORT}, "p"),
        (SHORT, {"prompt_token_ms": 2.0}, "p"),
        (SHORT, {"step_ms": 10.0, "sequences": 1}, "p"),
        # Where nobody generates, nobody is delayed; but somebody may come.
        (LONE - 10, {"step_ms": 10.0, "queued_tokens": 10}, None),
        (LONE - 10, {"queued_tokens": 11}, "p"),
        # Where nobody has measured how long a step is, nobody can say who is delayed.
        (1, {"step_ms": 0.0}, "p"),
        # Its own pace may be unknown: then it is that of the others.
        (SHORT, {"prompt_token_ms": 0.0}, None),
        # Many streams wait for it together; a few tokens do not hurt them.
        (SHORT // 2, {"sequences": 6}, "p"),
        (1, {"sequences": 1, "prompt_token_ms": 0.1}, None),
    ],
)
def test_a_prompt_is_computed_beside_the_streams_when_it_is_short_and_sooner_done(known, target, expected):
    source = worker("p", prompt_token_ms=1.0, queued_tokens=20)
    target = worker("d", **{**MEASURED, **target})
    route = pick([source], [target], order_of(tokens=100, known=known))
    assert route == Route(prefill=expected, decode="d")


def test_a_short_prompt_goes_to_the_prefill_worker_when_that_answers_sooner():
    fast, slow = worker("p", prompt_token_ms=0.01), worker("p", prompt_token_ms=2.0)
    target = worker("d", **MEASURED)
    assert pick([fast], [target], order_of(known=10)).prefill == "p"
    assert pick([slow], [target], order_of(known=10)).prefill is None


def test_the_faster_of_two_takes_more_of_the_queue():
    fast, slow = worker("fast", prompt_token_ms=0.5), worker("slow", prompt_token_ms=2.0)
    for queued, best in ((59, "fast"), (61, "slow")):
        busy = replace(fast, queued_tokens=queued)
        assert pick([busy, slow], [D], ORDER).prefill == best


def test_a_worker_that_has_measured_nothing_is_taken_to_be_like_the_others():
    measured, new = worker("a", prompt_token_ms=0.1, queued_tokens=100), worker("b", queued_tokens=99)
    assert pick([measured, new], [D], ORDER).prefill == "b"
    assert pick([measured, replace(new, queued_tokens=101)], [D], ORDER).prefill == "a"


def test_a_slow_way_is_taken_only_by_what_is_there_already():
    slow, fast = (
        worker("slow", hand_off_token_ms=2.0),
        worker("fast", queued_tokens=20, hand_off_token_ms=0.1),
    )
    assert pick([slow, fast], [D], ORDER).prefill == "fast"
    assert pick([slow, fast], [worker("d", cached_tokens=20)], ORDER).prefill == "slow"


def test_of_two_that_could_serve_alone_the_one_with_room_does():
    views = [worker("full", sequences=7, **MEASURED), worker("free", sequences=1, **MEASURED)]
    assert pick([], views, ORDER) == Route(prefill=None, decode="free")


@pytest.mark.parametrize("order", [order_of(choices=3), order_of(beam=Beam(width=3))])
def test_whoever_serves_alone_has_room_for_all_branches(order):
    small, large = (
        worker(f"{seats}", seats=seats, total_blocks=500, sequences=seats - 2) for seats in (2, 3)
    )
    assert pick([], [small, large], order) == Route(prefill=None, decode="3")


def test_what_was_tried_alone_is_tried_elsewhere_next():
    assert pick([], [D, worker("e", sequences=5)], ORDER, tried=[ALONE]).decode == "e"
    assert pick([], [D], ORDER, tried=[ALONE]) == ALONE


def test_gateway_and_workers_mean_the_same_share_of_a_step():
    assert STEP_SHARE == pace.STEP_SHARE
