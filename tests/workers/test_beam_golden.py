"""Beam search on the default model in float32 finds what transformers' `generate` finds (tests/data)."""

import json
from pathlib import Path

import pytest
import torch

from decode_worker.beam_search import BeamSearch
from decode_worker.policy import DecodePolicy
from decode_worker.search import Search
from engine.assembly import assemble
from engine.sequence import SamplingParams, Sequence, StopRules
from engine.wishes import EngineWishes
from service.model_source import resolve_model
from service.orders import AttemptKey, Beam, Choice, SequenceOrder

GOLDEN = Path(__file__).parents[1] / "data" / "golden_smollm2_beams_fp32.jsonl"
LINES = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
EOS = 2


@pytest.fixture(scope="module")
def core():
    wishes = EngineWishes(
        model=resolve_model("smollm2-135m-instruct"),
        dtype=torch.float32,
        threads=2,
        max_model_len=512,
        num_blocks=64,
    )
    return assemble(wishes, DecodePolicy(budget_tokens=512, seats=64), memory_bytes=4 << 30).core


def order_of(line):
    asked = line["asked"]
    beam = Beam(
        width=asked["num_beams"],
        length_penalty=asked.get("length_penalty", 1.0),
        early_stopping=asked.get("early_stopping", False),
    )
    return SequenceOrder(
        key=AttemptKey(request_id="r", attempt=1),
        choices=tuple(Choice(index=number, seed=0) for number in range(beam.width)),
        token_ids=tuple(line["prompt_ids"]),
        prompt_tokens=len(line["prompt_ids"]),
        max_tokens=asked["max_new_tokens"],
        min_tokens=asked.get("min_new_tokens", 0),
        stop_token_ids=frozenset({EOS}),
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        logprobs=None,
        beam=beam,
    )


def search(core, order):
    """The prompt computed as a sequence, and the search forked from its blocks."""
    trunk = Sequence(
        id=("prompt", 1, 0),
        tokens=list(order.token_ids),
        sampling=SamplingParams(),
        stop=StopRules(length_limit=len(order.token_ids) + 1),
        arrived=0.0,
        chain=core.chain(b""),
    )
    core.submit(trunk)
    while not core.idle():
        core.step(0.0)
    core.detach(trunk.id)
    core.pool.waive(trunk.credit)
    rules = StopRules(
        length_limit=order.length_limit(),
        min_length=order.prompt_tokens + order.min_tokens,
        stop_token_ids=order.stop_token_ids,
    )
    scores = BeamSearch(order.beam, rules, len(order.token_ids))
    credit = core.pool.grant(trunk.table.owner, order.blocks(block_size=16) - len(trunk.table))
    found = Search(core=core, gateway="g", order=order, scores=scores, credit=credit)
    found.begin(trunk.table, trunk.chain, 0.0)
    answers = []
    while not answers:
        for output in core.step(0.0).outputs:
            answers += found.hear(output)
    return answers


@pytest.mark.parametrize("line", LINES, ids=lambda line: str(line["asked"]))
def test_answers_and_scores_are_the_golden_ones(core, line):
    answers = search(core, order_of(line))
    assert [[step.token for step in answer.steps] for answer in answers] == line["outputs"]
    penalty = line["asked"].get("length_penalty", 1.0)
    scores = [answer.total / len(answer.steps) ** penalty for answer in answers]
    assert scores == pytest.approx(line["scores"], abs=2e-3)
    assert core.pool.ledger().owned == core.pool.ledger().promised == 0
