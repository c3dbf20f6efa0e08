"""Answers that outgrow a decode worker's memory together: given up, resumed, and the same to the bit."""

import asyncio

import grpc
import pytest

from crossdock.v1 import inference_pb2
from tests.e2e.conftest import running_stack, spec, stream, tokens_of

CLIENTS, PROMPT_TOKENS, ANSWER_TOKENS, BLOCKS = 8, 20, 100, 26
"""Eight blocks each at their longest."""


def asked(number):
    sampling = {"max_tokens": ANSWER_TOKENS, "temperature": 0.9 * (number % 2), "seed": number}
    return spec(
        tokens_of(number, PROMPT_TOKENS),
        sampling=sampling,
        stop=inference_pb2.StopConditions(ignore_eos=True),
        output=inference_pb2.OutputOptions(logprobs=2),
        priority=number % 3 - 1,
    )


async def answers(stack):
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        heard = await asyncio.gather(
            *(stream(channel, asked(number), timeout=120) for number in range(CLIENTS))
        )
    return [(answer.token_ids, answer.logprobs) for answer in heard]


@pytest.mark.parametrize("swap_space", ["0", "64MiB"])
async def test_streams_that_outgrow_the_pool_together_are_those_of_a_stack_with_room(exact_stack, swap_space):
    wanted = await answers(exact_stack)
    small = ("--decode-num-gpu-blocks-override", str(BLOCKS), "--swap-space", swap_space)
    with running_stack("--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", *small) as stack:
        assert await answers(stack) == wanted
        ledgers = {ledger.worker_id: ledger for ledger in stack.idle_ledgers()}
    read_again = ledgers["prefill-0"].tokens.computed - CLIENTS * PROMPT_TOKENS
    assert (read_again > 0) == (swap_space == "0"), "what is given back is read again"
    assert not ledgers["decode-0"].owners
