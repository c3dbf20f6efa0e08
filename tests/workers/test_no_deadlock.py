"""Every state that small pools can reach: in none does anybody wait for what will never happen."""

import itertools

import pytest

from tests.workers.pool_model import PairModel

FOUR = list(itertools.product(((1, 7), (2, 5)), repeat=4))
ALL, SOME = FOUR, FOUR[::3]
CASES = [
    # (requests, shape, how long a big one may be passed, whether anybody can be given up)
    (ALL, {}, 0.0, True),
    (SOME, {}, 1e9, True),
    (SOME, {"shared": 1}, 0.0, True),
    ([((1, 7), (2, 7), (1, 7)), ((1, 7), (1, 7), (2, 6))], {}, 0.0, True),
    (SOME, {"headroom": 0.3}, 1e9, False),
    (SOME, {"headroom": 1.0, "shared": 1}, 0.0, False),
]
STEPS_MAX = 200


def reachable(model):
    first = model.first()
    seen, new = {first}, [first]
    while new:
        for state in model.successors(new.pop()):
            if state not in seen:
                seen.add(state)
                new.append(state)
    return seen


def ends(model, states):
    """Follow each state until everybody who has come has an answer. Fails where nothing happens any more."""
    good = set()
    for first in states:
        way, state = [], first
        while state not in good and not model.over(state):
            way.append(state)
            state = model.onward(state)
            assert state != way[-1], f"nothing will ever happen again: {state}"
            assert len(way) < STEPS_MAX, f"for ever: {way[-8:]}"
        good.update(way)


@pytest.mark.parametrize("alone", [False, True], ids=["a pair", "alone"])
@pytest.mark.parametrize("swap", [False, True], ids=["given back", "swapped"])
@pytest.mark.parametrize(("requests", "shape", "passing_s", "tight"), CASES)
def test_whoever_waits_gets_on_and_nobody_is_given_up_too_often(
    requests, shape, passing_s, tight, swap, alone
):
    """Case 41, over all orders of events."""
    given_up = 0
    for limits in requests:
        shape = {"passing_s": passing_s, "swap": swap, "alone": alone, **shape}
        model = PairModel(limits=limits, blocks=6, prompt_blocks=6, **shape)
        states = reachable(model)
        ends(model, states)
        given_up += sum(any(one.preemptions for one in state) for state in states)
    assert (given_up > 0) == tight
