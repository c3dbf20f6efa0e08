"""The sampler: published noise, exactness in any company, the right distribution, Hugging Face's filters."""

from collections import Counter
from math import isinf, log, sqrt

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.adjustments import adjustments_of
from engine.distribution import WEIGHT_BITS, Distribution, filtered, weights_of
from engine.errors import EngineError, NonFiniteLogits
from engine.noise import NOISE_BITS, noise, philox4x32
from engine.sampling import Sampled
from engine.sequence import SamplingParams
from tests.fakes.sampled_rows import SampleRow, sample

VOCAB = 4999  # odd, so that rows start at every alignment
FULL = 0xFFFFFFFF


def random_logits(rows, vocab=VOCAB, seed=0, scale=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def row(position=0, banned=frozenset(), **params):
    return SampleRow(params=SamplingParams(**params), position=position, banned=banned)


def sample_one(logits, sample_row):
    return sample(logits[None], [sample_row])[0]


def tokens(logits, rows):
    return [sampled.token for sampled in sample(logits, rows)]


# --- noise


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((FULL, FULL, FULL, FULL), (FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(counter, key, expected):
    assert philox4x32(counter, key) == expected


def test_the_draw_is_pinned_so_that_a_stream_outlives_an_upgrade():
    """The top 52 bits of the first two known-answer words, and a one below them."""
    assert noise(0, 0) == ((0x6627E8D5E169C58D >> 12) << 1) | 1


@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 2**64 - 1),
)
def test_draws_lie_strictly_inside_the_unit_interval_and_never_change(seed, position):
    draw = noise(seed, position)
    assert 0 < draw < 2**NOISE_BITS
    assert draw == noise(seed, position)


def test_signed_and_unsigned_readings_of_a_seed_are_one_seed():
    assert noise(-1, 5) == noise(2**64 - 1, 5)


@pytest.mark.parametrize("changed", [(8, 0), (7 + (1 << 32), 0), (7, 1), (7, 1 << 32)])
def test_each_of_seed_and_position_changes_the_draw(changed):
    assert noise(*changed) != noise(7, 0)


# --- exactness in any company

ADJUSTMENTS = adjustments_of(
    range(60), 40, presence=0.5, frequency=1.0, repetition=1.4, biases=((7, 3.0), (VOCAB - 1, -9.0))
)

MIXED = [
    row(3, temperature=0.7, seed=1, logprobs=3),
    row(3, temperature=0.7, seed=2, logprobs=3),
    row(9, temperature=1.0, seed=2, top_k=40, logprobs=0),
    row(70, temperature=1.3, seed=3, top_p=0.9, logprobs=1),
    row(1, temperature=0.4, seed=4, min_p=0.05, banned=frozenset({1, 5})),
    row(2, logprobs=5),
    row(2, banned=frozenset(range(100))),
    row(2)._replace(adjustments=ADJUSTMENTS),
    row(60, temperature=0.9, seed=6, logprobs=1)._replace(adjustments=ADJUSTMENTS),
    row(4, temperature=2.0, seed=5, top_k=900, top_p=0.8, min_p=0.01, logprobs=8),
]


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(len(MIXED))), count=st.integers(1, len(MIXED)))
def test_a_row_is_bitwise_the_same_alone_and_in_any_batch(order, count):
    logits = random_logits(len(MIXED))
    chosen = list(order[:count])
    together = sample(logits[chosen], [MIXED[index] for index in chosen])
    assert together == [sample_one(logits[index], MIXED[index]) for index in chosen]


def test_a_row_is_bitwise_the_same_with_one_thread_and_with_two():
    logits = random_logits(len(MIXED))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = sample(logits, MIXED)
        torch.set_num_threads(2)
        assert sample(logits, MIXED) == single
    finally:
        torch.set_num_threads(before)


def test_a_view_into_a_larger_tensor_is_sampled_like_its_copy():
    wide = random_logits(len(MIXED), vocab=VOCAB + 7)
    view = wide[:, 3 : 3 + VOCAB]
    assert sample(view, MIXED) == sample(view.clone(), MIXED)


def test_the_logits_are_not_changed():
    logits = random_logits(len(MIXED))
    before = logits.clone()
    sample(logits, MIXED)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("changed", ["position", "seed"])
def test_other_positions_and_seeds_draw_other_tokens(changed):
    logits = torch.zeros(1, VOCAB).expand(8, -1)
    rows = [row(**{"position": 0, "temperature": 1.0, changed: value}) for value in range(8)]
    assert len(set(tokens(logits, rows))) == 8


def test_no_rows_give_no_tokens():
    assert sample(torch.empty(0, VOCAB), []) == []


# --- the distribution


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 12},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.1},
        {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_tokens_follow_the_filtered_softmax(params):
    """Chi-square of 6,000 draws at fixed positions against Hugging Face's own probabilities."""
    draws = 6000
    logits = random_logits(1, vocab=600, seed=11, scale=2.0)[0]
    expected = hugging_face(logits, SamplingParams(**params)).double().softmax(-1).numpy() * draws
    rows = [row(position, seed=99, **params) for position in range(draws)]
    drawn = Counter(tokens(logits.expand(draws, -1), rows))
    assert all(expected[token] > 0 for token in drawn)

    common = [token for token in range(600) if expected[token] >= 5]
    rare = draws - sum(expected[token] for token in common)
    cells = [(drawn[token], expected[token]) for token in common]
    if rare > 1e-6:
        cells.append((draws - sum(drawn[token] for token in common), rare))
    statistic = sum((seen - due) ** 2 / due for seen, due in cells)
    freedom = len(cells) - 1
    assert freedom >= 5
    assert abs(statistic - freedom) < 4 * sqrt(2 * freedom)


def test_a_token_is_the_inverse_of_the_cumulative_distribution_in_order_of_id():
    """Against one running sum in float64."""
    logits = random_logits(1, seed=5)[0]
    scores = logits.double().numpy()
    reached = np.exp(scores - scores.max()).cumsum()
    for position in range(300):
        target = noise(1, position) / 2**NOISE_BITS * reached[-1]
        assert abs(reached - target).min() > 1e-9, "a draw on a border proves nothing"
        expected = int(np.searchsorted(reached, target, side="right"))
        assert sample_one(logits, row(position, temperature=1.0, seed=1)).token == expected


def test_a_token_that_holds_nearly_all_weight_is_drawn_wherever_it_stands():
    for place in (0, 255, 256, VOCAB - 1):
        logits = torch.full((VOCAB,), -80.0)
        logits[place] = 80.0
        assert sample_one(logits, row(temperature=1.0, seed=3)).token == place


@pytest.mark.parametrize("noise", [1, 2**NOISE_BITS - 1])
def test_the_ends_of_the_noise_stay_on_tokens_that_have_weight(noise):
    weights = np.zeros(300, np.int64)
    weights[[7, 200]] = 3, 2**42
    assert Distribution(weights).draw(noise) == (7 if noise == 1 else 200)


def test_a_weight_is_the_exponential_to_the_nearest_integer():
    logits = random_logits(1, seed=4, scale=4.0)[0].numpy()
    for temperature in (0.3, 1.0, 2.0):
        scores = (logits.astype(np.longdouble) - logits.max()) / temperature
        exact = np.exp(scores) * 2.0**WEIGHT_BITS
        assert abs(weights_of(logits, temperature) - exact).max() < 0.51


def test_the_smallest_temperature_is_greedy():
    logits = random_logits(1)[0]
    assert sample_one(logits, row(temperature=5e-324)).token == int(logits.argmax())


# --- filters, against transformers


def hugging_face(logits, params):
    scores = logits[None].clone()
    warpers = [TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    for warper in warpers:
        scores = warper(None, scores)
    return scores[0]


def support(logits, params):
    return filtered(logits.numpy(), params).support()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([3, 50, 700, 5000]),
    scale=st.floats(0.01, 8.0),
    temperature=st.floats(0.05, 2.0),
    top_k=st.sampled_from([0, 1, 2, 20, 600, 10_000]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
)
def test_filters_leave_the_tokens_that_hugging_face_leaves(
    seed, vocab, scale, temperature, top_k, top_p, min_p
):
    """In float64, so that the two do not round apart; logits that tie are left to the tie tests."""
    logits = random_logits(1, vocab, seed, scale)[0]
    assume(len(set(logits.tolist())) == vocab)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    theirs = frozenset(torch.isfinite(hugging_face(logits.double(), params)).nonzero().flatten().tolist())
    ours = support(logits, params)
    # What weighs less than half of our least weight cannot be drawn, where Hugging Face keeps a finite score.
    scores = (logits.double() - logits.max()) / temperature
    assert ours == theirs & frozenset((scores.exp() > 2.0 ** -(WEIGHT_BITS + 1)).nonzero().flatten().tolist())


def test_top_p_looks_beyond_its_first_guess_where_the_weight_is_spread():
    logits = torch.arange(VOCAB, dtype=torch.float32) * 1e-4
    kept = support(logits, SamplingParams(temperature=1.0, top_p=0.95))
    weights = logits.double().exp()
    inside = sum(float(weights[token]) for token in kept) / float(weights.sum())
    assert kept == frozenset(range(VOCAB - len(kept), VOCAB))
    assert 0.95 <= inside < 0.95 + 2 / VOCAB


@pytest.mark.parametrize("params", [{"top_k": 4}, {"top_p": 0.35}])
def test_of_equal_tokens_at_a_border_the_lower_ids_stay(params):
    logits = torch.zeros(10)
    logits[7] = 0.1
    assert support(logits, SamplingParams(temperature=1.0, **params)) == {7, 0, 1, 2}


def test_min_p_keeps_all_that_are_equal():
    logits = torch.tensor([0.0, 1.0, 1.0, -3.0])
    assert support(logits, SamplingParams(temperature=1.0, min_p=1.0)) == {1, 2}


# --- greedy


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals():
    logits = random_logits(3, seed=8)
    logits[0, [17, 3000]] = 50.0
    logits[1] = 0.0
    expected = [17, 0, int(logits[2].argmax())]
    assert tokens(logits, [row(), row(position=9, seed=4), row()]) == expected


# --- bans


@settings(max_examples=40, deadline=None)
@given(
    banned=st.frozensets(st.integers(0, 19), max_size=19),
    temperature=st.sampled_from([0.0, 0.3, 2.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.5]),
)
def test_a_banned_token_is_never_sampled(banned, temperature, top_k, top_p):
    logits = random_logits(1, vocab=20, seed=2)[0]
    rows = [row(p, banned, temperature=temperature, top_k=top_k, top_p=top_p) for p in range(40)]
    assert not banned & set(tokens(logits.expand(40, -1), rows))


def test_a_ban_makes_room_in_top_k_for_the_next_token():
    logits = torch.tensor([9.0, 8.0, 7.0, 1.0])
    drawn = tokens(
        logits.expand(60, -1), [row(p, frozenset({0}), temperature=2.0, top_k=2) for p in range(60)]
    )
    assert set(drawn) == {1, 2}


# --- logprobs


@pytest.mark.parametrize("params", [{}, {"temperature": 0.3, "top_k": 5}, {"temperature": 2.0}])
def test_logprobs_are_the_models_own_before_temperature_filters_and_bans(params):
    logits = random_logits(1, seed=21)[0]
    expected = logits.double().log_softmax(-1)
    best = int(expected.argmax())
    sampled = sample_one(logits, row(6, frozenset({best}), logprobs=4, seed=5, **params))
    assert sampled.token != best
    assert sampled.logprob == pytest.approx(float(expected[sampled.token]), abs=1e-10)
    values, ids = expected.topk(4)
    assert [token for token, _ in sampled.top] == ids.tolist()
    assert [logprob for _, logprob in sampled.top] == pytest.approx(values.tolist(), abs=1e-10)


def test_alternatives_that_tie_come_in_order_of_id():
    logits = torch.tensor([1.0, 2.0]).repeat(300)
    top = sample_one(logits, row(logprobs=500)).top
    assert [token for token, _ in top] == [*range(1, 600, 2), *range(0, 400, 2)]


def test_logprobs_come_only_when_asked_for():
    logits = torch.zeros(2)
    assert sample_one(logits, row()) == Sampled(token=0, logprob=None, top=())
    assert sample_one(logits, row(logprobs=0)) == Sampled(token=0, logprob=-log(2), top=())
    assert len(sample_one(logits, row(logprobs=99)).top) == 2


def test_logprobs_hold_for_logits_far_from_zero():
    for logit in (-500.0, 500.0):
        sampled = sample_one(torch.tensor([logit, logit]), row(logprobs=0))
        assert sampled.logprob == pytest.approx(-log(2))


# --- broken rows


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}, {"logprobs": 1}]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_numbers_are_refused_by_index(params, bad):
    logits = random_logits(4)
    logits[1, 77] = bad
    logits[3, VOCAB - 1] = bad
    with pytest.raises(NonFiniteLogits, match="row 1, 3") as caught:
        sample(logits, [row(**params)] * 4)
    assert caught.value.rows == (1, 3)
    assert isinstance(caught.value, EngineError)


def test_a_row_of_nothing_but_impossible_tokens_is_refused():
    with pytest.raises(NonFiniteLogits):
        sample_one(torch.full((5,), -torch.inf), row(temperature=1.0))


def test_an_impossible_token_is_left_out_and_has_no_probability():
    logits = torch.tensor([0.0, -torch.inf, 0.0])
    rows = [row(p, temperature=2.0, top_k=0, logprobs=3) for p in range(50)]
    sampled = sample(logits.expand(50, -1), rows)
    assert {each.token for each in sampled} == {0, 2}
    assert isinf(sampled[0].top[2][1])
