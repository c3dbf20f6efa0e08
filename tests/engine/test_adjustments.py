"""Biases and penalties: what transformers and OpenAI's formula make of real logits, and a fold that forgets nothing."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from engine.adjustments import adjustments_of
from engine.kernels.select import choose_backend
from engine.model.load import load_model
from engine.sequence import SamplingParams, Sequence, StopRules
from tests.fakes.batches import BatchItem, batch_of
from tests.fakes.sampled_rows import SampleRow, sample

GOLDEN = Path(__file__).parents[1] / "data" / "golden_smollm2_fp32.jsonl"
STEPS = {"cpu": 20, "reference": 2}
LARGEST = float(np.finfo(np.float32).max)
OFF = {"presence": 0.0, "frequency": 0.0, "repetition": 1.0, "biases": ()}


def adjusted(logits, tokens, prompt_tokens, **asked):
    """float32 [vocab] after these tokens."""
    found = adjustments_of(tokens, prompt_tokens, **{**OFF, **asked})
    return found.apply(np.asarray(logits, np.float32))


# --- on the logits of the default model


@pytest.fixture(scope="module")
def quick_model(default_model_path):
    """On whichever backend is the quickest here: the logits are given, it is what becomes of them that is compared."""
    chosen = choose_backend(torch.float32, threads=2)
    return load_model(default_model_path, chosen.backend, max_model_len=512)


def by_others(logits, tokens, prompt_tokens, asked):
    """The same with transformers' processors and OpenAI's formula, in vLLM's order: bias, repetition, frequency,
    presence."""
    ids, scores = torch.tensor([tokens]), logits[None].clone()
    if asked.get("logit_bias"):
        biases = {(token,): bias for token, bias in asked["logit_bias"]}
        scores = SequenceBiasLogitsProcessor(biases)(ids, scores)
    if "repetition_penalty" in asked:
        scores = RepetitionPenaltyLogitsProcessor(asked["repetition_penalty"])(ids, scores)
    for token, count in Counter(tokens[prompt_tokens:]).items():
        scores[0, token] -= count * asked.get("frequency_penalty", 0.0)
        scores[0, token] -= float(count > 0) * asked.get("presence_penalty", 0.0)
    return scores[0]


def first_line():
    with GOLDEN.open() as lines:
        return json.loads(next(lines))


def biases_against(line):
    """For and against what the model would say."""
    once = sorted(set(line["output_ids"][:12]))
    return tuple((token, -2.5 if place % 2 else 1.5) for place, token in enumerate(once))


ASKED = {
    "repetition": {"repetition_penalty": 1.3},
    "a premium on repetition": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "a premium on frequency": {"frequency_penalty": -2.0},
    "bias": {"logit_bias": biases_against(first_line())},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.6,
        "frequency_penalty": -0.4,
        "logit_bias": biases_against(first_line()),
    },
}


@pytest.mark.parametrize("name", ASKED)
def test_greedy_tokens_are_those_of_transformers_processors_and_openais_formula(name, quick_model, runner_of):
    asked, line, steps = ASKED[name], first_line(), STEPS[quick_model.backend.name]
    runner, prompt = runner_of(quick_model, 32), list(line["prompt_ids"])
    rules = StopRules(length_limit=len(prompt) + steps)
    sequence = Sequence(
        id=("r", 1, 0),
        tokens=list(prompt),
        prompt_tokens=len(prompt),
        sampling=SamplingParams(**asked),
        stop=rules,
        arrived=0.0,
    )
    changed = False
    while sequence.end_reason is None:
        tokens, first = sequence.tokens, sequence.computed
        item = BatchItem(
            tokens=tuple(tokens[first:]),
            first_position=first,
            block_table=tuple(range(-(-len(tokens) // 4))),
            wants_logits=True,
        )
        (logits,) = runner.run(batch_of(item, block_size=4))
        expected = by_others(logits, tokens, len(prompt), asked)
        changed = changed or not torch.equal(expected, logits)
        np.testing.assert_allclose(
            sequence.adjustments.apply(logits.numpy()), expected.numpy(), rtol=1e-6, atol=1e-5
        )
        row = SampleRow(sequence.sampling, len(tokens), adjustments=sequence.adjustments)
        (sampled,) = sample(logits[None], [row])
        assert sampled.token == int(expected.argmax())
        sequence.computed = len(tokens)
        sequence.tokens.append(sampled.token)
        sequence.settle()
    assert changed
    if steps == STEPS["cpu"]:
        assert sequence.tokens[len(prompt) :] != line["output_ids"][:steps], "it makes no difference"


# --- the fold

tokens_in = st.lists(st.integers(0, 11), min_size=1, max_size=30)
asked_in = st.fixed_dictionaries(
    {
        "presence": st.sampled_from([0.0, -2.0, 0.7]),
        "frequency": st.sampled_from([0.0, 2.0, -0.3]),
        "repetition": st.sampled_from([1.0, 0.5, 1.7]),
        "biases": st.dictionaries(st.integers(0, 11), st.floats(-100, 100, width=32)).map(
            lambda biases: tuple(sorted(biases.items()))
        ),
    }
)


@settings(max_examples=200, deadline=None)
@given(tokens=tokens_in, asked=asked_in, data=st.data())
def test_the_fold_gone_on_with_from_anywhere_is_the_fold_of_all_tokens(tokens, asked, data):
    prompt = data.draw(st.integers(1, len(tokens)))
    begun = data.draw(st.integers(prompt, len(tokens)))
    whole = adjustments_of(tokens, prompt, **asked)
    folded = adjustments_of(tokens[:begun], prompt, **asked)
    if folded is None:
        assert whole is None and asked == OFF
        return
    before = [getattr(folded, name).copy() for name in ("ids", "biases", "repeated", "counts")]
    other = folded
    for token in tokens[begun:]:
        other = other.after(token)
    for name in ("ids", "biases", "repeated", "counts"):
        assert np.array_equal(getattr(other, name), getattr(whole, name)), name
    after = [getattr(folded, name) for name in ("ids", "biases", "repeated", "counts")]
    assert all(map(np.array_equal, before, after)), "a value does not change"


@settings(max_examples=200, deadline=None)
@given(tokens=tokens_in, asked=asked_in, data=st.data())
def test_each_logit_changes_by_the_formula_and_no_other_does(tokens, asked, data):
    prompt = data.draw(st.integers(1, len(tokens)))
    logits = np.array(data.draw(st.lists(st.floats(-50, 50, width=32), min_size=14, max_size=14)), np.float32)
    found = adjustments_of(tokens, prompt, **asked)
    result = logits if found is None else found.apply(logits)
    biases, counts = dict(asked["biases"]), Counter(tokens[prompt:])
    for token, logit in enumerate(logits.tolist()):
        value = logit + biases.get(token, 0.0)
        if token in tokens:
            value = value / asked["repetition"] if value > 0 else value * asked["repetition"]
        value -= asked["frequency"] * counts[token] + asked["presence"] * (counts[token] > 0)
        assert result[token] == np.float32(value), token


# --- the ends of the ranges


@pytest.mark.parametrize("repetition", [5e-324, 1e-30, 1.0, 2.0])
@pytest.mark.parametrize("sign", [-1, 1])
def test_what_is_finite_stays_finite_and_what_is_impossible_stays_impossible(repetition, sign):
    logits = [LARGEST, -LARGEST, 1.0, -1.0, 0.0, -np.inf, 5e-39]
    result = adjusted(
        logits,
        [*range(7)] * 9000,
        7,
        presence=2.0 * sign,
        frequency=2.0 * sign,
        repetition=repetition,
        biases=tuple((token, 100.0 * sign) for token in range(7)),
    )
    assert np.isneginf(result[5])
    assert np.isfinite(np.delete(result, 5)).all()


def sampled(logits, **fields):
    """The token that follows the prompt 0, 1 and the answer 2, with its logprobs."""
    how = {name: fields.pop(name) for name in tuple(fields) if name in SamplingParams.__dataclass_fields__}
    sequence = Sequence(
        id=("r", 1, 0),
        tokens=[0, 1, 2],
        prompt_tokens=2,
        sampling=SamplingParams(**how),
        stop=StopRules(length_limit=9),
        arrived=0.0,
    )
    row = SampleRow(sequence.sampling, 3, adjustments=sequence.adjustments, **fields)
    (result,) = sample(torch.tensor([logits]), [row])
    return result


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_largest_bias_forces_a_token_and_the_smallest_bans_it(temperature):
    logits = [9.0, 8.0, 7.0, -20.0]
    for seed in range(20):
        how = {"temperature": temperature, "seed": seed}
        assert sampled(logits, logit_bias=((3, 100.0),), **how).token == 3
        banned = tuple((token, -100.0) for token in range(3))
        assert sampled(logits, logit_bias=banned, **how).token == 3


def test_a_ban_is_stronger_than_any_bias():
    forced = {"logit_bias": ((3, 100.0),)}
    assert sampled([1.0, 2.0, 0.0, 3.0], banned=frozenset({3}), **forced).token == 1
    assert sampled([1.0, 2.0, 0.0, 3.0], banned=frozenset({1, 3}), repetition_penalty=2.0).token == 0


def test_presence_and_frequency_see_the_answer_only_and_repetition_the_prompt_too():
    logits = [3.0, 3.5, 4.0, 2.5]
    assert sampled(logits).token == 2
    assert sampled(logits, presence_penalty=1.0).token == 1
    assert sampled(logits, frequency_penalty=1.0).token == 1
    assert sampled(logits, repetition_penalty=2.0).token == 3


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "top_k": 1}])
def test_logprobs_are_the_models_own_before_biases_and_penalties(how):
    logits = [3.0, 3.5, 4.0, 2.5]
    expected = torch.tensor(logits).double().log_softmax(-1)
    result = sampled(logits, repetition_penalty=2.0, logit_bias=((3, 1.0),), logprobs=2, **how)
    assert result.token == 3
    assert result.logprob == pytest.approx(float(expected[3]))
    assert [token for token, _ in result.top] == [2, 1]


def test_a_sequence_with_penalties_must_say_where_its_answer_begins():
    with pytest.raises(AssertionError, match="a prompt of 0 of 2 tokens"):
        adjustments_of([1, 2], 0, **{**OFF, "presence": 1.0})
