"""Load reports as gRPC clients and meshes read them."""

import asyncio
import json
from contextlib import asynccontextmanager

import grpc
import pytest

from crossdock.mesh.v1 import load_report_pb2 as pb
from service.guard import Guard
from service.load import WorkerLoad
from service.orca import RATE_WINDOW_S, TRAILER_KEY, OpenRca, Rate, load_report, worker_report
from service.server import bind, create_server

STREAM = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"
BALANCED = json.dumps({"loadBalancingConfig": [{"weighted_round_robin": {"blackoutPeriod": "0s"}}]})


class Echo(grpc.GenericRpcHandler):
    """Counts its calls, and says at the end of each how busy it is."""

    def __init__(self, busy):
        self.calls, self.report = 0, load_report(shares={"requests": busy}, counts={}, calls=10)

    def service(self, call):
        return grpc.unary_unary_rpc_method_handler(self.answer) if call.method == "/test.Echo/Call" else None

    async def answer(self, request, context):
        self.calls += 1
        context.set_trailing_metadata(((TRAILER_KEY, self.report.SerializeToString()),))
        return request


@asynccontextmanager
async def serving(*handlers):
    server = create_server([Guard(lambda call: None)])
    server.add_generic_rpc_handlers(handlers)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def stream_of(channel):
    return channel.unary_stream(
        STREAM,
        request_serializer=pb.OrcaLoadReportRequest.SerializeToString,
        response_deserializer=pb.OrcaLoadReport.FromString,
    )


def numbered(number):
    return load_report(shares={"seats": 0.5}, counts={"number": number})


def asked(milliseconds):
    request = pb.OrcaLoadReportRequest()
    request.report_interval.FromMilliseconds(milliseconds)
    return request


async def test_reports_come_out_of_band_until_the_process_ends():
    numbers = iter(range(100))
    open_rca = OpenRca(lambda: numbered(next(numbers)), interval_min_s=0.1)
    async with serving(open_rca) as address, grpc.aio.insecure_channel(address) as channel:
        call = stream_of(channel)(asked(100), timeout=20)
        for number in range(3):
            report = await call.read()
            assert dict(report.named_metrics) == {"number": number}
            assert report.application_utilization == 0.5
        open_rca.end()
        assert await call.read() is grpc.aio.EOF


async def test_however_many_streams_ask_however_often_there_is_one_report_for_a_tick():
    made = []
    open_rca = OpenRca(lambda: made.append(1) or numbered(len(made)), interval_min_s=3600)
    async with serving(open_rca) as address, grpc.aio.insecure_channel(address) as channel:
        calls = [stream_of(channel)(asked(1), timeout=20) for _ in range(100)]
        assert {(await call.read()).named_metrics["number"] for call in calls} <= {1, 2}
        assert len(made) <= 2, "the second only where a tick ends meanwhile"
        seconds = [asyncio.ensure_future(call.read()) for call in calls]
        open_rca.end()
        assert {await second for second in seconds} == {grpc.aio.EOF}, (
            "whoever asks for 1 ms gets no second one"
        )


async def test_of_streams_there_is_a_bound(monkeypatch):
    monkeypatch.setattr("service.orca.STREAMS_MAX", 3)
    open_rca = OpenRca(lambda: numbered(1), interval_min_s=3600)
    async with serving(open_rca) as address, grpc.aio.insecure_channel(address) as channel:
        calls = []
        for _ in range(5):
            calls.append(stream_of(channel)(asked(1000), timeout=20))
            assert (await calls[-1].read()).named_metrics["number"] == 1
        for call in calls[:2]:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not any(call.done() for call in calls[2:])


async def test_grpc_itself_sends_more_calls_to_whoever_reports_less_load():
    idle, busy = Echo(0.1), Echo(0.9)
    async with serving(idle) as one, serving(busy) as two:
        options = [("grpc.service_config", BALANCED)]
        async with grpc.aio.insecure_channel(f"ipv4:{one},{two}", options=options) as channel:
            call = channel.unary_unary("/test.Echo/Call")
            while idle.calls + busy.calls < 400 or not (idle.calls and busy.calls):
                await call(b"", timeout=10)
                await asyncio.sleep(0.005)  # weights are looked at once a second
    assert idle.calls > 1.5 * busy.calls


def test_a_worker_is_as_busy_as_what_is_scarcest_in_it():
    load = WorkerLoad(
        running_sequences=2, waiting_sequences=4, waiting_tokens=70, free_blocks=30, total_blocks=40
    )
    report = worker_report(load, seats=8)
    assert dict(report.utilization) == {"kv_cache": 0.25, "seats": 0.75}
    assert report.application_utilization == 0.75
    assert report.named_metrics["kv_cache_usage"] == 0.25
    assert (report.named_metrics["num_requests_waiting"], report.named_metrics["waiting_tokens"]) == (4, 70)
    assert worker_report(WorkerLoad(), seats=8).application_utilization == 0


def test_a_rate_settles_at_what_comes_per_second_and_fades_when_nothing_does():
    rate = Rate()
    for tick in range(1000):
        rate.count(tick / 5)
    assert rate.at(200) == pytest.approx(5, rel=0.05)
    assert rate.at(200 + 10 * RATE_WINDOW_S) < 0.01
