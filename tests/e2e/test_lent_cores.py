"""One pool rests, the other computes with its cores as well; both at work, each keeps to its own."""

import asyncio
import os

import grpc
import pytest

from crossdock.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.conftest import running_stack, spec, stream, tokens_of

TRIES = 30  # on a busy machine a borrowed core may have no time for us
LONG_ANSWER = spec(
    tokens_of(1, 20), sampling={"max_tokens": 1500}, stop=inference_pb2.StopConditions(ignore_eos=True)
)

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="there is one core, and nobody to borrow from"
)


@pytest.fixture(scope="module")
def lending_stack():
    with running_stack("--kv-cache-memory-bytes", "256MiB", "--no-enable-prefix-caching") as stack:
        yield stack


def told(stack, worker_id, finished=0):
    """What the worker says of itself once it has finished so many sequences."""
    while True:
        (worker,) = (each for each in stack.status().workers if each.worker_id == worker_id)
        if worker.finished_sequences >= finished:
            return worker


async def prompts(channel, count):
    """Prompts that need no decode worker, one after the other."""
    for number in range(count):
        await stream(channel, spec(tokens_of(number, 400), sampling={"max_tokens": 1}))


async def test_each_pool_borrows_the_cores_of_the_other_while_that_one_rests(lending_stack):
    async with grpc.aio.insecure_channel(lending_stack.grpc) as channel:
        for _ in range(TRIES):
            await prompts(channel, 1)
            await stream(channel, spec("Once upon a time", sampling={"max_tokens": 60}))
            borrowed = [told(lending_stack, name).borrowed_core_ms for name in ("prefill-0", "decode-0")]
            if all(borrowed):
                return
    pytest.fail(f"borrowed: {borrowed} ms")


async def tokens(channel, answer):
    """Counts them, as they come."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    count = 0
    async for message in stub.GenerateStream(inference_pb2.GenerateStreamRequest(spec=answer), timeout=300):
        for delta in message.deltas:
            count += len(delta.token_ids)
            yield count


async def test_while_an_answer_is_generated_prompts_are_computed_on_their_own_core_alone(lending_stack):
    async with grpc.aio.insecure_channel(lending_stack.grpc) as channel:
        computing = asyncio.Event()

        async def read():
            async for count in tokens(channel, LONG_ANSWER):
                if count > 1:  # the first one may come from the other pool
                    computing.set()

        reading = asyncio.create_task(read())
        await computing.wait()
        finished = told(lending_stack, "prefill-0").finished_sequences
        await prompts(
            channel, 2
        )  # by the second one it has told of the answer's own prompt, if it computed that
        before = told(lending_stack, "prefill-0", finished + 2)
        await prompts(channel, 3)
        after = told(lending_stack, "prefill-0", before.finished_sequences + 3)
        assert not reading.done(), "the answer was to take longer than the prompts"
        await reading
    assert after.borrowed_core_ms == before.borrowed_core_ms
