"""How busy this process is, for gRPC clients and meshes that balance by it (ORCA, gRFC A51 and A58).

A report goes into the trailer of a call, and to whoever keeps a stream for it, which is what clients of long answers
need. The process says what its load is; here is only how it is told. Keeps no numbers but the rate of calls.
"""

import asyncio
from collections.abc import Callable, Mapping
from math import exp
from typing import Any

import grpc

from crossdock.mesh.v1 import load_report_pb2 as pb
from service.load import WorkerLoad

SERVICE = "xds.service.orca.v3.OpenRcaService"
TRAILER_KEY = "endpoint-load-metrics-bin"
INTERVAL_S = 1.0
INTERVAL_MIN_S = 0.1
RATE_WINDOW_S = 10.0


def load_report(
    *, shares: Mapping[str, float], counts: Mapping[str, float], calls: float = 0.0, failures: float = 0.0
) -> pb.OrcaLoadReport:
    """shares: used of what there is, 1 is all of it; the largest stands for the whole. calls, failures: per second."""
    return pb.OrcaLoadReport(
        utilization=shares,
        named_metrics=counts,
        rps_fractional=calls,
        eps=failures,
        application_utilization=max(shares.values(), default=0.0),
    )


def worker_report(load: WorkerLoad, seats: int) -> pb.OrcaLoadReport:
    """seats: sequences that the worker computes at once."""
    used = 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
    sequences = load.running_sequences + load.waiting_sequences
    return load_report(
        shares={"kv_cache": used, "seats": sequences / seats},
        counts={
            "kv_cache_usage": used,
            "num_requests_running": load.running_sequences,
            "num_requests_waiting": load.waiting_sequences,
            "waiting_tokens": load.waiting_tokens,
        },
    )


class Rate:
    """Events per second, over the last RATE_WINDOW_S or so. Times in seconds, monotonic."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._counted = 0.0

    def count(self, now: float) -> None:
        self._rate = self.at(now) + 1 / RATE_WINDOW_S
        self._counted = now

    def at(self, now: float) -> float:
        return self._rate * exp((self._counted - now) / RATE_WINDOW_S)


class OpenRca(grpc.GenericRpcHandler):
    """The service of out-of-band reports. report: makes the one of now."""

    def __init__(self, report: Callable[[], pb.OrcaLoadReport]) -> None:
        self._report = report
        self._ended = asyncio.Event()

    def service(self, call: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        if call.method != f"/{SERVICE}/StreamCoreMetrics":
            return None
        return grpc.unary_stream_rpc_method_handler(
            self._stream,
            request_deserializer=pb.OrcaLoadReportRequest.FromString,
            response_serializer=pb.OrcaLoadReport.SerializeToString,
        )

    def end(self) -> None:
        """Ends every stream: they would keep the server from ending."""
        self._ended.set()

    async def _stream(
        self, request: pb.OrcaLoadReportRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        asked_s = request.report_interval.ToMilliseconds() / 1000
        interval_s = max(INTERVAL_MIN_S, asked_s) if request.HasField("report_interval") else INTERVAL_S
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            while not ended.done():
                await context.write(self._report())
                await asyncio.wait({ended}, timeout=interval_s)
        finally:
            ended.cancel()
