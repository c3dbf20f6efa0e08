"""What a balancer sees of a gateway: health while workers freeze and compute, and load reports."""

import asyncio
import os
import signal
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from crossdock.mesh.v1 import load_report_pb2
from crossdock.v1 import control_pb2
from tests.e2e.conftest import running_stack, spec, stream, tokens_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
INFERENCE = "crossdock.v1.InferenceService"
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
            async with asyncio.timeout(10):
                while "frozen" not in {each.reason for each in stack.status().workers}:
                    await asyncio.sleep(0.05)
            assert await check(channel, INFERENCE) == SERVING
            answer = await stream(channel, spec("alone", sampling={"max_tokens": 2}))
            assert answer.usage.completion_tokens == 2


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
            assert "frozen" not in {each.reason for each in stack.status().workers}
            await asyncio.wait({answering}, timeout=0.05)
        await answering
        assert not change.done()
        told.cancel()
        await asyncio.wait({change})


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
