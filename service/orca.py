"""How busy this process is, for gRPC clients and meshes that balance by it (ORCA, gRFC A51 and A58).

A report goes into the trailer of a call, and to whoever keeps a stream for it, which is what clients of long answers
need. The process says what its load is; here is only how it is told, and that no number of streams makes it cost more
than a report a second. Keeps no numbers but the rate of calls.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import exp
from typing import Any

import grpc

from crossdock.mesh.v1 import load_report_pb2 as pb
from service.bounded_calls import BoundedCalls
from service.load import WorkerLoad
from service.patience import tell

SERVICE = "xds.service.orca.v3.OpenRcaService"
TRAILER_KEY = "endpoint-load-metrics-bin"
INTERVAL_MIN_S = 1.0
STREAMS_MAX = 256
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
    """The service of out-of-band reports. report: makes the one of now. interval_min_s: between two of them, whatever
    is asked for; it is also what who asks for none gets."""

    def __init__(
        self, report: Callable[[], pb.OrcaLoadReport], interval_min_s: float = INTERVAL_MIN_S
    ) -> None:
        self._report = report
        self._interval_min_s = interval_min_s
        self._streams = BoundedCalls(STREAMS_MAX)
        self._tick, self._latest = -1, b""
        self._ended = asyncio.Event()

    def service(self, call: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        if call.method != f"/{SERVICE}/StreamCoreMetrics":
            return None
        return grpc.unary_stream_rpc_method_handler(
            self._stream, request_deserializer=pb.OrcaLoadReportRequest.FromString
        )

    def end(self) -> None:
        """Ends every stream: they would keep the server from ending."""
        self._ended.set()

    async def _stream(
        self, request: pb.OrcaLoadReportRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        interval_s = max(self._interval_min_s, request.report_interval.ToMilliseconds() / 1000)
        await context.send_initial_metadata(())
        async with self._streams.room(context.peer()):
            while not self._ended.is_set():
                await tell(context, self._report_of_now())
                with suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await self._ended.wait()

    def _report_of_now(self) -> bytes:
        """The same for all streams until the next tick."""
        tick = int(asyncio.get_running_loop().time() / self._interval_min_s)
        if tick != self._tick:
            self._tick, self._latest = tick, self._report().SerializeToString()
        return self._latest
