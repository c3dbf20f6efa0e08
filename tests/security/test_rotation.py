"""Keys and certificates are replaced while calls go on: none of them fails, and what was replaced opens nothing."""

import asyncio
import shutil
import signal
import socket
import ssl
from contextlib import asynccontextmanager

import grpc
import pytest

from crossdock.client import AsyncClient, Generation, RequestError
from gateway import api_keys
from tests.security.conftest import secured

LONG = Generation(max_tokens=1500, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def own_stack(tmp_path_factory, authority, shallow_model):
    with secured(tmp_path_factory.mktemp("rotating"), authority, shallow_model) as stack:
        yield stack


def client(stack, key):
    return AsyncClient(stack.said["gateway"]["grpc"], credentials=stack.credentials(key))


@asynccontextmanager
async def under_load(stack, key):
    """Calls one after the other while the block runs, with the key that key() is then. None fails; the key of each
    that has ended is in the list that the block gets."""
    over, done = asyncio.Event(), []

    async def go_on():
        while not over.is_set():
            used = key()
            async with client(stack, used) as each:
                await each.generate([5, 6, 7], Generation(max_tokens=2, temperature=0.0))
            done.append(used)

    callers = [asyncio.create_task(go_on()) for _ in range(4)]
    try:
        yield done
    finally:
        over.set()
        await asyncio.gather(*callers)


async def until_used(key, done, times=1):
    while done.count(key) < times:
        await asyncio.sleep(0.02)


async def until_known(stack, key):
    async with client(stack, key) as each:
        while True:
            try:
                return await each.models()
            except RequestError as refusal:
                assert refusal.code == "UNAUTHENTICATED"
                await asyncio.sleep(0.02)


async def until_unknown(stack, key):
    async with client(stack, key) as each:
        while True:
            try:
                await each.models()
            except RequestError as refusal:
                assert refusal.code == "UNAUTHENTICATED"
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("hurry", [False, True], ids=["watched", "sighup"])
async def test_a_key_is_replaced_under_load_without_a_failed_call(own_stack, hurry):
    """SEC-22."""
    key = old = own_stack.keys["acme"]

    def look_again():
        if hurry:
            own_stack.processes["gateway"].send_signal(signal.SIGHUP)

    async with under_load(own_stack, lambda: key) as done:
        await until_used(old, done)
        new = api_keys.make(own_stack.key_file, "acme")
        look_again()
        await until_known(own_stack, new)
        await until_known(own_stack, old)
        key = new
        for _ in range(2):  # by then whoever had begun with the old one has ended
            done.clear()
            await until_used(new, done, times=4)
        lines = own_stack.key_file.read_text().splitlines(keepends=True)
        own_stack.key_file.write_text("".join(each for each in lines if old.split("_")[1] not in each))
        look_again()
        await until_unknown(own_stack, old)
    own_stack.keys["acme"] = new


async def test_certificates_are_replaced_while_a_stream_goes_on(own_stack):
    """New connections see the new ones, over gRPC and HTTP; the workers' too, and theirs is noticed by nobody."""
    places = {
        "grpc": own_stack.said["gateway"]["grpc"],
        "http": own_stack.said["gateway"]["http"].removeprefix("https://"),
        "worker": own_stack.said["d"]["grpc"],
    }
    before = {name: await asyncio.to_thread(shown, own_stack, place) for name, place in places.items()}
    async with client(own_stack, own_stack.keys["acme"]) as each:
        stream = each.stream([5, 6, 7], LONG)
        tokens = list((await anext(stream)).token_ids)
        renewed = own_stack.authority.issue("renewed")
        shutil.copy(renewed.path, own_stack.server.path)  # for a moment they do not fit together
        await asyncio.sleep(1.5)
        shutil.copy(renewed.key, own_stack.server.key)
        for name, place in places.items():
            while (now := await asyncio.to_thread(shown, own_stack, place)) == before[name]:
                await asyncio.sleep(0.05)
            assert now == ssl.PEM_cert_to_DER_cert(renewed.pem().decode())
        async for delta in stream:
            tokens += delta.token_ids
    assert len(tokens) == LONG.max_tokens
    assert all(process.poll() is None for process in own_stack.processes.values())


def shown(stack, place):
    """The certificate that a new connection is shown."""
    host, _, port = place.rpartition(":")
    context = ssl.create_default_context(cafile=stack.authority.path)
    context.load_cert_chain(stack.client.path, stack.client.key)
    raw = socket.create_connection((host, int(port)), timeout=10)
    with context.wrap_socket(raw, server_hostname="localhost") as connection:
        return connection.getpeercert(binary_form=True)


async def test_a_worker_that_comes_back_under_another_certificate_is_attached_again(own_stack):
    """What the gateway shows its workers is read at each dial."""
    own_stack.processes["d"].terminate()
    await asyncio.to_thread(own_stack.processes["d"].wait, 30)
    host = own_stack.said["d"]["grpc"]
    flags = ("--worker-id=d", *own_stack.engine, f"--listen={host}")
    own_stack.start("d", "decode-worker", *flags, "--kv-listen=tcp://127.0.0.1:0")
    await asyncio.to_thread(own_stack.ready, "d")
    async with client(own_stack, own_stack.keys["acme"]) as each:
        for _ in range(200):
            try:
                answer = await each.generate([5, 6, 7], Generation(max_tokens=5, ignore_eos=True))
            except RequestError as refusal:
                assert refusal.code == grpc.StatusCode.UNAVAILABLE.name
                await asyncio.sleep(0.05)
            else:
                assert len(answer.token_ids) == 5
                return
    raise AssertionError("never attached")
