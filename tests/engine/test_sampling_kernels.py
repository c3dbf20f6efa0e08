"""Compiled sampling: to the bit what plain numpy says, for any row, any wish and any number of threads."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.distribution import BROKEN, PlainSampling
from engine.sampling import Sampler
from engine.sequence import SamplingParams
from tests.fakes.sampled_rows import SampleRow, sample

ROWS = 6

wishes = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 5e-324, 1e-5, 0.1, 0.8, 1.0, 2.0]) | st.floats(0.05, 2.0),
    top_k=st.sampled_from([0, 1, 2, 40, 511, 512, 513, 10_000]),
    top_p=st.sampled_from([5e-324, 0.5, 0.95, 1 - 2**-53, 1.0]) | st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 5e-324, 1e-13, 0.05, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
)


@st.composite
def rows_of_logits(draw):
    """Spread and narrow ones, with ties, with impossible tokens, of lengths around every block that kernels work in."""
    vocab = draw(st.sampled_from([1, 2, 3, 15, 16, 17, 63, 65, 511, 513, 2049, 5000]))
    dice = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = dice.standard_normal((ROWS, vocab), np.float32) * np.float32(10.0 ** draw(st.integers(-30, 37)))
    if draw(st.booleans()):
        logits = np.round(logits)
    if draw(st.booleans()):
        logits += np.float32(draw(st.sampled_from([-1e30, -300.0, 7.0, 1e30])))
    logits = np.clip(logits, np.finfo(np.float32).min, np.finfo(np.float32).max)
    impossible = dice.random(logits.shape) < draw(st.sampled_from([0.0, 0.3, 0.99]))
    impossible[:, dice.integers(vocab)] = False
    logits[impossible] = -np.inf
    return logits


@settings(max_examples=300, deadline=None)
@given(
    logits=rows_of_logits(),
    params=st.lists(wishes, min_size=ROWS, max_size=ROWS),
    position=st.integers(0, 2**64 - ROWS),
)
def test_a_drawn_token_is_the_one_that_numpy_draws(compiled_sampling, logits, params, position):
    positions = range(position, position + ROWS)
    drawn = compiled_sampling.draw(logits, params, positions)
    assert drawn == PlainSampling().draw(logits, params, positions)


@settings(max_examples=100, deadline=None)
@given(logits=rows_of_logits(), data=st.data())
def test_the_likeliest_and_the_total_are_those_of_numpy(compiled_sampling, logits, data):
    most = logits.shape[1]
    counts = data.draw(st.lists(st.integers(0, most) | st.just(most), min_size=ROWS, max_size=ROWS))
    assert compiled_sampling.describe(logits, counts) == PlainSampling().describe(logits, counts)


@pytest.mark.parametrize("count", [-1, 4])
def test_no_more_ids_are_described_than_there_are_tokens(compiled_sampling, count):
    with pytest.raises(AssertionError):
        compiled_sampling.describe(np.zeros((2, 3), np.float32), [3, count])


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.8, seed=2, top_p=0.95),
    SamplingParams(temperature=2.0, seed=3, top_p=0.99),
    SamplingParams(temperature=1.0, seed=4, top_k=50, min_p=0.1),
    SamplingParams(temperature=1.0, seed=5, min_p=0.001, logprobs=7),
]


def test_rows_of_a_whole_vocabulary_are_drawn_alike_over_threads_and_in_any_company(compiled_sampling):
    """Enough rows that all threads take part, and a nucleus that needs every share that is tried."""
    logits = np.random.default_rng(1).standard_normal((48, 49_152), np.float32) * 2
    params = PARAMS * 8
    wanted = [
        compiled_sampling.draw(logits[i : i + 1], params[i : i + 1], [i])[0] for i in range(len(logits))
    ]
    assert wanted[:6] == PlainSampling().draw(logits[:6], params[:6], range(6))
    for _ in range(3):
        assert compiled_sampling.draw(logits, params, range(len(logits))) == wanted
    assert compiled_sampling.draw(logits[::-3], params[::-3], range(47, -1, -3)) == wanted[::-3]


@pytest.mark.parametrize("vocab", [1, 5, 16, 64, 100])
@pytest.mark.parametrize("params", PARAMS)
def test_a_row_that_is_not_numbers_has_no_token(compiled_sampling, vocab, params):
    for broken in (np.nan, np.inf):
        for place in {0, vocab // 2, vocab - 1}:
            logits = np.zeros((3, vocab), np.float32)
            logits[1, place] = broken
            first, second, third = compiled_sampling.draw(logits, [params] * 3, [0, 1, 2])
            assert second == BROKEN and first != BROKEN != third
    assert compiled_sampling.draw(np.full((1, vocab), -np.inf, np.float32), [params], [0]) == [BROKEN]


def test_a_sampler_says_the_same_over_either(compiled_sampling):
    logits = torch.randn(len(PARAMS), 4999, generator=torch.Generator().manual_seed(3)) * 3
    rows = [SampleRow(params, position, frozenset(range(position))) for position, params in enumerate(PARAMS)]
    assert sample(logits, rows, Sampler(compiled_sampling)) == sample(logits, rows)
    assert sample(logits[:0], [], Sampler(compiled_sampling)) == []
