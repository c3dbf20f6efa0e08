"""What is drawn from the default model's own logits is what transformers' processors leave of them."""

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.distribution import filtered
from engine.kernels.select import choose_backend
from engine.model.load import load_model
from engine.noise import NOISE_BITS, noise
from engine.sequence import SamplingParams, Sequence, StopRules
from tests.fakes.batches import BatchItem, batch_of
from tests.fakes.sampled_rows import SampleRow, sample

GOLDEN = Path(__file__).parents[1] / "data" / "golden_smollm2_fp32.jsonl"
PROMPTS = 3
ANSWERS = (0, 4, 20)
"""Tokens of an answer after which its next one is drawn."""
NEAR = 1e-6
"""Of a probability: an adjusted logit is rounded to float32, where the reference goes on in float64."""

FILTERS = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.01}
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.9}
BIASES = {"logit_bias": ((198, -2.5), (253, 3.0), (314, 4.5), (504, -1.5))}
WISHES = {
    "temperature, cold": {"temperature": 0.4},
    "temperature, hot": {"temperature": 1.8},
    "top_k": {"temperature": 1.0, "top_k": 12},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "filters": FILTERS,
    "filters, hot": {"temperature": 1.6, "top_k": 300, "top_p": 0.7, "min_p": 0.002},
    "penalties": {"temperature": 1.0, **PENALTIES},
    "penalties and filters": {**PENALTIES, **FILTERS},
    "biases, penalties and filters": {**BIASES, **PENALTIES, **FILTERS},
    "biases, premiums and top_k": {
        **BIASES,
        "repetition_penalty": 0.8,
        "frequency_penalty": -1.0,
        "temperature": 1.2,
        "top_k": 5,
    },
}


class Spoken(NamedTuple):
    """tokens: of a prompt and of an answer so far. logits: float32 [vocab], of the next one."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    logits: torch.Tensor


@pytest.fixture(scope="module")
def spoken(default_model_path, runner_of):
    """The first golden prompts, with more and more of their golden answers."""
    chosen = choose_backend(torch.float32, threads=2)
    runner = runner_of(load_model(default_model_path, chosen.backend, max_model_len=512), 64)
    with GOLDEN.open() as lines:
        golden = [json.loads(next(lines)) for _ in range(PROMPTS)]
    found = []
    for line in golden:
        for made in ANSWERS:
            tokens = (*line["prompt_ids"], *line["output_ids"][:made])
            table = tuple(range(-(-len(tokens) // 4)))
            item = BatchItem(tokens=tokens, first_position=0, block_table=table, wants_logits=True)
            (logits,) = runner.run(batch_of(item, block_size=4))
            found.append(Spoken(tokens, len(line["prompt_ids"]), logits.clone()))
    return found


class OpenAiPenalties(LogitsProcessor):
    """The formula of OpenAI's documentation, which transformers does not have."""

    def __init__(self, prompt_tokens, frequency, presence):
        self._prompt_tokens, self._frequency, self._presence = prompt_tokens, frequency, presence

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for token, count in Counter(input_ids[0, self._prompt_tokens :].tolist()).items():
            scores[0, token] -= count * self._frequency + self._presence
        return scores


def by_transformers(spoken, asked):
    """float64 [vocab]: how likely each token is to be drawn, in vLLM's order of all that is asked."""
    chain = LogitsProcessorList()
    if "logit_bias" in asked:
        chain.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in asked["logit_bias"]}))
    if "repetition_penalty" in asked:
        chain.append(RepetitionPenaltyLogitsProcessor(asked["repetition_penalty"]))
    penalties = asked.get("frequency_penalty", 0.0), asked.get("presence_penalty", 0.0)
    chain.append(OpenAiPenalties(spoken.prompt_tokens, *penalties))
    chain.append(TemperatureLogitsWarper(asked["temperature"]))
    for name, warper in (
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
    ):
        if name in asked:
            chain.append(warper(asked[name]))
    scores = chain(torch.tensor([spoken.tokens]), spoken.logits[None].double())
    return scores[0].softmax(-1).numpy()


def sequence_of(spoken, params):
    return Sequence(
        id=("r", 1, 0),
        tokens=list(spoken.tokens),
        prompt_tokens=spoken.prompt_tokens,
        sampling=params,
        stop=StopRules(length_limit=512),
        arrived=0.0,
    )


@pytest.mark.parametrize("name", WISHES)
def test_each_token_is_as_likely_as_transformers_processors_make_it(name, spoken):
    asked = WISHES[name]
    for each in spoken:
        expected = by_transformers(each, asked)
        params = SamplingParams(**asked)
        adjustments, logits = sequence_of(each, params).adjustments, each.logits.numpy()
        found = filtered(logits if adjustments is None else adjustments.apply(logits), params)
        weights = np.zeros(len(expected))
        weights[slice(None) if found.ids is None else found.ids] = found.weights
        np.testing.assert_allclose(weights / weights.sum(), expected, rtol=NEAR * 20, atol=1e-12)


@pytest.mark.parametrize("name", WISHES)
def test_a_token_is_drawn_where_the_noise_meets_their_distribution(name, spoken):
    asked, drawn = WISHES[name], set()
    for number, each in enumerate(spoken):
        reached = by_transformers(each, asked).cumsum()
        for seed in range(number, number + 6):
            params, position = SamplingParams(seed=seed, **asked), len(each.tokens)
            row = SampleRow(params, position, adjustments=sequence_of(each, params).adjustments)
            (sampled,) = sample(each.logits[None], [row])
            below = reached[sampled.token - 1] if sampled.token else 0.0
            met = noise(seed, position) / 2**NOISE_BITS
            assert below - NEAR <= met <= reached[sampled.token] + NEAR
            drawn.add(sampled.token)
    assert len(drawn) > len(spoken), "there is something to choose from"
