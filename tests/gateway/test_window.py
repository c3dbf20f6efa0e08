"""How much the workers are given at once."""

from dataclasses import replace

from gateway.router import WorkerView
from gateway.window import window_of

VIEW = WorkerView(
    address="w",
    ready=True,
    fingerprint=b"",
    tokens_max=100,
    queued_tokens=0,
    sequences=0,
    seats=8,
    free_blocks=1,
    total_blocks=1,
    picked=0,
)
GONE = replace(VIEW, ready=False)


def test_there_is_more_than_a_seat_can_hold_and_prompts_for_each_who_computes_them():
    one, two = window_of([VIEW], [VIEW]), window_of([VIEW, VIEW, GONE], [VIEW, VIEW, GONE])
    assert 8 < one.branches <= 12 and 16 < two.branches <= 24
    assert (two.prompts, two.prompt_tokens) == (2 * one.prompts, 2 * one.prompt_tokens)


def test_without_somebody_who_generates_nobody_is_kept_waiting():
    assert window_of([VIEW], []) is None and window_of([VIEW], [GONE]) is None


def test_those_who_generate_alone_are_given_no_more_than_each_can_compute():
    assert window_of([GONE], [VIEW, VIEW]) == window_of([VIEW, VIEW], [VIEW, VIEW])
