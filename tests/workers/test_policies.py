import pytest

from decode_worker.policy import DecodePolicy
from engine.policy import SequenceView, View
from engine.scheduling.admission import Room
from engine.scheduling.pace import Pace, Rate
from prefill_worker.policy import PrefillPolicy


def view_of(name, uncomputed, *, blocks=0, arrived=0.0):
    return SequenceView(
        id=(name, 1, 0),
        uncomputed=uncomputed,
        blocks_to_start=blocks,
        arrived=arrived,
    )


def planned(policy, waiting=(), running=(), blocks=100, now=0.0):
    plan = policy.plan(View(waiting=tuple(waiting), running=tuple(running), available_blocks=blocks), now)
    return {work.id[0]: work.tokens for work in plan.work}


PREFILL = PrefillPolicy(budget_tokens=100, seats=4, ageing_tokens_per_s=10.0, passing_s=2.0)
DECODE = DecodePolicy(budget_tokens=100, seats=4, passing_s=2.0)


@pytest.mark.parametrize(
    ("waiting", "running", "expected"),
    [
        ([], [], {}),
        ([view_of("a", 30)], [], {"a": 30}),
        ([view_of("a", 300)], [], {"a": 100}),
        ([view_of("a", 40), view_of("b", 50), view_of("c", 60)], [], {"a": 40, "b": 50, "c": 10}),
        ([view_of("short", 20)], [view_of("long", 400)], {"short": 20, "long": 80}),
        ([view_of("big", 10, blocks=101)], [], {}),
        ([view_of("big", 10, blocks=101), view_of("small", 20, blocks=2)], [], {"small": 20}),
        ([view_of(n, 10) for n in "abcdef"], [], {"a": 10, "b": 10, "c": 10, "d": 10}),
    ],
)
def test_the_prefill_policy_fills_its_budget_with_the_shortest_prompts(waiting, running, expected):
    assert planned(PREFILL, waiting, running) == expected


def test_a_long_prompt_that_has_waited_goes_before_a_short_one():
    short, long = view_of("short", 60, arrived=100.0), view_of("long", 400, arrived=0.0)
    assert planned(PREFILL, [short, long], now=100.0) == {"long": 100}


def test_one_that_does_not_fit_is_passed_for_a_bounded_time_only():
    big, small = view_of("big", 10, blocks=101), view_of("small", 20, blocks=2, arrived=5.0)
    assert planned(PREFILL, [big, small], now=1.0) == {"small": 20}
    assert planned(PREFILL, [big, small], now=5.0) == {}


@pytest.mark.parametrize(
    ("waiting", "running", "expected"),
    [
        ([], [view_of("a", 1), view_of("b", 1)], {"a": 1, "b": 1}),
        ([view_of("p", 500)], [view_of("a", 1), view_of("b", 1)], {"a": 1, "b": 1, "p": 98}),
        ([view_of("p", 500)], [view_of("q", 90), view_of("a", 1)], {"a": 1, "q": 90, "p": 9}),
        ([view_of("p", 5)], [view_of(n, 1) for n in "abcd"], {"a": 1, "b": 1, "c": 1, "d": 1}),
        ([view_of("p", 5, blocks=101)], [view_of("a", 1)], {"a": 1}),
    ],
)
def test_the_decode_policy_gives_every_generating_sequence_its_token_first(waiting, running, expected):
    assert planned(DECODE, waiting, running) == expected


STEPS_OF_TEN_TOKENS = Pace(steps=Rate(0.02, 1), tokens=Rate(0.2, 100))


@pytest.mark.parametrize(
    ("prompts", "generating", "expected"),
    [
        ([500], 4, [2]),
        ([500], 1, [2]),
        ([500], 0, [100]),
        # Where prompts outnumber streams, they have as much of a step as they outnumber them.
        ([500] * 3, 1, [20, 0, 0]),
        ([8] * 4, 2, [8, 2, 0, 0]),
        # Never more than the budget.
        ([500] * 20, 1, [99] + [0] * 19),
    ],
)
def test_prompts_make_a_step_that_generates_longer_by_a_quarter_at_most(prompts, generating, expected):
    policy = DecodePolicy(budget_tokens=100, seats=32)
    running = [view_of(f"g{n}", 1, arrived=-1.0) for n in range(generating)]
    running += [view_of(f"p{n:02}", left) for n, left in enumerate(prompts)]
    view = View(waiting=(), running=tuple(running), available_blocks=100, pace=STEPS_OF_TEN_TOKENS)
    work = {each.id[0]: each.tokens for each in policy.plan(view, 0.0).work}
    assert [work.get(f"p{n:02}", 0) for n in range(len(prompts))] == expected
    assert all(work[f"g{n}"] == 1 for n in range(generating))


def test_generating_sequences_are_never_cut_by_the_budget():
    policy = DecodePolicy(budget_tokens=2, seats=8)
    work = planned(policy, [view_of("p", 9)], [view_of(n, 1) for n in "abcd"])
    assert work == {**dict.fromkeys("abcd", 1), "p": 1}, "and a prompt gets on all the same"


def test_reservations_are_granted_in_order_while_blocks_and_seats_last():
    asking = tuple(view_of(n, 10, blocks=30) for n in "abcde")
    granted = DECODE.grant(asking, room=Room(free_blocks=100, seats=4), now=0.0)
    assert [each.id[0] for each in granted] == ["a", "b", "c"]
    granted = DECODE.grant(asking, room=Room(free_blocks=1000, seats=1), now=0.0)
    assert [each.id[0] for each in granted] == ["a"]


def running(name, *, needs=0, frees=1, cost=10, arrived=0.0, steadfast=False, grows=0):
    return SequenceView(
        id=(name, 1, 0),
        uncomputed=1,
        blocks_to_start=0,
        arrived=arrived,
        blocks_to_continue=needs,
        blocks_to_end=grows,
        blocks_freed=frees,
        cost_to_resume=cost,
        steadfast=steadfast,
    )


def given_up(views, blocks=0):
    plan = DECODE.plan(View(waiting=(), running=tuple(views), available_blocks=blocks), 0.0)
    return [each[0] for each in plan.preempt], [each.id[0] for each in plan.work]


@pytest.mark.parametrize(
    ("views", "blocks", "expected"),
    [
        # Blocks last: nobody goes.
        ([running("a", needs=1), running("b", arrived=1)], 1, ([], ["a", "b"])),
        # The one that costs least, whoever lacks the block.
        (
            [running("a", needs=1), running("b", cost=5, arrived=1), running("c", cost=9, arrived=2)],
            0,
            (["b"], ["a", "c"]),
        ),
        # One that lacks a block itself needs it no more when it is gone.
        ([running("a"), running("b", needs=1, frees=0, arrived=1)], 0, (["b"], ["a"])),
        # The later of two that cost the same.
        ([running("a"), running("b", arrived=1), running("c", needs=1, arrived=2)], 0, (["c"], ["a", "b"])),
        # Never the first, however cheap, and never one that was promised all.
        (
            [running("a", needs=1, cost=0), running("b", cost=1, arrived=1, steadfast=True)],
            0,
            ([], ["b"]),
        ),
        # As many as it takes.
        (
            [running("a", needs=1), *(running(n, needs=1, arrived=1, cost=k) for k, n in enumerate("bcd"))],
            0,
            (["b", "c"], ["a", "d"]),
        ),
    ],
)
def test_when_blocks_are_short_the_cheapest_goes(views, blocks, expected):
    assert given_up(views, blocks) == expected


def test_nobody_comes_in_while_blocks_are_short_and_who_was_swapped_out_comes_first():
    back, new = view_of("back", 1, blocks=5, arrived=3.0), view_of("new", 5, blocks=2)

    def entering(blocks, needs=0):
        view = View(
            waiting=(new,), running=(running("a", needs=needs),), available_blocks=blocks, swapped=(back,)
        )
        return [work.id[0] for work in DECODE.plan(view, 4.0).work]

    assert entering(4) == ["a"], "new would fit, and waits"
    assert entering(5) == ["a", "back"]
    assert entering(7) == ["a", "back", "new"]
    assert entering(7, needs=1) == ["a", "back"]


@pytest.mark.parametrize(("share", "names"), [(0.0, "abcde"), (0.3, "abcd"), (0.5, "ab"), (1.0, "a")])
def test_headroom_keeps_a_share_of_what_everybody_may_still_need(share, names):
    """Those that run may yet need forty blocks; each new one needs twelve, and up to thirty more."""
    asking = tuple(
        SequenceView(id=(n, 1, 0), uncomputed=9, blocks_to_start=12, blocks_to_end=30, arrived=0.0)
        for n in "abcdefg"
    )
    room = Room(free_blocks=100, seats=5, growing_blocks=40, headroom=share)
    assert (
        "".join(
            each.id[0] for each in DecodePolicy(budget_tokens=9, seats=9).grant(asking, room=room, now=0.0)
        )
        == names
    )


def test_reservations_are_granted_in_order_of_arrival_not_of_asking():
    asking = (view_of("later", 9, blocks=3, arrived=2.0), view_of("resumed", 9, blocks=3, arrived=-1.0))
    granted = DECODE.grant(asking, room=Room(free_blocks=3, seats=4), now=3.0)
    assert [each.id[0] for each in granted] == ["resumed"]


def test_a_big_reservation_is_granted_in_a_bounded_time_however_many_small_ones_come():
    """Eight blocks, all taken by small ones of one block; one of them ends and another asks every tenth of a second."""
    big, free, now, ends_at = view_of("big", 9, blocks=8), 0, 0.0, [k / 10 for k in range(1, 9)]
    while True:
        now += 0.1
        free += sum(each <= now for each in ends_at)
        ends_at = [each for each in ends_at if each > now]
        small = view_of(f"s{now:.1f}", 2, blocks=1, arrived=now)
        granted = DECODE.grant((small, big), room=Room(free_blocks=free, seats=9), now=now)
        if big in granted:
            break
        free -= len(granted)
        ends_at += [now + 0.8] * len(granted)
        assert now < 2.0 + 0.8 + 0.2, "the bound on passing, and the longest of those that run"


def test_those_that_are_passed_by_take_no_seat():
    """Case 45."""
    coming = [
        SequenceView(id=(f"c{n}", 1, 0), uncomputed=9, blocks_to_start=1, arrived=0.0, coming=8)
        for n in range(6)
    ]
    others = [view_of(f"o{n}", 9, blocks=1, arrived=1.0) for n in range(6)]
    assert set(planned(DECODE, [*coming, *others], [view_of("r", 1)], now=2.0)) == {"r", "o0", "o1", "o2"}
