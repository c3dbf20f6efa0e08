"""What a stranger may try from outside: to steer us to other places, to say nothing and never leave."""

import asyncio
import socket
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import grpc
import httpx
import msgpack
import pytest
import zmq
from google.protobuf.internal import api_implementation
from packaging.version import Version

from crossdock.v1 import inference_pb2
from tests.e2e import attacks
from tests.e2e.conftest import resident_bytes, spec, stream, undisturbed
from tests.e2e.listening import listeners, process_tree

SILENT = 500
MEMORY_BYTES_EACH = 128 << 10
ANSWER = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "return_token_ids": True}


@pytest.fixture
def trap():
    """A listener that nobody has a reason to dial."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


def where(trap):
    host, port = trap.getsockname()
    return {"url": f"http://{host}:{port}/x", "endpoint": f"tcp://{host}:{port}", "host": host, "port": port}


def steering(trap):
    """Fields by which other servers could be told where to go or what to give."""
    at = where(trap)
    transfer = {
        "remote_host": at["host"],
        "remote_port": at["port"],
        "remote_engine_id": "d",
        "remote_block_ids": [0, 1, 2],
        "do_remote_prefill": True,
        "tp_size": 1 << 40,
    }
    return {
        "kv_transfer_params": transfer,
        **transfer,
        "bootstrap_host": at["host"],
        "bootstrap_port": at["port"],
        "bootstrap_room": 7,
        "data_parallel_rank": 3,
        "ticket": "x" * 96,
        "worker_id": "decode-0",
        "target_endpoints": [at["endpoint"]],
        "block_ids": [0, 1],
        "request_epoch": 1,
        "tenant": "somebody",
        "cache_scope": "somebody",
        "lora_path": at["url"],
        "image_url": {"url": at["url"]},
        "chat_template": "{{ 1 }}",
        "chat_template_kwargs": {"tokenize": True},
        "prompt_embeds": "gASVAAA=",
    }


def nobody_came(trap):
    with pytest.raises(BlockingIOError):
        trap.accept()


async def test_no_field_over_http_steers_us_anywhere(exact_stack, trap):
    """SEC-08, SEC-20. What we do not know is passed over or refused, and the answer is the same."""
    before = peers(exact_stack)
    async with undisturbed(exact_stack), httpx.AsyncClient(base_url=exact_stack.http, timeout=60) as client:
        right = (await client.post("/v1/completions", json=ANSWER)).json()["choices"][0]["token_ids"]
        for name, value in steering(trap).items():
            said = await client.post("/v1/completions", json=ANSWER | {name: value})
            assert said.status_code in (200, 400), said.text
            if said.status_code == 200:
                assert said.json()["choices"][0]["token_ids"] == right, name
        seen = {
            "messages": [{"role": "user", "content": [steering(trap)["image_url"] | {"type": "image_url"}]}]
        }
        assert (await client.post("/v1/chat/completions", json=seen)).status_code == 400
        nobody_came(trap)
        assert peers(exact_stack) <= before
    exact_stack.idle_ledgers()


async def test_no_metadata_and_no_unknown_field_steers_us_anywhere(exact_stack, trap):
    """SEC-08, SEC-20."""
    at, before = where(trap), peers(exact_stack)
    target = f"{at['host']}:{at['port']}"
    names = ("x-prefiller-host-port", "x-gateway-destination-endpoint", "x-data-parallel-host-port")
    metadata = tuple((name, target) for name in names)
    unknown = b"".join(attacks.unknown_field(number, target.encode()) for number in (1000, 5000, 100_000))
    asked = spec([5, 6, 7], sampling={"max_tokens": 4})
    async with undisturbed(exact_stack), grpc.aio.insecure_channel(exact_stack.grpc) as channel:
        right = (await stream(channel, asked)).token_ids
        strange = inference_pb2.GenerationSpec.FromString(asked.SerializeToString() + unknown)
        call = channel.unary_unary(
            "/crossdock.v1.InferenceService/Generate",
            response_deserializer=inference_pb2.GenerateResponse.FromString,
        )
        request = inference_pb2.GenerateRequest(spec=strange).SerializeToString() + unknown
        answer = await call(request, metadata=metadata, timeout=60)
        assert [list(each.token_ids) for each in answer.outputs] == [right]
        nobody_came(trap)
        assert peers(exact_stack) <= before
    exact_stack.idle_ledgers()


def peers(stack):
    """Addresses beyond this machine, or of ports that none of ours listens on, that our processes are connected to.
    What came to us has one of our own ports on this side."""
    rows = [
        (pid, *line.split()[1:4])
        for pid in process_tree(stack.process.pid)
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        if _owns(pid, line.split()[9])
    ]
    ours = {local.rpartition(":")[2] for _, local, _, state in rows if state == "0A"}
    return {
        there for _, local, there, state in rows if state == "01" and local.rpartition(":")[2] not in ours
    }


def _owns(pid, inode):
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if str(descriptor.readlink()) == f"socket:[{inode}]":
                return True
        except FileNotFoundError:
            continue
    return False


async def test_peers_that_connect_and_never_read_cost_little_and_disturb_nobody(exact_stack):
    """SEC-06, at the gateway."""
    gateway = exact_stack.children()["gateway"]
    before = resident_bytes(gateway)
    async with undisturbed(exact_stack):
        with ExitStack() as silent:
            for listener in listeners([gateway]):
                silent.enter_context(attacks.unread(listener, listener.speaks(), SILENT))
            async with grpc.aio.insecure_channel(exact_stack.grpc) as channel:
                await stream(channel, spec([5, 6, 7], sampling={"max_tokens": 4}))
            assert resident_bytes(gateway) - before < 2 * SILENT * MEMORY_BYTES_EACH
    await asyncio.to_thread(exact_stack.idle_ledgers)


def test_libraries_with_known_holes_are_not_in_use():
    """SEC-23."""
    assert zmq.zmq_version_info() >= (4, 3, 5)
    assert Version(version("msgpack")) >= Version("1.2.1")
    assert Version(version("protobuf")) >= Version("6.31.1")
    assert Version(version("grpcio")) >= Version("1.81.1")


def test_no_slow_fallback_stands_in_for_a_library():
    """SEC-23. They are written in Python, and have limits of their own."""
    assert api_implementation.Type() == "upb"
    assert msgpack.Packer.__module__ == "msgpack._cmsgpack"
    assert zmq.backend.Socket.__module__.startswith("zmq.backend.cython")
