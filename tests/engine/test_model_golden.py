"""The default model, in float32, continues the golden prompts with the golden tokens."""

import json
from itertools import islice
from pathlib import Path

import pytest
import torch

from engine.model.config import read_config
from tests.fakes.batches import BatchItem, batch_of

GOLDEN = Path(__file__).parents[1] / "data" / "golden_smollm2_fp32.jsonl"
MARGIN_MIN = 1e-3
BLOCKS = 64
TOKENS_MAX = {"cpu": 48, "reference": 2}
"""The oracle is slow: it shows that it computes the same model, the kernels show the rest."""


def golden_lines(count):
    with GOLDEN.open() as lines:
        return [json.loads(line) for _, line in zip(range(count), lines, strict=False)]


@pytest.mark.parametrize("line", golden_lines(3), ids=lambda line: f"prompt {line['id']}")
def test_greedy_tokens_and_logprobs_are_the_golden_ones(line, default_model, runner_of):
    runner = runner_of(default_model, BLOCKS)
    pending, position = list(line["prompt_ids"]), 0
    golden = zip(line["output_ids"], line["output_logprobs"], line["margins"], strict=True)
    for token, logprob, margin in islice(golden, TOKENS_MAX[default_model.backend.name]):
        item = BatchItem(
            tokens=tuple(pending),
            first_position=position,
            block_table=tuple(range(-(-(position + len(pending)) // 4))),
            wants_logits=True,
        )
        (logits,) = runner.run(batch_of(item, block_size=4))
        if margin < MARGIN_MIN:
            break
        assert int(logits.argmax()) == token
        assert float(torch.log_softmax(logits, 0)[token]) == pytest.approx(logprob, abs=1e-3)
        position += len(pending)
        pending = [token]


def test_the_default_models_numbers_are_read_from_its_file(default_model_path):
    config = read_config(default_model_path)
    assert (config.architecture, config.vocab_size, config.layers, config.heads, config.kv_heads) == (
        "llama",
        49152,
        30,
        9,
        3,
    )
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    assert config.bos_token_id == 1
    assert config.max_position == 8192
