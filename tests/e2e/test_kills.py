"""kill -9 of workers under load: no stream notices, and nothing is left behind."""

import asyncio
import os
import random
import select
import signal

import grpc
import pytest

from crossdock.v1 import control_pb2, inference_pb2, inference_pb2_grpc
from tests.e2e.conftest import spec, stream, tokens_of

TRIALS = 20
STREAMS = 16
PATIENCE_S = 300
"""For one answer that loses workers: on a busy machine those that are started again take long to be ready."""
DEATH_S = 60
"""A process is gone when its last thread is, and one on a borrowed core runs only while nobody else wants that core."""
NO_EOS = inference_pb2.StopConditions(ignore_eos=True)
WITH_LOGPROBS = inference_pb2.OutputOptions(logprobs=2)
WITH_ALL = inference_pb2.OutputOptions(logprobs=2, prompt_logprobs=1)


def wanted(number):
    """Greedy and seeded in turn, every other pair with penalties; prompts of several chunks among them."""
    dice = random.Random(number)
    sampling = {"max_tokens": dice.randrange(8, 40)}
    if number % 2:
        sampling |= {"temperature": 0.8, "top_p": 0.95, "seed": number}
    if number % 4 < 2:
        sampling |= {"repetition_penalty": 1.2, "presence_penalty": 0.7, "frequency_penalty": -0.6}
        sampling |= {"logit_bias": {28: 2.5, 30: -100}}
    prompt = tokens_of(number, dice.choice((5, 40, 130, 400)))
    return spec(prompt, sampling=sampling, stop=NO_EOS, output=WITH_ALL if number % 3 == 0 else WITH_LOGPROBS)


SPECS = [wanted(number) for number in range(STREAMS)]


@pytest.mark.timeout(900)
async def test_20_kills_under_16_streams_change_no_token_and_leave_no_block(wide_stack):
    async with grpc.aio.insecure_channel(wide_stack.grpc) as channel:
        golden = [await stream(channel, each) for each in SPECS]
        for trial in range(TRIALS):
            dice = random.Random(trial)
            victim = ("decode-0", "prefill-0", "decode-1", "prefill-1")[trial % 4]
            await ready(wide_stack, victim.split("-")[0])
            streams = [asyncio.create_task(stream(channel, each, PATIENCE_S)) for each in SPECS]
            await some_tokens(channel, dice.randrange(1, 12))
            kill(wide_stack.children()[victim])
            answers = await asyncio.gather(*streams)
            for asked, answer, expected in zip(SPECS, answers, golden, strict=True):
                assert answer.token_ids == expected.token_ids, f"trial {trial}"
                assert answer.logprobs == expected.logprobs, f"trial {trial}"
                assert scored(asked, answer) == scored(asked, expected), f"trial {trial}"
        await ready(wide_stack, "prefill", "decode")
        wide_stack.idle_ledgers()


def scored(asked, answer):
    """The logprobs of an answer's prompt: all of them where they were asked for."""
    told = answer.prompt.prompt_logprobs
    wanted = answer.usage.prompt_tokens - 1 if asked.output.HasField("prompt_logprobs") else 0
    assert len(told.token_logprobs) == wanted
    return told


async def some_tokens(channel, count):
    """Return after `count` messages of a stream that runs beside the others, and drop it."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    witness = stub.GenerateStream(inference_pb2.GenerateStreamRequest(spec=spec("Count: ", stop=NO_EOS)))
    for _ in range(count):
        await witness.read()
    witness.cancel()


def kill(pid):
    """SIGKILL, verified."""
    descriptor = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(DEATH_S * 1000), f"{pid} is still there"
    os.close(descriptor)


async def ready(stack, *roles):
    """Wait until the gateway sees every worker of these roles as ready; the others may still be starting."""
    state = control_pb2.WORKER_STATE_READY
    while not all(
        worker.state == state for worker in stack.status().workers if worker.worker_id.startswith(roles)
    ):
        await asyncio.sleep(0.05)
