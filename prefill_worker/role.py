"""What is particular about a prefill worker process: its policy, its end of the hand-off, its service."""

import time
from collections.abc import Callable
from dataclasses import replace

import grpc
import structlog

from crossdock.worker.v1 import worker_pb2 as pb
from crossdock.worker.v1.worker_pb2_grpc import add_PrefillServiceServicer_to_server
from engine.assembly import Engine
from engine.wishes import EngineWishes
from kvtransfer.assembly import TransportWishes, require_allowed, source_limits, source_transport
from kvtransfer.desk import End, TicketDesk
from kvtransfer.events import SourceEvent
from kvtransfer.identity import Identity
from kvtransfer.source_endpoint import TransferSource
from prefill_worker.policy import PrefillPolicy
from prefill_worker.servicer import PrefillServicer
from prefill_worker.worker import PrefillWorker
from service.config import WorkerOptions
from service.guide_compiler import GuideCompiler
from service.orders import OrderLimits
from service.reports import Report, Response
from service.worker_rim import Host, WorkerRim


class PrefillRole:
    service = pb.DESCRIPTOR.services_by_name["PrefillService"].full_name
    end = End.SOURCE
    response: Callable[..., Response] = pb.PrefillServiceAttachResponse
    nice = 5

    def require_allowed(self, options: WorkerOptions) -> None:
        require_allowed(TransportWishes.of(options), options.worker_id)

    def wishes(self, given: EngineWishes, options: WorkerOptions) -> EngineWishes:
        """It generates first tokens only: nothing is worth a recording, and what is drawn is told at once."""
        return replace(given, recorded_rows=0, ahead=given.ahead or False)

    def policy(self, options: WorkerOptions) -> PrefillPolicy:
        return PrefillPolicy(budget_tokens=options.max_num_batched_tokens, seats=options.max_num_seqs)

    def transport(
        self, options: WorkerOptions, engine: Engine, identity: Identity, emit: Callable[[SourceEvent], None]
    ) -> TransferSource:
        layout = engine.cache.layout
        wishes = TransportWishes.of(options, layout.block_bytes(), engine.device)
        return TransferSource(
            identity=identity,
            layout=layout,
            transport=source_transport(wishes, identity),
            emit=emit,
            clock=time.monotonic,
            limits=source_limits(wishes),
            warn=structlog.get_logger().warning,
        )

    def endpoints(self, transport: TransferSource) -> tuple[str, ...]:
        return ()

    def worker(
        self,
        options: WorkerOptions,
        engine: Engine,
        transport: TransferSource,
        tell: Callable[[str, Report], None],
    ) -> PrefillWorker:
        return PrefillWorker(
            core=engine.core,
            cache=engine.cache,
            source=transport,
            tell=tell,
            clock=time.monotonic,
            queue_requests_max=options.queue_requests_max,
            borrowed_s=engine.borrowed_s,
        )

    def register(
        self,
        grpc_server: grpc.aio.Server,
        rim: WorkerRim,
        host: Host,
        worker: PrefillWorker,
        limits: OrderLimits,
        desk: TicketDesk,
        guides: GuideCompiler,
    ) -> None:
        servicer = PrefillServicer(rim, host, worker, limits, desk, guides)
        add_PrefillServiceServicer_to_server(servicer, grpc_server)
