"""One decode worker process: wires engine, transport, step thread and servicer, and runs them."""

import asyncio
import secrets
import time
from functools import partial

import structlog

from crossdock.worker.v1 import worker_pb2 as pb
from crossdock.worker.v1.worker_pb2_grpc import add_DecodeServiceServicer_to_server
from decode_worker.policy import DecodePolicy
from decode_worker.servicer import DecodeServicer, Response
from decode_worker.worker import DecodeWorker
from engine.assembly import Engine, EngineWishes, assemble
from engine.loop import EngineLoop, InboxFull
from kvtransfer.desk import End, TicketDesk
from kvtransfer.errors import TicketRefused
from kvtransfer.events import TargetEvent
from kvtransfer.identity import Identity
from kvtransfer.target_endpoint import TransferTarget
from kvtransfer.zmq_socket import ZmqOptions
from kvtransfer.zmq_transport import ZmqTargetTransport
from service import server
from service.config import DecodeWorkerOptions
from service.errors import InvalidRequest
from service.machine import bind_to_cores, free_memory_bytes
from service.model_source import resolve_model
from service.orders import OrderLimits
from service.reports import EndCause
from service.worker_process import INBOX_ACTIONS_MAX, WorkerService, crash, serve_worker
from service.worker_rim import PROTOCOL_VERSION, Host, WorkerRim

_REFUSALS = {
    InvalidRequest: EndCause.INVALID,
    TicketRefused: EndCause.TICKET_REFUSED,
    InboxFull: EndCause.EXHAUSTED,
}


def run(options: DecodeWorkerOptions) -> None:
    """Serve until a signal. Raises StartupError or EngineError when it cannot start."""
    bind_to_cores(options.cores)
    policy = DecodePolicy(budget_tokens=options.max_num_batched_tokens, seats=options.max_num_seqs)
    wishes = EngineWishes.of(options, resolve_model(options.model))
    engine = assemble(wishes, policy, memory_bytes=free_memory_bytes())
    if engine.note:
        structlog.get_logger().warning(engine.note)
    server.run(_serve(options, engine, policy))


async def _serve(options: DecodeWorkerOptions, engine: Engine, policy: DecodePolicy) -> None:
    identity = Identity(worker_id=options.worker_id, epoch=secrets.randbits(63))
    rim = WorkerRim(Response, asyncio.get_running_loop())

    def on_transfer(event: TargetEvent) -> None:
        loop.post(partial(worker.on_transfer, event))

    target = TransferTarget(
        identity=identity,
        layout=engine.cache.layout,
        key=options.ticket_key.get_secret_value(),
        transport=ZmqTargetTransport(
            ZmqOptions(block_bytes=engine.cache.layout.block_bytes()),
            options.kv_listen,
            allow_wildcard=options.allow_wildcard_bind,
        ),
        emit=on_transfer,
        clock=time.monotonic,
    )
    worker = DecodeWorker(
        core=engine.core,
        policy=policy,
        cache=engine.cache,
        target=target,
        tell=rim.tell,
        clock=time.monotonic,
        queue_requests_max=options.queue_requests_max,
    )
    loop = EngineLoop(
        engine.core,
        clock=time.monotonic,
        on_step=worker.on_step,
        on_turn=lambda steps: rim.flush(worker.load(steps)),
        on_crash=crash,
        inbox_actions_max=INBOX_ACTIONS_MAX,
    )
    welcome = _welcome(options, engine, identity, target.endpoints())
    host = Host(worker=worker, welcome=welcome, post=loop.post, refusals=_REFUSALS)
    limits = OrderLimits(vocab_size=engine.config.vocab_size, tokens_max=engine.capacity.tokens_max)
    desk = TicketDesk(
        key=options.ticket_key.get_secret_value(),
        identity=identity,
        end=End.TARGET,
        layout_fingerprint=engine.cache.layout.fingerprint(),
        block_size=engine.cache.layout.block_size,
    )
    servicer = DecodeServicer(rim, host, worker, limits, desk)
    target.start()
    loop.start()

    async def stop() -> None:
        await asyncio.to_thread(loop.stop)
        await asyncio.to_thread(target.close)

    service = WorkerService(
        name=pb.DESCRIPTOR.services_by_name["DecodeService"].full_name,
        register=partial(add_DecodeServiceServicer_to_server, servicer),
        rim=rim,
        facts={"worker_id": options.worker_id, "blocks": engine.capacity.num_blocks},
        cleanups=[stop],
    )
    await serve_worker(options, service)


def _welcome(
    options: DecodeWorkerOptions, engine: Engine, identity: Identity, kv_endpoints: tuple[str, ...]
) -> pb.Welcome:
    return pb.Welcome(
        protocol_version=PROTOCOL_VERSION,
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        layout_fingerprint=engine.cache.layout.fingerprint(),
        kv_endpoints=kv_endpoints,
        model_digest=engine.model_digest,
        max_model_len=engine.capacity.max_model_len,
        vocab_size=engine.config.vocab_size,
        block_size=engine.cache.layout.block_size,
        total_blocks=engine.capacity.num_blocks,
        max_num_seqs=options.max_num_seqs,
        eos_token_ids=engine.config.eos_token_ids,
        layout_fields=[
            pb.LayoutField(name=name, value=value) for name, value in engine.cache.layout.fields().items()
        ],
    )
