"""What a balancer sees of a gateway: health while workers freeze and compute, and load reports."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from crossdock.mesh.v1 import load_report_pb2
from crossdock.v1 import control_pb2, control_pb2_grpc
from gateway import worker_pool
from service import pulse, worker_rim
from tests.e2e.conftest import (
    CONTROL_TOKEN,
    OPERATOR,
    ROOT,
    running_stack,
    said_when_ready,
    spec,
    stream,
    tokens_of,
)
from tests.fakes.raw_peer import raw_peer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
INFERENCE = "crossdock.v1.InferenceService"
DECODE = "crossdock.worker.v1.DecodeService"
VLLM = "vllm.grpc.engine.VllmEngine"


@pytest.fixture(scope="module")
def stack():
    """One worker of each role, for being frozen. A prompt is computed in one long step."""
    flags = ("--kv-cache-memory-bytes", "256MiB", "--max-num-batched-tokens", "2048")
    with running_stack(*flags) as running:
        yield running


@contextmanager
def frozen(stack, name):
    pid = stack.children()[name]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def watch(channel, service):
    return health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(service=service), timeout=60
    )


class Held:
    """One worker of each role and a gateway. The step thread of the decode worker can be held."""

    def __init__(self, model):
        secret = {"CROSSDOCK_TICKET_KEY": secrets.token_hex(32), "CROSSDOCK_CONTROL_TOKEN": CONTROL_TOKEN}
        self._environ, self.processes, self.at = os.environ | secret, {}, {}
        worker = (*model, "--num-gpu-blocks-override=64", "--listen=127.0.0.1:0", "--shutdown-timeout=1")
        self._start("p", "commands.main", "prefill-worker", "--worker-id=p", *worker)
        kv = "--kv-listen=tcp://127.0.0.1:0"
        self._start("d", "tests.fakes.held_worker", "decode-worker", "--worker-id=d", *worker, kv)
        workers = (f"--prefill-workers={self._ready('p')}", f"--decode-workers={self._ready('d')}")
        ports = ("--grpc-port=0", "--http-port=0", "--shutdown-timeout=1")
        self._start("gateway", "commands.main", "gateway", *workers, *ports)
        self._ready("gateway")

    def toggle(self):
        """Hold the thread, or let it go."""
        print(file=self.processes["d"].stdin, flush=True)

    def end(self):
        """All must, on one SIGTERM."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.communicate(timeout=60)

    def _start(self, name, module, *words):
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=ROOT,
            env=self._environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ready(self, name):
        self.at[name] = said_when_ready(self.processes[name])["grpc"]
        return self.at[name]


@pytest.fixture
def held(shallow_model):
    held = Held(shallow_model)
    try:
        yield held
    finally:
        held.end()


@asynccontextmanager
async def unread(address, service):
    """Somebody who watches and takes nothing of it."""
    async with raw_peer(int(address.rpartition(":")[2]), window_bytes=0) as peer:
        request = health_pb2.HealthCheckRequest(service=service)
        peer.open("/grpc.health.v1.Health/Watch", request.SerializeToString())
        await peer.until(lambda: peer.begun)
        yield


def reasons(stack):
    return {each.reason for each in stack.status().workers}


async def until(holds):
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.05)


async def check(channel, service):
    request = health_pb2.HealthCheckRequest(service=service)
    return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)).status


async def test_a_gateway_without_a_worker_that_generates_is_not_serving_long_before_it_is_lost(stack):
    name = "decode-0"
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        told = watch(channel, INFERENCE)
        while (await told.read()).status != SERVING:
            pass
        with frozen(stack, name):
            assert (await told.read()).status == NOT_SERVING
            (state,) = {each.state for each in stack.status().workers}
            assert state == control_pb2.WORKER_STATE_READY, "its stream has not broken yet"
            assert [each.worker_id for each in stack.status().workers if each.reason == "frozen"] == [name]
            assert await check(channel, "readiness") == await check(channel, VLLM) == NOT_SERVING
            assert await check(channel, "") == await check(channel, "crossdock.v1.ControlService") == SERVING
        assert (await told.read()).status == SERVING
        assert (await stream(channel, spec("again", sampling={"max_tokens": 2}))).usage.completion_tokens == 2
        told.cancel()


async def test_a_gateway_whose_only_prefill_worker_is_frozen_serves_without_it(stack):
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        with frozen(stack, "prefill-0"):
            await until(lambda: "frozen" in reasons(stack))
            assert await check(channel, INFERENCE) == SERVING
            answer = await stream(channel, spec("alone", sampling={"max_tokens": 2}))
            assert answer.usage.completion_tokens == 2
        await until(lambda: "frozen" not in reasons(stack))


async def test_a_gateway_stays_serving_while_a_worker_computes_one_long_step(stack):
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        told = watch(channel, INFERENCE)
        assert (await told.read()).status == SERVING
        change = asyncio.ensure_future(told.read())
        answers = [
            stream(channel, spec(tokens_of(seed, 2000), sampling={"max_tokens": 3})) for seed in (1, 2)
        ]
        answering = asyncio.gather(*answers)
        while not answering.done():
            assert "frozen" not in reasons(stack)
            await asyncio.wait({answering}, timeout=0.05)
        await answering
        assert not change.done()
        told.cancel()
        await asyncio.wait({change})


def test_what_stands_still_is_known_within_a_second():
    """All that there is to wait for: what a step thread does not answer, and what nobody says."""
    asked = pulse.Pulse(lambda action: None, processor_ns=lambda: 0, starved=lambda: False)
    looks = next(look for look in range(1, 1000) if asked.frozen())
    assert looks * pulse.LOOK_INTERVAL_S + worker_rim.LOAD_INTERVAL_S <= 0.8
    silence = pulse.Stillness(worker_pool.SILENT_LOOKS_MAX)
    silence.look(moved=True)
    looks = 1 + next(look for look in range(1, 1000) if silence.look(moved=False))
    assert looks * worker_pool.LOOK_INTERVAL_S <= 0.8
    said_s = worker_rim.LOAD_INTERVALS_MAX * worker_rim.LOAD_INTERVAL_S
    assert 3 * said_s < looks * worker_pool.LOOK_INTERVAL_S, "who is only late is not frozen"


async def test_a_step_thread_that_stands_still_is_told_by_its_worker_and_the_gateway_whoever_watches(held):
    """Its process goes on all the while."""
    decode, gateway = held.at["d"], held.at["gateway"]
    async with (
        grpc.aio.insecure_channel(decode) as to_worker,
        grpc.aio.insecure_channel(gateway) as to_gateway,
        unread(decode, DECODE),
        unread(gateway, INFERENCE),
        unread(gateway, ""),
    ):
        watches = [watch(to_worker, DECODE), watch(to_gateway, INFERENCE)]
        assert [(await each.read()).status for each in watches] == [SERVING, SERVING]
        for state in (NOT_SERVING, SERVING):
            held.toggle()
            assert [(await each.read()).status for each in watches] == [state, state]
            assert await check(to_worker, "") == await check(to_gateway, "") == SERVING
            request = control_pb2.GetStatusRequest()
            seen = await control_pb2_grpc.ControlServiceStub(to_gateway).GetStatus(request, metadata=OPERATOR)
            frozen = {each.worker_id for each in seen.workers if each.reason == "frozen"}
            assert frozen == ({"d"} if state == NOT_SERVING else set())
        assert (
            await stream(to_gateway, spec("again", sampling={"max_tokens": 2}))
        ).usage.completion_tokens == 2
        await asyncio.to_thread(held.end)


async def test_a_stream_beside_the_calls_says_how_busy_a_gateway_is(stack):
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        await stream(channel, spec("The", sampling={"max_tokens": 3}))
        call = channel.unary_stream(
            "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics",
            request_serializer=load_report_pb2.OrcaLoadReportRequest.SerializeToString,
            response_deserializer=load_report_pb2.OrcaLoadReport.FromString,
        )(load_report_pb2.OrcaLoadReportRequest(), timeout=30)
        report = await call.read()
        assert report.rps_fractional > 0
        assert set(report.utilization) == {"prefill", "decode", "requests"}
        assert 0 <= report.named_metrics["kv_cache_usage"] < 1
        call.cancel()
