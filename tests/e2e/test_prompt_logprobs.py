"""How likely a prompt is, through real processes and all faces: what evaluation harnesses send, and what they read."""

import asyncio

import httpx
import pytest

from crossdock.client import AsyncClient, Generation, RequestError
from tests.e2e.conftest import tokens_of
from tests.e2e.test_exactness import GOLDEN

LONG = tokens_of(73, 300)
HOW = Generation(prompt_logprobs=3, max_tokens=0)


async def post(stack, body):
    async with httpx.AsyncClient(base_url=stack.http, timeout=60) as http:
        response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def scored(stack, *prompts):
    """The logprobs of these prompts, asked for all at once."""
    async with AsyncClient(stack.grpc) as client:
        answers = await asyncio.gather(*(client.generate(prompt, HOW) for prompt in prompts))
    return [answer.prompt_logprobs for answer in answers]


@pytest.mark.parametrize("case", [GOLDEN[0], GOLDEN[12], GOLDEN[16]], ids=lambda case: str(case["id"]))
async def test_a_harness_reads_of_golden_answers_what_transformers_said_of_them(exact_stack, case):
    """As local-completions of lm-eval asks: token ids, echo, one token, which it leaves out."""
    prompt, answer = case["prompt_ids"], case["output_ids"]
    body = {"prompt": [[*prompt, *answer]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    (choice,) = (await post(exact_stack, body | {"seed": 1234}))["choices"]
    logprobs = choice["logprobs"]["token_logprobs"][len(prompt) : -1]
    tops = choice["logprobs"]["top_logprobs"][len(prompt) : -1]
    assert logprobs == pytest.approx(case["output_logprobs"], abs=1e-3)
    greedy = [logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True)]
    sure = [margin >= 1e-3 for margin in case["margins"]]
    assert [each for each, certain in zip(greedy, sure, strict=True) if certain] == [True] * sum(sure)


async def test_an_echo_adds_up_to_what_generation_says_of_the_same_tokens(exact_stack):
    async with AsyncClient(exact_stack.grpc) as client:
        how = Generation(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
        answer = await client.generate(LONG[:70], how)
    body = {"prompt": [*LONG[:70], *answer.token_ids], "max_tokens": 0, "logprobs": 2, "echo": True}
    whole = await post(exact_stack, body)
    told = whole["choices"][0]["logprobs"]["token_logprobs"]
    assert told[0] is None and len(told) == 70 + 24
    assert told[70:] == [token.logprob for token in answer.logprobs]
    assert sum(told[70:]) == sum(token.logprob for token in answer.logprobs)
    assert whole["usage"]["completion_tokens"] == 0
    assert whole["choices"][0]["finish_reason"] == "length"


async def test_they_are_the_same_whatever_the_chunk_and_whoever_computes_them(
    narrow_stack, coarse_stack, forgetful_stack
):
    prompts = [LONG, LONG[:40], tokens_of(5, 129)]
    alone = [(await scored(narrow_stack, prompt))[0] for prompt in prompts]
    assert [[each.token_id for each in told] for told in alone] == [prompt[1:] for prompt in prompts]
    assert await scored(narrow_stack, *prompts) == alone
    for stack in (coarse_stack, forgetful_stack):
        assert await scored(stack, *prompts) == alone


async def test_a_stream_brings_them_with_its_first_delta(exact_stack):
    async with AsyncClient(exact_stack.grpc) as client:
        how = Generation(prompt_logprobs=1, max_tokens=3, ignore_eos=True, n=2, seed=1)
        deltas = [delta async for delta in client.stream(LONG[:20], how)]
        answer = await client.generate(LONG[:20], how)
    assert len(answer.prompt_logprobs) == 19
    assert [delta.prompt_logprobs for delta in deltas] == [answer.prompt_logprobs] + [()] * (len(deltas) - 1)


async def test_a_truncated_prompt_is_its_last_tokens(exact_stack):
    async with AsyncClient(exact_stack.grpc) as client:
        how = Generation(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
        whole = await client.generate(LONG[-50:], how)
        for prompt, kept in ((LONG, 50), (LONG * 40, 50)):
            cut = await client.generate(
                prompt,
                Generation(
                    temperature=0.0,
                    max_tokens=8,
                    ignore_eos=True,
                    prompt_logprobs=0,
                    truncate_prompt_tokens=kept,
                ),
            )
            assert (cut.token_ids, cut.prompt_logprobs) == (whole.token_ids, whole.prompt_logprobs)
            assert cut.usage.prompt_tokens == 50
    body = {"prompt": "word " * 9_000, "max_tokens": 0, "truncate_prompt_tokens": 50, "echo": True}
    answer = await post(exact_stack, body)
    assert answer["choices"][0]["text"] == " word" * 49 + " "
    assert answer["usage"]["prompt_tokens"] == 50


@pytest.mark.parametrize(
    ("how", "field"),
    [
        (Generation(prompt_logprobs=21), "output.prompt_logprobs"),
        (Generation(prompt_logprobs=-1), "output.prompt_logprobs"),
        (Generation(prompt_logprobs=1, beam_width=2), "output.prompt_logprobs"),
        (Generation(max_tokens=0), "sampling.max_tokens"),
        (Generation(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
        (Generation(truncate_prompt_tokens=2**31 - 1), "truncate_prompt_tokens"),
    ],
)
async def test_what_cannot_be_had_is_refused_by_name(exact_stack, how, field):
    async with AsyncClient(exact_stack.grpc) as client:
        with pytest.raises(RequestError) as refusal:
            await client.generate("hello", how)
    assert [violation.field for violation in refusal.value.violations] == [field]


async def test_nothing_is_left_behind(exact_stack):
    await scored(exact_stack, *(tokens_of(n, 30 + n) for n in range(8)))
    exact_stack.idle_ledgers()
