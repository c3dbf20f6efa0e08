"""Budget, order and admission: what two policies share."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.policy import SequenceView
from engine.scheduling.admission import Room, fits
from engine.scheduling.budget import TokenBudget
from engine.scheduling.ordering import by_aged_length


def view(name, uncomputed=10, arrived=0.0, blocks=1):
    return SequenceView(id=(name, 1, 0), uncomputed=uncomputed, blocks_to_start=blocks, arrived=arrived)


def names(views):
    return [each.id[0] for each in views]


VIEWS = st.lists(
    st.builds(
        view,
        st.text("abcdef", min_size=1, max_size=4),
        st.integers(1, 5000),
        st.floats(0, 1000),
        st.integers(0, 40),
    ),
    max_size=20,
    unique_by=lambda each: each.id,
).map(tuple)


# --- budget


@given(tokens=st.integers(0, 10_000), wishes=st.lists(st.integers(0, 3000)))
def test_grants_never_exceed_the_budget_and_waste_none_of_it(tokens, wishes):
    budget = TokenBudget(tokens)
    grants = [budget.take(wanted) for wanted in wishes]
    assert all(0 <= granted <= wanted for granted, wanted in zip(grants, wishes, strict=True))
    assert sum(grants) == min(tokens, sum(wishes))
    assert budget.left == tokens - sum(grants)


def test_the_first_to_ask_is_served_first():
    budget = TokenBudget(10)
    assert [budget.take(wanted) for wanted in (4, 0, 9, 1)] == [4, 0, 6, 0]


def test_a_negative_wish_is_a_mistake_and_takes_nothing():
    budget = TokenBudget(3)
    with pytest.raises(AssertionError):
        budget.take(-1)
    assert budget.left == 3


# --- order


@given(views=VIEWS, now=st.floats(1000, 2000), ageing=st.floats(0, 1000))
def test_the_order_is_a_permutation_that_does_not_depend_on_the_order_given(views, now, ageing):
    ordered = by_aged_length(views, now, ageing)
    assert sorted(each.id for each in ordered) == sorted(each.id for each in views)
    assert by_aged_length(views[::-1], now, ageing) == ordered


@pytest.mark.parametrize(
    ("views", "ageing", "expected"),
    [
        ([view("long", 500), view("short", 20), view("middle", 90)], 10, ["short", "middle", "long"]),
        ([view("late", 40, arrived=9), view("early", 100, arrived=0)], 10, ["early", "late"]),
        ([view("late", 40, arrived=9), view("early", 140, arrived=0)], 10, ["late", "early"]),
        ([view("late", 40, arrived=9), view("early", 41, arrived=0)], 0, ["late", "early"]),
        ([view("a", 10, arrived=9), view("b", 100, arrived=0)], 10, ["b", "a"]),
        ([view("b"), view("a"), view("c")], 10, ["a", "b", "c"]),
        ([], 10, []),
    ],
    ids=[
        "short first",
        "waiting helps",
        "but not that much",
        "no ageing",
        "tie by arrival",
        "tie by id",
        "none",
    ],
)
def test_short_goes_first_and_waiting_counts_as_being_shorter(views, ageing, expected):
    assert names(by_aged_length(tuple(views), 10.0, ageing)) == expected


@given(views=VIEWS, ageing=st.floats(0.1, 1000))
def test_only_those_that_arrive_soon_enough_overtake(views, ageing):
    ordered = by_aged_length(views, 1000.0, ageing)
    for place, behind in enumerate(ordered):
        for before in ordered[:place]:
            assert before.arrived - behind.arrived <= behind.uncomputed / ageing + 1e-6


def run_with_short_arrivals(ageing, steps, long_tokens=2000, budget_tokens=100):
    """Each step of 0.1 s brings as much short work as the step can do. Returns when the long one is done, in
    seconds, or None."""
    serial = count()
    long = view("long", long_tokens)
    queue = [long]
    for step in range(steps):
        now = step * 0.1
        queue += [view(f"short{next(serial)}", 25, arrived=now) for _ in range(4)]
        budget = TokenBudget(budget_tokens)
        queue = [
            each._replace(uncomputed=each.uncomputed - budget.take(each.uncomputed))
            for each in by_aged_length(tuple(queue), now, ageing)
        ]
        queue = [each for each in queue if each.uncomputed]
        if all(each.id != long.id for each in queue):
            return now
    return None


def test_a_long_one_is_done_in_bounded_time_under_an_endless_stream_of_short_ones():
    """2,000 tokens age away in 20 s at 100 tokens/s; then it is first, and 2 s of whole steps finish it."""
    done = run_with_short_arrivals(ageing=100.0, steps=400)
    assert done is not None
    assert done <= 22.0


def test_without_ageing_the_same_stream_starves_it():
    assert run_with_short_arrivals(ageing=0.0, steps=400) is None


# --- admission


@given(
    views=VIEWS,
    free=st.integers(0, 100),
    seats=st.integers(-2, 12),
    limit=st.sampled_from([0.0, 300.0, float("inf")]),
)
def test_what_is_admitted_fits_and_keeps_the_order(views, free, seats, limit):
    admitted = fits(views, Room(free_blocks=free, seats=seats), 1000.0, limit)
    assert sum(each.blocks_to_start for each in admitted) <= free
    assert len(admitted) <= max(0, seats)
    places = [views.index(each) for each in admitted]
    assert places == sorted(set(places))


@given(views=VIEWS, free=st.integers(0, 100), seats=st.integers(0, 12))
def test_nobody_is_left_out_who_could_start(views, free, seats):
    """With passing allowed for ever: whoever is not admitted had no seat or did not fit what was left."""
    admitted = fits(views, Room(free_blocks=free, seats=seats), 1000.0, float("inf"))
    left = free - sum(each.blocks_to_start for each in admitted)
    if len(admitted) < seats:
        assert all(each in admitted or each.blocks_to_start > left for each in views)


@pytest.mark.parametrize(
    ("blocks", "free", "seats", "waited", "expected"),
    [
        ((2, 3, 1), 6, 9, 0, ["0", "1", "2"]),
        ((2, 3, 1), 6, 2, 0, ["0", "1"]),
        ((2, 3, 1), 6, 0, 0, []),
        ((2, 3, 1), 5, 9, 0, ["0", "1"]),
        ((9, 3, 1), 5, 9, 1.9, ["1", "2"]),
        ((9, 3, 1), 5, 9, 2.0, []),
        ((2, 9, 1), 5, 9, 2.0, ["0"]),
        ((0, 9), 0, 9, 0, ["0"]),
    ],
    ids=[
        "all",
        "seats",
        "no seat",
        "blocks",
        "passed while young",
        "not passed when old",
        "blocks the rest",
        "0",
    ],
)
def test_admission_stops_at_blocks_seats_or_somebody_who_has_waited_too_long(
    blocks, free, seats, waited, expected
):
    views = [view(str(place), arrived=100.0 - waited, blocks=needed) for place, needed in enumerate(blocks)]
    assert names(fits(views, Room(free_blocks=free, seats=seats), now=100.0, passing_limit_s=2.0)) == expected


def admit_with_small_arrivals(limit, steps, pool=10):
    """One of 8 blocks waits in a pool full of small ones, and each 0.1 s brings another of 2 blocks that will
    run for 1 s. Returns when the big one starts, in seconds, or None."""
    waiting = [view("big", blocks=8)]
    running = [(0.2 * place, 2) for place in range(1, pool // 2 + 1)]  # (ends, blocks)
    for step in range(steps):
        now = step * 0.1
        waiting.append(view(f"small{step}", arrived=now, blocks=2))
        running = [(ends, blocks) for ends, blocks in running if ends > now]
        free = pool - sum(blocks for _, blocks in running)
        admitted = fits(waiting, Room(free_blocks=free, seats=99), now, limit)
        if "big" in names(admitted):
            return now
        waiting = [each for each in waiting if each not in admitted]
        running += [(now + 1.0, each.blocks_to_start) for each in admitted]
    return None


def test_a_big_one_starts_once_its_limit_is_over_and_the_others_have_run_out():
    started = admit_with_small_arrivals(limit=3.0, steps=300)
    assert started is not None
    assert started <= 3.0 + 1.0 + 0.1


def test_without_a_limit_small_ones_pass_a_big_one_for_ever():
    assert admit_with_small_arrivals(limit=float("inf"), steps=300) is None
