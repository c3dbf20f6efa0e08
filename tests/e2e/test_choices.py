"""Several answers to one prompt, over both faces: what they are, what they cost, and that no kill shows in them."""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import pytest

from crossdock.client import AsyncClient, Generation, choice_seed
from crossdock.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.conftest import spec, tokens_of
from tests.e2e.test_kills import PATIENCE_S, kill, ready, some_tokens

GOLDEN = Path(__file__).parents[1] / "data" / "golden_smollm2_beams_fp32.jsonl"
PROMPT = tokens_of(3, 150)
LONG_PROMPT = tokens_of(3, 600)
"""No decode worker computes it by itself."""
SEED = 77
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.1}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, **PENALTIES}
HOW = Generation(**SAMPLED, max_tokens=20, seed=SEED, ignore_eos=True, logprobs=2, cache_salt="alone")


@dataclass
class Told:
    """One choice of a stream."""

    token_ids: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    finishes: int = 0


async def choices_of(channel, generation_spec, timeout=60):
    """A streamed answer, choice by choice, and its usage."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    call = stub.GenerateStream(inference_pb2.GenerateStreamRequest(spec=generation_spec), timeout=timeout)
    told = [Told() for _ in range(generation_spec.sampling.n)]
    usage = None
    async for message in call:
        assert usage is None, "the usage comes last"
        for delta in message.deltas:
            choice = told[delta.index]
            assert not choice.finishes and delta.first_position == len(choice.token_ids)
            choice.token_ids += delta.token_ids
            choice.logprobs += delta.logprobs.token_logprobs
            choice.finishes += delta.HasField("finish")
        usage = message.usage if message.HasField("usage") else None
    assert all(choice.finishes == 1 for choice in told)
    return told, usage


def computed(stack):
    """Tokens that each pool has computed so far."""
    stack.idle_ledgers()
    sums = {}
    for worker in stack.audit().ledgers:
        role = worker.worker_id.split("-")[0]
        sums[role] = sums.get(role, 0) + worker.tokens.computed
    return sums


async def test_case_67_four_seeded_choices_are_four_single_runs_and_their_prompt_is_computed_once(
    exact_stack,
):
    async with AsyncClient(exact_stack.grpc) as client:
        singles = [
            await client.generate(
                LONG_PROMPT, Generation(**{**vars_of(HOW), "seed": choice_seed(SEED, number)})
            )
            for number in range(4)
        ]
        before = computed(exact_stack)
        together = await client.generate(
            LONG_PROMPT, Generation(**{**vars_of(HOW), "n": 4, "cache_salt": "together"})
        )
        after = computed(exact_stack)
    assert [choice.token_ids for choice in together.choices] == [each.token_ids for each in singles]
    assert [choice.logprobs for choice in together.choices] == [each.logprobs for each in singles]
    assert [choice.seed for choice in together.choices] == [each.seed for each in singles]
    assert len({choice.token_ids for choice in together.choices}) == 4
    assert (together.usage.prompt_tokens, together.usage.completion_tokens) == (600, 80)
    assert {role: after[role] - before[role] for role in after} == {"prefill": 600, "decode": 4 * 19}


def vars_of(how):
    return {name: getattr(how, name) for name in how.__dataclass_fields__}


async def test_the_best_of_several_are_the_likeliest_of_them(exact_stack):
    async with AsyncClient(exact_stack.grpc) as client:
        everyone = await client.generate(PROMPT, Generation(**{**vars_of(HOW), "n": 4}))
        best = await client.generate(PROMPT, Generation(**{**vars_of(HOW), "n": 2, "best_of": 4}))

    def likelihood(choice):
        return sum(token.logprob for token in choice.logprobs)

    ranked = sorted(everyone.choices, key=likelihood, reverse=True)
    assert [choice.token_ids for choice in best.choices] == [choice.token_ids for choice in ranked[:2]]
    assert [choice.seed for choice in best.choices] == [choice.seed for choice in ranked[:2]]
    assert best.usage.completion_tokens == 80, "what is not shown was computed all the same"


async def test_a_stop_string_ends_its_choice_on_the_worker_too_and_the_other_goes_on(exact_stack):
    async with AsyncClient(exact_stack.grpc) as client:
        how = {**vars_of(HOW), "n": 2, "max_tokens": 200}
        whole = await client.generate(PROMPT, Generation(**how))
        words = [choice.text.split() for choice in whole.choices]
        stop = next(word for word in words[0][3:] if word not in whole.choices[1].text)
        before = computed(exact_stack)["decode"]
        stopped = await client.generate(PROMPT, Generation(**{**how, "stop": (stop,)}))
        assert computed(exact_stack)["decode"] - before < 199 + 100
    first, second = stopped.choices
    assert first.text == whole.choices[0].text.partition(stop)[0]
    assert second.token_ids == whole.choices[1].token_ids


async def test_openai_clients_get_the_same_choices_whole_and_streamed(exact_stack):
    body = {**SAMPLED, "prompt": PROMPT, "n": 2, "seed": SEED, "max_tokens": 20, "ignore_eos": True}
    body |= {"return_token_ids": True}
    async with AsyncClient(exact_stack.grpc) as client:
        wanted = await client.generate(PROMPT, Generation(**{**vars_of(HOW), "n": 2}))
    async with httpx.AsyncClient(base_url=exact_stack.http, timeout=60) as http:
        whole = (await http.post("/v1/completions", json=body)).json()
        chat = await http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "Name a colour."}], "n": 3, "max_tokens": 4},
        )
        streamed = await http.post("/v1/completions", json={**body, "stream": True})
    expected = [list(choice.token_ids) for choice in wanted.choices]
    assert [choice["token_ids"] for choice in whole["choices"]] == expected
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert whole["usage"]["prompt_tokens"] == 150 and whole["usage"]["completion_tokens"] == 40
    assert [choice["index"] for choice in chat.json()["choices"]] == [0, 1, 2]
    assert streamed.text.count('"finish_reason":"length"') == 2
    assert streamed.text.rstrip().endswith("[DONE]")


async def test_a_beam_search_is_transformers_own_over_both_faces(exact_stack):
    """A golden prompt of tests/data, four beams; each search computes the prompt once."""
    golden = next(
        line
        for line in map(json.loads, GOLDEN.read_text().splitlines())
        if line["asked"] == {"max_new_tokens": 24, "num_beams": 4}
    )
    before = computed(exact_stack)
    async with AsyncClient(exact_stack.grpc) as client:
        how = Generation(beam_width=4, n=4, max_tokens=24, logprobs=1, cache_salt="beams")
        found = await client.generate(golden["prompt_ids"], how)
        streamed = [delta async for delta in client.stream(golden["prompt_ids"], how)]
    assert [list(choice.token_ids) for choice in found.choices] == golden["outputs"]
    # A search goes on from the prompt's last token, by itself once and then with each of its beams.
    spent = sum(computed(exact_stack).values()) - sum(before.values())
    assert spent == 2 * (len(golden["prompt_ids"]) + 1 + 23 * 4)
    totals = [sum(token.logprob for token in choice.logprobs) for choice in found.choices]
    scores = [total / len(choice.token_ids) for total, choice in zip(totals, found.choices, strict=True)]
    assert scores == pytest.approx(golden["scores"], abs=2e-3)
    assert [list(delta.token_ids) for delta in streamed] == golden["outputs"], "whole, at the end"
    body = {"prompt": golden["prompt_ids"], "use_beam_search": True, "best_of": 4, "n": 2}
    body |= {"max_tokens": 24, "return_token_ids": True, "temperature": 0}
    async with httpx.AsyncClient(base_url=exact_stack.http, timeout=60) as http:
        answer = (await http.post("/v1/completions", json=body)).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == golden["outputs"][:2]


@pytest.mark.timeout(900)
async def test_case_37_no_kill_under_streams_of_two_choices_shows_in_any_of_them(wide_stack):
    """Seeded, n = 2, with logprobs."""
    asked = [
        spec(
            tokens_of(number, 60),
            sampling={**SAMPLED, "max_tokens": 40, "seed": number, "n": 2},
            stop=inference_pb2.StopConditions(ignore_eos=True),
            output=inference_pb2.OutputOptions(logprobs=0),
        )
        for number in range(8)
    ]
    async with grpc.aio.insecure_channel(wide_stack.grpc) as channel:
        golden = [await choices_of(channel, each) for each in asked]
        for trial, victim in enumerate(("decode-0", "prefill-0", "decode-1", "decode-0")):
            await ready(wide_stack, victim.split("-")[0])
            streams = [asyncio.create_task(choices_of(channel, each, PATIENCE_S)) for each in asked]
            await some_tokens(channel, 3 + 4 * trial)
            kill(wide_stack.children()[victim])
            for (told, usage), (right, cost) in zip(await asyncio.gather(*streams), golden, strict=True):
                assert told == right, f"trial {trial}"
                assert usage.completion_tokens == cost.completion_tokens == 80
        await ready(wide_stack, "prefill", "decode")
    wide_stack.idle_ledgers()
