"""How likely a prompt's tokens are is one list, to the bit, however they come to be computed."""

import json
from pathlib import Path

import pytest
import torch

from decode_worker.policy import DecodePolicy
from engine.assembly import assemble
from engine.errors import NonFiniteLogits
from engine.scoring import ROWS_MAX
from engine.sequence import SamplingParams, Sequence, StopRules
from engine.wishes import EngineWishes
from tests.engine.test_exactness import tokens_of

GOLDEN = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "golden_smollm2_fp32.jsonl").read_text().splitlines()
]
LENGTH, ALTERNATIVES = 150, 3
SCOPE = b"scored"
PROMPT = tokens_of(50792, LENGTH)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def core(request, shallow_model_path):
    return core_of(shallow_model_path, request.param)


@pytest.fixture(scope="module")
def exact_core(default_model_path):
    return core_of(default_model_path, torch.float32)


def core_of(model, dtype, kv_dtype=None):
    wishes = EngineWishes(
        model=model,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_model_len=512,
        num_blocks=256,
    )
    return assemble(wishes, DecodePolicy(budget_tokens=64, seats=64), memory_bytes=4 << 30).core


def sequence_of(core, name, tokens, *, scored=ALTERNATIVES, count=1, scope=b"", logprobs=None):
    return Sequence(
        id=(name, 1, 0),
        tokens=list(tokens),
        sampling=SamplingParams(logprobs=logprobs),
        stop=StopRules(length_limit=len(tokens) + count),
        arrived=0.0,
        chain=core.chain(scope),
        scored=scored,
    )


def run(core, *sequences, budget_tokens=512):
    """(scores, what was sampled) of each, by name; steps with the tokens that each computed."""
    core._policy = DecodePolicy(budget_tokens=budget_tokens, seats=200)
    for sequence in sequences:
        core.submit(sequence)
    scores = {each.id[0]: [] for each in sequences}
    sampled, steps = {each.id[0]: [] for each in sequences}, []
    while not core.idle():
        result = core.step(0.0)
        steps.append([tokens for _, tokens in result.progress])
        for sequence, first, found in result.scored:
            assert first == len(scores[sequence.id[0]]) + 1, "each position once, without gap"
            scores[sequence.id[0]] += found
        for output in result.outputs:
            sampled[output.sequence.id[0]].append(output.sampled)
    for sequence in sequences:
        core.pool.waive(core.detach(sequence.id).credit)
        core.pool.release(sequence.table)
    return scores, sampled, steps


def alone(core, prompt=PROMPT, **changes):
    return run(core, sequence_of(core, "r", prompt, **changes))[0]["r"]


def test_every_token_but_the_first_has_its_logprob_rank_and_alternatives(core):
    scores = alone(core)
    assert len(scores) == LENGTH - 1
    for token, score in zip(PROMPT[1:], scores, strict=True):
        ids, logprobs = zip(*score.top, strict=True)
        assert len(set(ids)) == ALTERNATIVES and list(logprobs) == sorted(logprobs, reverse=True)
        if score.rank <= ALTERNATIVES:
            assert score.top[score.rank - 1] == (token, score.logprob)
        else:
            assert token not in ids and score.logprob <= logprobs[-1]


@pytest.mark.parametrize("chunk", [1, 16, 37, 64])
def test_they_are_the_same_in_every_chunking_and_in_a_crowd(core, chunk):
    expected = alone(core)
    assert run(core, sequence_of(core, "r", PROMPT), budget_tokens=chunk)[0]["r"] == expected
    crowd = [
        sequence_of(core, f"o{n}", tokens_of(n, 3 + 17 * n), scored=n % 2 or None, count=9) for n in range(8)
    ]
    scores, _, _ = run(core, *crowd[:4], sequence_of(core, "r", PROMPT), *crowd[4:], budget_tokens=chunk + 8)
    assert scores["r"] == expected


def test_they_change_no_bit_of_what_others_are_answered(core):
    def crowd(scored):
        return [
            sequence_of(core, "other", tokens_of(1, 90), scored=None, count=12, logprobs=2),
            sequence_of(core, "r", PROMPT, scored=scored, count=12, logprobs=2),
        ]

    _, without, _ = run(core, *crowd(None), budget_tokens=64)
    scores, beside, _ = run(core, *crowd(ALTERNATIVES), budget_tokens=64)
    assert beside == without and len(scores["r"]) == LENGTH - 1 and scores["other"] == []


def test_they_are_what_generation_says_of_the_same_tokens(core):
    begin = PROMPT[:40]
    _, sampled, _ = run(core, sequence_of(core, "r", begin, scored=None, count=24, logprobs=ALTERNATIVES))
    generated = [each.token for each in sampled["r"]]
    scores = alone(core, [*begin, *generated])
    assert [(each.logprob, each.top) for each in scores[len(begin) - 1 :]] == [
        (each.logprob, each.top) for each in sampled["r"]
    ]
    assert {each.rank for each in scores[len(begin) - 1 :]} == {1}


def test_case_73_nothing_is_taken_from_the_cache_and_cold_is_warm(core):
    cold = alone(core, scope=SCOPE)
    warm = sequence_of(core, "warm", PROMPT, scope=SCOPE)
    plain = sequence_of(core, "plain", PROMPT, scope=SCOPE, scored=None)
    assert run(core, warm)[0]["warm"] == cold and warm.cached == 0
    run(core, plain)
    assert plain.cached == (LENGTH - 1) // 16 * 16, "what it computes, others find"


def test_a_step_scores_a_bounded_number_of_rows_and_others_go_unhindered(core):
    sequences = [sequence_of(core, f"r{n}", tokens_of(n, 200)) for n in range(3)]
    free = sequence_of(core, "free", tokens_of(9, 300), scored=None)
    scores, _, steps = run(core, *sequences, free, budget_tokens=4096)
    assert [len(each) for each in scores.values()] == [199, 199, 199, 0]
    *parts, unhindered = sorted(steps[0])
    assert (sum(parts), unhindered) == (ROWS_MAX, 300) and max(parts) - min(parts) <= 1
    assert all(sum(each) <= ROWS_MAX + 300 + 3 for each in steps)
    assert scores["r2"] == alone(core, tokens_of(2, 200))


def test_more_sequences_than_rows_all_come_to_their_end(core):
    sequences = [sequence_of(core, f"r{n:03}", [5, 6 + n]) for n in range(ROWS_MAX + 40)]
    scores, sampled, steps = run(core, *sequences, budget_tokens=4096)
    assert {len(each) for each in (*scores.values(), *sampled.values())} == {1}
    assert [len(each) for each in steps] == [ROWS_MAX, 40]


def test_a_prompt_of_one_token_has_none(core):
    assert alone(core, PROMPT[:1]) == []


def test_without_alternatives_only_the_tokens_themselves_are_told(core):
    scores = alone(core, scored=0)
    assert [(each.logprob, each.rank) for each in scores] == [
        (each.logprob, each.rank) for each in alone(core)
    ]
    assert {each.top for each in scores} == {()}


def test_keys_and_values_in_int8_give_one_list_too(shallow_model_path):
    core = core_of(shallow_model_path, torch.float32, torch.int8)
    assert run(core, sequence_of(core, "r", PROMPT), budget_tokens=16)[0]["r"] == alone(core)


@pytest.mark.parametrize("case", GOLDEN[:6], ids=lambda case: case["id"])
def test_golden_answers_are_as_likely_as_transformers_found_them(exact_core, case):
    prompt, answer = case["prompt_ids"], case["output_ids"]
    scores = alone(exact_core, [*prompt, *answer])[len(prompt) - 1 :]
    assert [each.logprob for each in scores] == pytest.approx(case["output_logprobs"], abs=1e-3)


def test_they_are_read_off_the_reference_models_logits(exact_core, default_model_path, logits_of):
    tokens = PROMPT[:12]
    logits = torch.log_softmax(logits_of(default_model_path, tokens).double(), dim=1)
    scores = alone(exact_core, tokens)
    for row, token, score in zip(logits[:-1], tokens[1:], scores, strict=True):
        assert score.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert [logprob for _, logprob in score.top] == pytest.approx(
            row.topk(ALTERNATIVES).values.tolist(), abs=1e-3
        )


def test_the_logits_of_a_prompt_that_computes_no_numbers_are_refused(core, monkeypatch):
    runner_run = core._runner.run

    def broken(batch):
        logits = runner_run(batch).clone()
        logits[5] = float("nan")
        return logits

    monkeypatch.setattr(core._runner, "run", broken)
    sequence = sequence_of(core, "r", PROMPT)
    core.submit(sequence)
    with pytest.raises(NonFiniteLogits):
        core.step(0.0)
    monkeypatch.undo()
    core.pool.waive(core.detach(sequence.id).credit)
    core.pool.release(sequence.table)
