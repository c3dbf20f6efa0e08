"""What is particular about a decode worker process: its policy, its end of the hand-off, its service."""

import secrets
import time
from collections.abc import Callable
from dataclasses import replace

import grpc

from crossdock.worker.v1 import worker_pb2 as pb
from crossdock.worker.v1.worker_pb2_grpc import add_DecodeServiceServicer_to_server
from decode_worker.policy import DecodePolicy
from decode_worker.servicer import DecodeServicer
from decode_worker.worker import DecodeWorker
from engine.assembly import Engine
from engine.wishes import EngineWishes
from kvtransfer.assembly import TransportWishes, require_allowed, target_transport
from kvtransfer.desk import End, TicketDesk
from kvtransfer.events import TargetEvent
from kvtransfer.identity import Identity
from kvtransfer.target_endpoint import TransferTarget
from service.config import DecodeWorkerOptions, WorkerOptions
from service.guide_compiler import GuideCompiler
from service.orders import OrderLimits
from service.reports import Response, Told
from service.worker_rim import Host, WorkerRim


class DecodeRole:
    service = pb.DESCRIPTOR.services_by_name["DecodeService"].full_name
    end = End.TARGET
    response: Callable[..., Response] = pb.DecodeServiceAttachResponse
    nice = 0

    def require_allowed(self, options: DecodeWorkerOptions) -> None:
        wishes = TransportWishes.of(options, advertised=options.kv_advertise)
        require_allowed(wishes, options.worker_id, options.kv_listen)

    def wishes(self, given: EngineWishes, options: WorkerOptions) -> EngineWishes:
        return replace(given, recorded_rows=0 if options.enforce_eager else options.max_num_seqs)

    def policy(self, options: WorkerOptions) -> DecodePolicy:
        return DecodePolicy(budget_tokens=options.max_num_batched_tokens, seats=options.max_num_seqs)

    def transport(
        self,
        options: DecodeWorkerOptions,
        engine: Engine,
        identity: Identity,
        emit: Callable[[TargetEvent], None],
    ) -> TransferTarget:
        layout = engine.cache.layout
        wishes = TransportWishes.of(options, layout.block_bytes(), engine.device, options.kv_advertise)
        return TransferTarget(
            identity=identity,
            layout=layout,
            key=options.ticket_key.get_secret_value(),
            transport=target_transport(wishes, identity, options.kv_listen, secrets.token_bytes),
            emit=emit,
            clock=time.monotonic,
        )

    def endpoints(self, transport: TransferTarget) -> tuple[str, ...]:
        return transport.endpoints()

    def worker(
        self,
        options: WorkerOptions,
        engine: Engine,
        transport: TransferTarget,
        tell: Callable[[str, Told], None],
    ) -> DecodeWorker:
        return DecodeWorker(
            core=engine.core,
            policy=self.policy(options),
            cache=engine.cache,
            target=transport,
            vocab_size=engine.config.vocab_size,
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
        worker: DecodeWorker,
        limits: OrderLimits,
        desk: TicketDesk,
        guides: GuideCompiler,
    ) -> None:
        servicer = DecodeServicer(rim, host, worker, limits, desk, guides)
        add_DecodeServiceServicer_to_server(servicer, grpc_server)
