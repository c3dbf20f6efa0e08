"""One choice's progress: the table of transitions, and when its tokens end it."""

import pytest

from engine.draws import take
from engine.errors import EngineError, IllegalTransition
from engine.runs import Draws
from engine.sampling import Sampled
from engine.sequence import TRANSITIONS, EndReason, Event, SamplingParams, Sequence, State, StopRules

LEGAL = {
    ("WAITING", "START"): "RUNNING",
    ("WAITING", "DETACH"): "DETACHED",
    ("RUNNING", "PREEMPT"): "PREEMPTED",
    ("PREEMPTED", "RESUME"): "RUNNING",
    ("PREEMPTED", "DETACH"): "DETACHED",
    ("RUNNING", "FINISH"): "FINISHED",
    ("RUNNING", "DETACH"): "DETACHED",
    ("FINISHED", "DETACH"): "DETACHED",
}
EVERY_PAIR = [(state, event) for state in State for event in Event]


def sequence(tokens=(1, 2, 3), computed=0, state=State.WAITING, **rules):
    return Sequence(
        id=("request", 1, 0),
        tokens=list(tokens),
        sampling=SamplingParams(),
        stop=StopRules(**{"length_limit": 100, **rules}),
        arrived=0.0,
        computed=computed,
        state=state,
    )


def test_the_table_says_what_is_written_here():
    assert {(state.name, event.name): target.name for (state, event), target in TRANSITIONS.items()} == LEGAL


@pytest.mark.parametrize(("state", "event"), [pair for pair in EVERY_PAIR if pair in TRANSITIONS])
def test_a_legal_event_moves_to_its_target_and_changes_nothing_else(state, event):
    one = sequence(computed=2, state=state)
    one.advance(event)
    assert one == sequence(computed=2, state=TRANSITIONS[state, event])


@pytest.mark.parametrize(("state", "event"), [pair for pair in EVERY_PAIR if pair not in TRANSITIONS])
def test_an_illegal_event_raises_and_changes_nothing(state, event):
    one = sequence(computed=2, state=state)
    with pytest.raises(IllegalTransition, match=f"{event.name} in state {state.name}") as caught:
        one.advance(event)
    assert isinstance(caught.value, EngineError)
    assert one == sequence(computed=2, state=state)


def test_every_state_can_be_reached_and_only_detached_is_final():
    assert {State.WAITING, *TRANSITIONS.values()} == set(State)
    assert set(State) - {state for state, _ in TRANSITIONS} == {State.DETACHED}


def append(one, token):
    """As a step does it."""
    draws = Draws([one])
    take(draws, draws.positions, [Sampled(token, None, ())])


@pytest.mark.parametrize(
    ("known", "rules", "token", "end"),
    [
        (3, {}, 9, None),
        (3, {"stop_token_ids": frozenset({7})}, 9, None),
        (3, {"stop_token_ids": frozenset({7, 9})}, 9, EndReason.STOP),
        (3, {"length_limit": 5}, 9, None),
        (3, {"length_limit": 4}, 9, EndReason.LENGTH),
        (3, {"length_limit": 4, "stop_token_ids": frozenset({9})}, 9, EndReason.STOP),
        (3, {"min_length": 3, "stop_token_ids": frozenset({9})}, 9, EndReason.STOP),
        (3, {"min_length": 4, "stop_token_ids": frozenset({9})}, 9, None),
        (3, {"min_length": 4, "length_limit": 4, "stop_token_ids": frozenset({9})}, 9, EndReason.LENGTH),
    ],
)
def test_a_token_ends_the_sequence_by_the_rules(known, rules, token, end):
    one = sequence(tokens=range(known), computed=known, **rules)
    append(one, token)
    assert one.end_reason is end
    assert one.tokens == [*range(known), token]
    assert one.uncomputed() == 1


def test_a_stop_token_inside_the_prompt_ends_nothing():
    one = sequence(tokens=(7, 7), computed=2, stop_token_ids=frozenset({7}))
    append(one, 1)
    assert one.end_reason is None


@pytest.mark.parametrize("computed", [0, 2])
def test_nothing_is_appended_before_all_known_tokens_are_computed(computed):
    one = sequence(computed=computed)
    with pytest.raises(AssertionError):
        append(one, 9)
    assert one == sequence(computed=computed)


@pytest.mark.parametrize(
    ("known", "length_limit", "positions"), [(3, 4, 3), (3, 10, 9), (3, 3, 3), (1, 2, 1)]
)
def test_positions_max_leaves_out_the_last_token_that_is_sampled(known, length_limit, positions):
    assert sequence(tokens=range(known), length_limit=length_limit).positions_max() == positions


@pytest.mark.parametrize("length_limit", [4, 7])
def test_a_sequence_run_to_its_limit_never_computes_more_than_positions_max(length_limit):
    one = sequence(length_limit=length_limit)
    promised = one.positions_max()
    while one.end_reason is None:
        one.computed = len(one.tokens)
        append(one, 5)
    assert one.computed == promised
    assert len(one.tokens) == length_limit
