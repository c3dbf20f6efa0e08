"""Pools whose workers are of different numbers of ranks hand over to each other, and outlive a rank that is killed."""

import asyncio
import os
import signal
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
import transformers as hf

from crossdock.v1 import inference_pb2
from engine.wishes import EngineWishes
from service.gguf_vocabulary import read_gguf
from service.model_source import resolve_model
from tests.e2e.conftest import running_stack, spec, stream, tokens_of
from tests.e2e.test_exactness import single_engine_answer
from tests.e2e.test_kills import kill, ready, some_tokens

PROMPT, COUNT = tokens_of(5, 40), 60
ASKED = spec(
    PROMPT,
    sampling={"max_tokens": COUNT},
    stop=inference_pb2.StopConditions(ignore_eos=True),
    output=inference_pb2.OutputOptions(logprobs=0),
)
CONFIG = hf.LlamaConfig(
    vocab_size=49152,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.3,
    tie_word_embeddings=True,
    eos_token_id=2,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with the default one's tokenizer."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(11)
    hf.AutoModelForCausalLM.from_config(CONFIG).save_pretrained(path)
    read_gguf(resolve_model("smollm2-135m-instruct")).backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def wanted(folder):
    """Tokens and logprobs of one engine of one rank."""
    wishes = EngineWishes(model=folder, dtype=torch.float32, num_blocks=32)
    tokens, logprobs = single_engine_answer(PROMPT, COUNT, wishes)
    return tokens, np.float32(logprobs).tolist()


def stack_of(folder, prefill, decode):
    flags = ("--model", str(folder), "--dtype", "float32", "--num-gpu-blocks-override", "32")
    ranks = (f"--prefill-tensor-parallel-size={prefill}", f"--decode-tensor-parallel-size={decode}")
    return running_stack(*flags, *ranks)


def followers_of(worker):
    """Process ids of the ranks that follow a worker, by its process id."""
    tasks = Path(f"/proc/{worker}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


async def whole_or_refused(under_way):
    """The answer, which waits for the worker to come back; how it was refused, when that takes too long."""
    try:
        answer = await under_way
    except grpc.aio.AioRpcError as refused:
        return refused.code()
    return answer.token_ids, answer.logprobs


async def test_a_prompt_of_two_ranks_goes_on_at_one_and_no_rank_outlives_the_first(folder, wanted):
    with stack_of(folder, 2, 1) as stack:
        async with grpc.aio.insecure_channel(stack.grpc) as channel:
            answer = await stream(channel, ASKED)
        assert (answer.token_ids, answer.logprobs) == wanted
        worker = stack.children()["prefill-0"]
        (follower,) = followers_of(worker)
        kill(worker)
        while Path(f"/proc/{follower}").exists():
            await asyncio.sleep(0.05)


async def back_again(stack, worker):
    """Once the decode worker of that process id lives again, and is ready."""
    while stack.children().get("decode-0") in (None, worker):
        await asyncio.sleep(0.05)
    await ready(stack, "decode-0")


async def test_a_prompt_of_one_rank_goes_on_at_two_which_drain_together_and_are_killed_together(
    folder, wanted, capfd
):
    with stack_of(folder, 1, 2) as stack:
        async with grpc.aio.insecure_channel(stack.grpc) as channel:
            worker = stack.children()["decode-0"]
            under_way = asyncio.create_task(stream(channel, ASKED))
            await some_tokens(channel, 2)
            for pid in (*followers_of(worker), worker):
                os.kill(pid, signal.SIGTERM)
            answer = await under_way
            assert (answer.token_ids, answer.logprobs) == wanted
            await back_again(stack, worker)
            assert "decode-0: exited with 0, restarting" in capfd.readouterr().err
            worker = stack.children()["decode-0"]
            (follower,) = followers_of(worker)
            under_way = asyncio.create_task(stream(channel, ASKED))
            await some_tokens(channel, 2)
            kill(follower)
            assert await whole_or_refused(under_way) in (wanted, grpc.StatusCode.UNAVAILABLE)
            await back_again(stack, worker)
            answer = await stream(channel, ASKED)
            assert (answer.token_ids, answer.logprobs) == wanted
        stack.idle_ledgers()
