"""Which calls the client makes again, and that none waits for a server that is gone."""

import asyncio
import subprocess
import sys
import threading
from collections import deque

import grpc
import pytest

from crossdock.client import AsyncClient, Client, Generation, RequestError
from crossdock.retries import BACKOFF_S, BACKOFF_S_MAX, JITTER, TRIES_MAX, Retries

SERVER = """
import sys, threading, grpc
from concurrent import futures
from crossdock.v1 import inference_pb2_grpc

class Silent(inference_pb2_grpc.InferenceServiceServicer):
    def Generate(self, request, context):
        print("asked", flush=True)
        threading.Event().wait()

    def GenerateStream(self, request, context):
        yield self.Generate(request, context)

server = grpc.server(futures.ThreadPoolExecutor(8))
inference_pb2_grpc.add_InferenceServiceServicer_to_server(Silent(), server)
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
server.wait_for_termination()
"""


class Failure(grpc.RpcError):
    """As a call raises it."""

    def __init__(self, code=grpc.StatusCode.UNAVAILABLE, **metadata):
        self._code = code
        self._metadata = tuple((name.replace("_", "-"), value) for name, value in metadata.items())

    def code(self):
        return self._code

    def details(self):
        return "not now"

    def trailing_metadata(self):
        return self._metadata


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def retries(clock):
    return Retries(clock, chance=lambda: 0.5)


def test_a_call_that_was_not_taken_up_is_tried_three_times_with_longer_pauses(retries):
    tries, pauses = retries.begin(None), []
    for _ in range(TRIES_MAX - 1):
        tries.left_s()
        pauses.append(tries.pause_s(Failure()))
    assert pauses == [BACKOFF_S, 2 * BACKOFF_S]
    tries.left_s()
    with pytest.raises(RequestError, match="UNAVAILABLE: not now"):
        tries.pause_s(Failure())


def test_pauses_vary_within_bounds():
    low, high = Retries(chance=lambda: 0.0), Retries(chance=lambda: 1.0)
    assert (low.backoff_s(40), high.backoff_s(40)) == pytest.approx(
        (BACKOFF_S_MAX * (1 - JITTER), BACKOFF_S_MAX * (1 + JITTER))
    )


@pytest.mark.parametrize(
    "failure",
    [
        Failure(grpc.StatusCode.INTERNAL),
        Failure(grpc.StatusCode.RESOURCE_EXHAUSTED),
        Failure(grpc.StatusCode.DEADLINE_EXCEEDED),
        Failure(grpc_retry_pushback_ms="-1"),
        Failure(grpc_retry_pushback_ms="soon"),
    ],
)
def test_what_is_final_is_not_tried_again(retries, failure):
    tries = retries.begin(None)
    tries.left_s()
    with pytest.raises(RequestError):
        tries.pause_s(failure)


def test_an_answer_that_has_begun_is_not_asked_for_again(retries):
    tries = retries.begin(None)
    tries.left_s()
    tries.begun()
    with pytest.raises(RequestError):
        tries.pause_s(Failure())


def test_the_server_says_when_to_come_back(retries):
    tries = retries.begin(None)
    tries.left_s()
    assert tries.pause_s(Failure(grpc_retry_pushback_ms="1500")) == 1.5


def test_all_tries_have_one_time_limit(retries, clock):
    tries = retries.begin(2.0)
    assert tries.left_s() == 2.0
    assert tries.pause_s(Failure()) == BACKOFF_S
    clock.now = 1.5
    assert tries.left_s() == 0.5
    with pytest.raises(RequestError):
        tries.pause_s(Failure(grpc_retry_pushback_ms="500"))


def test_a_service_that_keeps_failing_is_asked_once_per_call_until_it_is_well(retries):
    def repeated():
        tries = retries.begin(None)
        tries.left_s()
        try:
            return bool(tries.pause_s(Failure()))
        except RequestError:
            return False

    first = [repeated() for _ in range(60)]
    assert first == [True] * 49 + [False] * 11
    for _ in range(30):
        retries.succeeded()
    assert repeated()


@pytest.fixture
def server():
    """One that takes a call up, says so, and never answers."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        process.address = f"127.0.0.1:{process.stdout.readline().strip()}"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def kill_when_asked(server):
    def kill():
        assert server.stdout.readline() == "asked\n"
        server.kill()
        server.wait()

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.timeout(30)
@pytest.mark.parametrize("timeout_s", [None, 20.0])
@pytest.mark.parametrize("streamed", [True, False])
def test_a_call_ends_when_its_server_is_killed_before_the_first_token(server, streamed, timeout_s):
    killer, how = kill_when_asked(server), Generation(max_tokens=4, timeout_s=timeout_s)
    with Client(server.address) as client, pytest.raises(RequestError, match="UNAVAILABLE"):
        deque(client.stream("x", how), 0) if streamed else client.generate("x", how)
    killer.join()


@pytest.mark.timeout(30)
async def test_an_asyncio_call_ends_when_its_server_is_killed_before_the_first_token(server):
    killer = kill_when_asked(server)
    async with AsyncClient(server.address) as client:
        with pytest.raises(RequestError, match="UNAVAILABLE"):
            async for _ in client.stream("x", Generation(max_tokens=4)):
                pass
    await asyncio.to_thread(killer.join)
