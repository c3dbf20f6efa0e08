"""What comes out of the three processes is what an idle single engine gives, to the bit."""

import asyncio
import json
import random
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch

from crossdock.v1 import inference_pb2
from decode_worker.policy import DecodePolicy
from engine.assembly import assemble
from engine.sequence import SamplingParams, Sequence, StopRules
from engine.wishes import EngineWishes
from tests.e2e.conftest import running_stack, spec, stream, tokens_of

GOLDEN = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "golden_smollm2_fp32.jsonl").read_text().splitlines()
]
WITH_LOGPROBS = inference_pb2.OutputOptions(logprobs=0, include_special_tokens=True)


def golden_spec(case):
    prompt = case.get("prompt", "")
    made = spec(prompt, sampling={"max_tokens": len(case["output_ids"])}, output=WITH_LOGPROBS)
    if case["kind"] == "chat":
        messages = [inference_pb2.ChatMessage(**message) for message in case["messages"]]
        made.chat.CopyFrom(inference_pb2.ChatPrompt(messages=messages))
    return made


async def test_every_golden_prompt_streams_the_golden_tokens(exact_stack):
    """And case 74: their logprobs, from the first on."""
    async with grpc.aio.insecure_channel(exact_stack.grpc) as channel:
        answers = await asyncio.gather(*(stream(channel, golden_spec(case)) for case in GOLDEN))
    for case, answer in zip(GOLDEN, answers, strict=True):
        sure = next((i for i, margin in enumerate(case["margins"]) if margin < 1e-3), len(case["margins"]))
        assert answer.usage.prompt_tokens == len(case["prompt_ids"])
        assert answer.token_ids[:sure] == case["output_ids"][:sure], case["id"]
        assert answer.logprobs[:sure] == pytest.approx(case["output_logprobs"][:sure], abs=1e-3)
        if sure == len(case["margins"]):
            eos_is_last = answer.finish.WhichOneof("matched") == "eos_token_id"
            shown = case["output_text"].removesuffix("<|im_end|>") if eos_is_last else case["output_text"]
            assert answer.text == shown


WATCHED = tokens_of(1, 150)
WATCHED_SAMPLING = ({"max_tokens": 16}, {"max_tokens": 16, "temperature": 1.0, "seed": 7, "top_p": 0.95})


async def watched_answers(channel, others):
    """The watched prompt, greedy and seeded, among other requests; tokens and logprobs."""
    crowd = [
        stream(
            channel,
            spec(
                tokens_of(n, 5 + 9 * n),
                sampling={"max_tokens": 12, "temperature": 0.8, "seed": n},
            ),
        )
        for n in range(others)
    ]
    watched = [
        stream(channel, spec(WATCHED, sampling=each, output=WITH_LOGPROBS)) for each in WATCHED_SAMPLING
    ]
    answers = await asyncio.gather(*watched, *crowd)
    return [(answer.token_ids, answer.logprobs) for answer in answers[: len(watched)]]


async def test_an_answer_is_the_same_alone_and_in_a_crowd_whatever_the_chunk(
    exact_stack, narrow_stack, coarse_stack, forgetful_stack
):
    """The chunks of the first two are longer than the prompt; the others have the model of the second."""
    for stack in (exact_stack, narrow_stack):
        async with grpc.aio.insecure_channel(stack.grpc) as channel:
            alone = await watched_answers(channel, others=0)
            assert await watched_answers(channel, others=16) == alone
    assert alone[0][0] != alone[1][0], "the seeded answer is not the greedy one"
    for stack in (coarse_stack, forgetful_stack):
        async with grpc.aio.insecure_channel(stack.grpc) as channel:
            assert await watched_answers(channel, others=2) == alone


def single_engine_answer(prompt, count, wishes):
    """Tokens and logprobs, greedy, of one engine that nobody hands anything over to."""
    core = assemble(wishes, DecodePolicy(budget_tokens=64, seats=1), memory_bytes=4 << 30).core
    stop = StopRules(length_limit=len(prompt) + count)
    sampling = SamplingParams(logprobs=0)
    core.submit(Sequence(id=("r", 1, 0), tokens=list(prompt), sampling=sampling, stop=stop, arrived=0.0))
    sampled = []
    while not core.idle():
        sampled += [output.sampled for output in core.step(0.0).outputs]
    return [each.token for each in sampled], [each.logprob for each in sampled]


async def test_keys_and_values_in_int8_that_are_handed_over_give_the_answer_of_one_engine(
    shallow_model_path, shallow_model
):
    wishes = EngineWishes(model=shallow_model_path, dtype=torch.float32, kv_dtype=torch.int8, num_blocks=32)
    tokens, logprobs = single_engine_answer(WATCHED, 16, wishes)
    flags = (
        *shallow_model,
        "--dtype",
        "float32",
        "--kv-cache-dtype",
        "int8",
        "--kv-cache-memory-bytes",
        "64MiB",
    )
    with running_stack(*flags) as stack:
        async with grpc.aio.insecure_channel(stack.grpc) as channel:
            asked = spec(WATCHED, sampling=WATCHED_SAMPLING[0], output=WITH_LOGPROBS)
            answer = await stream(channel, asked)
    assert answer.token_ids == tokens
    assert answer.logprobs == np.float32(logprobs).tolist()


@pytest.mark.parametrize("length", [47, 48, 49])
async def test_the_same_prompt_again_counts_what_was_cached_and_is_the_same_answer(exact_stack, length):
    """Case 58 and case 81: first nothing, then all full blocks before the last token; another salt is cold."""
    dice = random.Random(f"cached {length}")
    prompt = [dice.randrange(1000, 40000) for _ in range(length)]
    asked = spec(prompt, sampling={"max_tokens": 8}, output=WITH_LOGPROBS)
    salted = spec(prompt, sampling={"max_tokens": 8}, output=WITH_LOGPROBS, cache_salt="another")
    async with grpc.aio.insecure_channel(exact_stack.grpc) as channel:
        answers = [await stream(channel, each) for each in (asked, asked, salted)]
    hit = (length - 1) // 16 * 16
    assert [answer.usage.cached_tokens for answer in answers] == [0, hit, 0]
    cold, warm, other = ((answer.token_ids, answer.logprobs) for answer in answers)
    assert cold == warm == other
