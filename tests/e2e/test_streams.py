"""Many streams, ended ones, cancelled ones, late ones: all complete, and nothing is left behind."""

import asyncio
import random

import grpc
import httpx
import pytest

from crossdock.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.conftest import spec, stream, tokens_of

NO_EOS = inference_pb2.StopConditions(ignore_eos=True)


async def test_32_streams_of_mixed_lengths_complete_and_every_ledger_is_empty_again(exact_stack):
    sizes = [(random.Random(n).randrange(1, 220), random.Random(-n).randrange(1, 40)) for n in range(32)]
    async with grpc.aio.insecure_channel(exact_stack.grpc) as channel:
        answers = await asyncio.gather(
            *(
                stream(channel, spec(tokens_of(n, length), sampling={"max_tokens": count}, stop=NO_EOS))
                for n, (length, count) in enumerate(sizes)
            )
        )
    assert [len(answer.token_ids) for answer in answers] == [count for _, count in sizes]
    for ledger in exact_stack.idle_ledgers():
        assert ledger.free_blocks + ledger.cached_blocks == ledger.total_blocks


def test_work_spreads_over_all_workers(wide_stack):
    first = wide_stack.first_finished
    assert set(first) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert all(count >= 4 for count in first.values()), first


def finished(stack):
    """Sequences, by worker."""
    return {worker.worker_id: worker.finished_sequences for worker in stack.status().workers}


async def test_an_answer_of_one_token_is_one_token_and_involves_one_worker_alone(exact_stack):
    """Whichever of the two is sooner; what is handed over is finished by both."""
    before = finished(exact_stack)
    async with grpc.aio.insecure_channel(exact_stack.grpc) as channel:
        answer = await stream(channel, spec("The sky is", sampling={"max_tokens": 1}))
    while finished(exact_stack) == before:
        continue  # workers report a little later
    exact_stack.idle_ledgers()  # with its books each worker says how it stands
    after = finished(exact_stack)
    assert len(answer.token_ids) == 1
    assert answer.finish.reason == inference_pb2.FINISH_REASON_LENGTH
    assert sorted(after[name] - before[name] for name in after) == [0, 1]


@pytest.mark.parametrize("messages_read", [0, 1, 5])
async def test_a_cancelled_stream_frees_both_workers(exact_stack, messages_read):
    async with grpc.aio.insecure_channel(exact_stack.grpc) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        wanted = spec(tokens_of(3, 600), sampling={"max_tokens": 2000}, stop=NO_EOS)
        call = stub.GenerateStream(inference_pb2.GenerateStreamRequest(spec=wanted))
        for _ in range(messages_read):
            await call.read()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
    exact_stack.idle_ledgers()


async def test_a_deadline_ends_the_stream_and_frees_both_workers(exact_stack):
    async with grpc.aio.insecure_channel(exact_stack.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            wanted = spec(tokens_of(4, 60), sampling={"max_tokens": 4000}, stop=NO_EOS)
            await stream(channel, wanted, timeout=1.0)
    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    exact_stack.idle_ledgers()


async def test_a_vanished_http_client_frees_both_workers(exact_stack):
    body = {"prompt": tokens_of(5, 30), "max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient() as client,
        client.stream("POST", f"{exact_stack.http}/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        await anext(response.aiter_lines())
    exact_stack.idle_ledgers()
