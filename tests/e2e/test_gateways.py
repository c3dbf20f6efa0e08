"""`crossdock serve --gateways 2`: two processes on one gRPC port, over the same workers."""

import asyncio
import os
import signal
import socket
from contextlib import AsyncExitStack

import grpc
import pytest

from crossdock.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.conftest import running_stack, spec, stream, tokens_of

CONNECTIONS, TOKENS = 16, 80
ASKED = spec(
    tokens_of(5, 40), sampling={"max_tokens": TOKENS}, stop=inference_pb2.StopConditions(ignore_eos=True)
)
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


@pytest.fixture(scope="module")
def pair(shallow_model):
    """All connections to one of the two: once in 32,768 runs."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    flags = ("--gateways", "2", "--grpc-port", str(port), "--kv-cache-memory-bytes", "64MiB")
    with running_stack(*shallow_model, *flags) as stack:
        yield stack


async def begun(channel):
    """A stream whose first token is here, and that token."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    call = stub.GenerateStream(inference_pb2.GenerateStreamRequest(spec=ASKED), timeout=60)
    return call, token_ids_in(await call.read())


def token_ids_in(message):
    return [token for delta in message.deltas for token in delta.token_ids]


async def rest(call, token_ids):
    """All tokens of a stream, or None where it broke off with its gateway."""
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            token_ids += token_ids_in(message)
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        return None
    return token_ids


async def test_two_gateways_share_a_port_and_one_that_dies_takes_only_its_own_streams_along(pair):
    gateways = pair.gateways()
    assert len(gateways) == 2
    async with AsyncExitStack() as channels:
        dialled = [
            await channels.enter_async_context(grpc.aio.insecure_channel(pair.grpc, OWN_CONNECTION))
            for _ in range(CONNECTIONS)
        ]
        golden = (await stream(dialled[0], ASKED)).token_ids
        calls = await asyncio.gather(*(begun(channel) for channel in dialled))
        os.kill(gateways[1], signal.SIGKILL)
        answers = await asyncio.gather(*(rest(*call) for call in calls))
        assert {None} < {None if each is None else tuple(each) for each in answers} == {None, tuple(golden)}
        again = await asyncio.gather(*(stream(channel, ASKED) for channel in dialled))
        assert all(answer.token_ids == golden for answer in again)
        while len(pair.gateways()) < 2:
            await asyncio.sleep(0.02)
    while len(await asyncio.to_thread(pair.idle_ledgers)) < 2:
        await asyncio.sleep(0.02)  # it asked a gateway that does not know the workers yet
