"""How fast an engine is: what its steps show, and what it knows before any."""

import math

import pytest

from engine.scheduling.pace import Load, Pace, Rate


def paced(*steps):
    """steps: (sequences that generate, tokens of prompts, seconds)."""
    pace = Pace()
    for generating, prompt_tokens, seconds in steps:
        pace = pace.after_step(Load(generating, prompt_tokens), seconds)
    return pace


def test_nothing_is_known_before_anything_was_measured():
    assert (Pace().steps.each_s(), Pace().tokens.each_s()) == (0.0, 0.0)
    assert Pace().tokens_per_step() == math.inf
    assert paced((4, 0, 0.02)).tokens_per_step() == math.inf
    assert paced((0, 100, 0.1)).tokens_per_step() == math.inf


def test_a_step_that_only_generates_and_one_that_only_reads_show_one_figure_each():
    pace = paced((4, 0, 0.02), (0, 100, 0.1))
    assert pace.steps.each_s() == pytest.approx(0.02)
    assert pace.tokens.each_s() == pytest.approx(0.001)
    assert pace.tokens_per_step() == pytest.approx(20)


def test_of_a_step_that_does_both_the_prompt_took_what_is_left():
    pace = paced((4, 0, 0.02), (4, 10, 0.05))
    assert (pace.steps.each_s(), pace.tokens.each_s()) == (pytest.approx(0.02), pytest.approx(0.003))


def test_a_step_that_is_shorter_than_expected_shows_no_negative_time():
    assert paced((4, 0, 0.02), (4, 10, 0.01)).tokens.each_s() == 0.0


def test_late_measurements_replace_early_ones():
    pace = paced(*[(1, 0, 1.0)] * 50, *[(1, 0, 0.01)] * 100)
    assert pace.steps.each_s() == pytest.approx(0.01, rel=0.01)


def test_a_large_measurement_weighs_more_than_a_small_one():
    assert Rate().after(1.0, 1000).after(0.1, 1).each_s() == pytest.approx(0.001, rel=0.15)


def test_a_step_without_work_shows_nothing():
    assert paced((0, 0, 5.0)) == Pace()


def test_a_process_that_stood_still_in_a_step_is_not_taken_for_slow():
    for known in (1, 10):
        before = paced(*[(0, 100, 0.1)] * known)
        after = before.after_step(Load(generating=0, prompt_tokens=100), 60.0)
        assert after.tokens.each_s() < 3 * before.tokens.each_s()


def test_one_that_has_become_slow_is_known_to_be_after_some_steps():
    pace = paced(*[(0, 100, 0.1)] * 50, *[(0, 100, 2.0)] * 50)
    assert pace.tokens.each_s() == pytest.approx(0.02, rel=0.05)
