"""Beam search: the scores against transformers' `generate`, and the worker's forked tables against plain sequences."""

from collections.abc import Iterator

import pytest
import torch
import transformers

from decode_worker.beam_search import BeamSearch
from engine.adjustments import adjustments_of
from engine.sequence import SamplingParams, StopRules
from service.orders import Beam, Choice
from service.reports import TokenReport
from tests.fakes.hash_model import START, VOCAB, logits_for, next_token, position_kv
from tests.fakes.sampled_rows import SampleRow, sample
from tests.simulation import oracle
from tests.workers.conftest import Bench

VOCABULARY = 17
EOS = 7
NO_PENALTIES = {"presence": 0.0, "frequency": 0.0, "repetition": 1.0, "biases": ()}


@pytest.fixture(scope="module")
def tiny_model() -> Iterator[transformers.LlamaForCausalLM]:
    """Random weights; flat enough that ends come at any length. On one thread: it is too small for two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.7)
    yield model
    torch.set_num_threads(threads)


def searched(model, prompt, beam, max_tokens, stops, min_tokens=0, count=None, penalties=NO_PENALTIES):
    """The search alone, fed by whole forward passes."""
    rules = StopRules(
        length_limit=len(prompt) + max_tokens,
        min_length=len(prompt) + min_tokens,
        stop_token_ids=frozenset(stops),
    )
    search = BeamSearch(beam, rules, len(prompt))
    while search.running:
        runs = [[*prompt, *(step.token for step in each.steps)] for each in search.running]
        with torch.no_grad():
            logits = model(torch.tensor(runs)).logits[:, -1]
        params = SamplingParams(candidates=search.candidates())
        adjusted = [adjustments_of(run, len(prompt), **penalties) for run in runs]
        rows = [SampleRow(params=params, position=0, adjustments=each) for each in adjusted]
        search.advance(sample(logits, rows))
    answers = search.best(count or beam.width)
    return [([step.token for step in answer.steps], answer.total) for answer in answers]


class OpenAiPenalties(transformers.LogitsProcessor):
    """What transformers lacks, by OpenAI's formula."""

    def __init__(self, prompt_tokens, presence, frequency):
        self._prompt_tokens, self._presence, self._frequency = prompt_tokens, presence, frequency

    def __call__(self, input_ids, scores):
        counts = torch.zeros_like(scores)
        answer = input_ids[:, self._prompt_tokens :]
        counts.scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


def generated(model, prompt, beam, max_tokens, stops, min_tokens=0, penalties=NO_PENALTIES):
    openai = OpenAiPenalties(len(prompt), penalties["presence"], penalties["frequency"])
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            num_beams=beam.width,
            num_return_sequences=beam.width,
            length_penalty=beam.length_penalty,
            early_stopping=beam.early_stopping,
            max_new_tokens=max_tokens,
            min_new_tokens=min_tokens,
            repetition_penalty=penalties["repetition"],
            sequence_bias={(token,): bias for token, bias in penalties["biases"]} or None,
            logits_processor=transformers.LogitsProcessorList([openai]),
            do_sample=False,
            eos_token_id=list(stops) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    lengths = (found.beam_indices >= 0).sum(dim=1).tolist()
    rows = [
        row[len(prompt) :][:length] for row, length in zip(found.sequences.tolist(), lengths, strict=True)
    ]
    return rows, found.sequences_scores.tolist()


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize("stops", [(EOS,), (EOS, 3, 11), ()])
def test_answers_and_scores_are_those_of_transformers(
    tiny_model, width, early_stopping, length_penalty, stops
):
    beam = Beam(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
    for seed, (max_tokens, min_tokens) in enumerate(((1, 0), (5, 0), (12, 0), (12, 4))):
        prompt = torch.randint(
            VOCABULARY, (3 + seed,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        asked = (tiny_model, prompt, beam, max_tokens, stops, min_tokens if stops else 0)
        rows, scores = generated(*asked)
        found = searched(*asked)
        assert [tokens for tokens, _ in found] == rows
        mine = [total / len(tokens) ** length_penalty for tokens, total in found]
        assert mine == pytest.approx(scores, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition": 1.6},
        {"repetition": 0.7},
        {"biases": ((2, 3.0), (EOS, -2.5))},
        {"presence": 0.8},
        {"frequency": -0.6},
        {"repetition": 1.3, "biases": ((1, 2.0), (EOS, 1.5)), "presence": 0.5, "frequency": 0.4},
    ],
    ids=str,
)
def test_penalties_and_biases_change_a_search_as_in_transformers(tiny_model, penalties):
    beam, changed = Beam(width=3), 0
    penalties = NO_PENALTIES | penalties
    for seed in range(4):
        prompt = torch.randint(VOCABULARY, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
        asked = (tiny_model, prompt, beam, 10, (EOS,))
        rows, scores = generated(*asked, penalties=penalties)
        found = searched(*asked, penalties=penalties)
        assert [tokens for tokens, _ in found] == rows
        assert [total / len(tokens) for tokens, total in found] == pytest.approx(scores, rel=1e-4, abs=1e-5)
        changed += rows != generated(*asked)[0]
    assert changed


def test_what_is_compared_ends_at_many_lengths(tiny_model):
    lengths = set()
    for seed in range(8):
        prompt = torch.randint(VOCABULARY, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
        rows, _ = generated(tiny_model, prompt, Beam(width=4), 12, (EOS, 3, 11))
        lengths |= set(map(len, rows))
    assert len(lengths) > 3


# --- the worker


def order_of_beam(order_of, width, n=1, **changes):
    choices = tuple(Choice(index=number, seed=0) for number in range(n))
    return order_of(choices=choices, beam=Beam(width=width), **changes)


def both(bench, order):
    ticket = bench.ticket(order)
    bench.d.worker.reserve("g", order, ticket)
    bench.p.worker.submit("g", order, bench.hand_off(ticket))


def told(bench):
    """Tokens of each choice, in order."""
    answers = {}
    for _, report in bench.d.heard:
        if isinstance(report, TokenReport):
            answers.setdefault(report.choice, []).append(report.token_id)
            assert report.position == len(answers[report.choice]) - 1
    return [answers[choice] for choice in sorted(answers)]


def expected(prompt, beam, max_tokens, stops=()):
    """The search over the hash model, every run from its first token."""
    rules = StopRules(length_limit=len(prompt) + max_tokens, stop_token_ids=frozenset(stops))
    search = BeamSearch(beam, rules, len(prompt))
    params = SamplingParams(candidates=search.candidates())
    while search.running:
        logits = [hash_logits([*prompt, *(s.token for s in each.steps)]) for each in search.running]
        rows = [SampleRow(params=params, position=0)] * len(logits)
        search.advance(sample(torch.cat(logits), rows))
    return [[step.token for step in each.steps] for each in search.best(beam.width)]


def hash_logits(tokens):
    kv, before = b"", START
    for position, token in enumerate(tokens):
        before = position_kv(before, token, position)
        kv += before
    return torch.from_numpy(logits_for([next_token(kv)]))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("width", [2, 4])
def test_a_search_over_two_workers_is_the_one_over_plain_sequences(bench_of, order_of, length, width):
    prompt = list(range(1, length + 1))
    bench = bench_of()
    both(bench, order_of_beam(order_of, width, n=width, prompt=prompt, max_tokens=9))
    bench.settle()
    assert told(bench) == expected(prompt, Beam(width=width), 9)
    assert bench.p.worker.tokens().computed == length
    assert bench.p.tokens() == [], "whoever computes the prompt samples nothing for it"
    copied = sum(len(batch.copies) for batch in bench.d.core._runner.batches)
    assert copied > 0


def test_a_second_search_finds_its_prompt_in_the_cache_and_the_same_answers(bench_of, order_of):
    """The last block of the prompt is cached too: it is copied before its last token is computed again."""
    bench, prompt = bench_of(), list(range(1, 9))
    both(bench, order_of_beam(order_of, 2, prompt=prompt, max_tokens=9, cache_scope=b"s" * 16))
    bench.settle()
    first = told(bench)
    bench.d.heard.clear()
    order = order_of_beam(order_of, 2, request_id="again", prompt=prompt, max_tokens=9, cache_scope=b"s" * 16)
    ticket = bench.ticket(order)
    bench.d.worker.reserve("g", order, ticket)
    held = bench.d.heard[-1][1].blocks_held
    assert held == 2
    both_ways = bench.hand_off(bench.ticket(order, ticket_id=ticket.ticket_id, first_block=held))
    bench.p.worker.submit("g", order, both_ways)
    bench.settle()
    assert told(bench) == first == expected(prompt, Beam(width=2), 9)[:1]


def test_stop_tokens_and_the_number_of_answers_are_kept(bench_of, order_of):
    prompt, stops = [5, 6, 7], range(0, VOCAB, 5)
    bench = bench_of()
    both(
        bench,
        order_of_beam(
            order_of, 4, n=2, prompt=prompt, max_tokens=12, stop_token_ids=frozenset(stops), logprobs=2
        ),
    )
    bench.settle()
    assert told(bench) == expected(prompt, Beam(width=4), 12, stops)[:2]
    ends = [report.end for _, report in bench.d.heard if isinstance(report, TokenReport) and report.end]
    assert len(ends) == 2
    tops = [report.top for _, report in bench.d.heard if isinstance(report, TokenReport)]
    assert {len(top) for top in tops} == {2}


@pytest.mark.parametrize("way", [both, Bench.alone])
def test_penalties_of_a_search_look_at_its_own_hypothesis_and_leave_logprobs_alone(bench_of, order_of, way):
    prompt = [5, 9, 5, 2, 61]
    asked = {"presence": 1.4, "frequency": 0.7, "repetition": 1.7, "biases": ((3, 2.0), (40, 3.4))}
    named = {f"{name}_penalty": asked[name] for name in ("presence", "frequency", "repetition")}
    bench = bench_of()
    order = order_of_beam(
        order_of, 3, n=3, prompt=prompt, max_tokens=30, logprobs=2, logit_bias=asked["biases"], **named
    )
    way(bench, order)
    bench.settle()
    ends = {"max_tokens": 30, "min_tokens": 0, "stop": frozenset()}
    right = oracle.searched(prompt, Beam(width=3), 3, **ends, penalties=oracle.Penalties(**asked))
    assert told(bench) == [list(each.tokens) for each in right]
    assert told(bench) != expected(prompt, Beam(width=3), 30)
    answers = {0: list(prompt), 1: list(prompt), 2: list(prompt)}
    for _, report in bench.d.heard:
        if isinstance(report, TokenReport):
            own = torch.log_softmax(hash_logits(answers[report.choice])[0].double(), dim=-1)
            assert report.logprob == pytest.approx(own[report.token_id].item(), abs=1e-6)
            assert report.top[0][1] == pytest.approx(own.max().item(), abs=1e-6)
            answers[report.choice].append(report.token_id)


@pytest.mark.parametrize("turns", range(14))
def test_a_search_that_is_cancelled_at_any_moment_leaves_nothing(bench_of, order_of, turns):
    bench = bench_of()
    order = order_of_beam(order_of, 3, max_tokens=30)
    both(bench, order)
    bench.turn(turns)
    bench.d.worker.end_choice("g", order.key, 0)
    for side in (bench.p, bench.d):
        side.worker.cancel("g", order.key)
        side.assert_balanced()
    bench.settle()


def test_a_search_needs_no_more_blocks_than_it_was_promised(bench_of, order_of):
    """In a pool with not one block more."""
    order = order_of_beam(order_of, 3, prompt=range(1, 8), max_tokens=20)
    bench = bench_of(blocks=order.blocks(block_size=4))
    both(bench, order)
    bench.settle()
    assert told(bench) == expected(list(range(1, 8)), Beam(width=3), 20)[:1]
