"""One worker process of either role: wires engine, transport, step thread and servicer, and runs them.

The one place where all of a worker's parts are known together. What is particular about a role is in its package's
`role.py`; here nothing asks which one it is.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc
import structlog

from commands.ranks import cores_of, following, threads_of
from crossdock.worker.v1 import worker_pb2 as pb
from engine.assembly import Engine, assemble
from engine.cache.copying import Copying
from engine.cache.kv_cache import KVCache
from engine.kernels.core_share import CoreShare
from engine.loop import EngineLoop, InboxFull
from engine.policy import Policy
from engine.progress import Progress
from engine.results import StepResult
from engine.wishes import EngineWishes
from kvtransfer.counters import COMMITTED_OVER
from kvtransfer.desk import End, TicketDesk
from kvtransfer.errors import TicketRefused
from kvtransfer.identity import Identity
from kvtransfer.ticket import key_check
from service import readiness, server, worker_rim
from service.config import WorkerOptions
from service.core_board import CoreBoard
from service.errors import InvalidRequest
from service.guide_compiler import GuideCompiler
from service.guides import GuideRefused
from service.machine import (
    KEPT_BYTES,
    bind_to_cores,
    compute_in_long_slices,
    free_memory_bytes,
    give_way,
    keep_freed_memory,
    take_short_turns,
)
from service.model_source import resolve_model
from service.orders import OrderLimits
from service.pulse import DEVICE_LOOKS_MAX, STILL_LOOKS_MAX, EngineThreads, Pulse, other_threads
from service.read_vocabulary import read_vocabulary
from service.reports import EndCause, Response, Told
from service.worker_counts import TRANSFER_BYTES, TRANSFER_EVENTS, TRANSFERS
from service.worker_process import (
    INBOX_ACTIONS_MAX,
    WorkerService,
    crash,
    crash_with_any_thread,
    require_servable,
    serve_worker,
)
from service.worker_rim import PROTOCOL_VERSION, Host, WorkerRim
from tensor_parallel.followers import ProcessFollowers

LEFT_FREE_BYTES = 1 << 30
"""Of memory that a worker does not take before it needs it."""

_REFUSALS = {
    InvalidRequest: EndCause.INVALID,
    TicketRefused: EndCause.TICKET_REFUSED,
    InboxFull: EndCause.EXHAUSTED,
    GuideRefused: EndCause.GUIDE_FAILED,
}


class Transport(Protocol):
    """A worker's end of the hand-off."""

    def start(self) -> None: ...
    def close(self) -> None: ...
    def counters(self) -> Mapping[str, int]: ...


class Worker(worker_rim.Worker, Protocol):
    """What a role does, on the step thread."""

    def on_step(self, result: StepResult) -> None: ...
    def on_transfer(self, event: Any) -> None: ...
    def counts(self) -> Mapping[str, int]:
        """Since the start, by the names of `service.worker_counts`. Any thread."""
        ...


_Options = TypeVar("_Options", bound=WorkerOptions)
_Options_contra = TypeVar("_Options_contra", bound=WorkerOptions, contravariant=True)


class Role(Protocol[_Options_contra]):
    """What is particular about a role. service: full name of its gRPC service; response: its stream's message. nice:
    how far those of its threads that compute make way for all others of its machine."""

    service: str
    end: End
    response: Callable[..., Response]
    nice: int

    def require_allowed(self, options: _Options_contra) -> None:
        """Raises TransferError for what can be told of the transport before there is an engine."""
        ...

    def wishes(self, given: EngineWishes, options: _Options_contra) -> EngineWishes:
        """As far as they depend on what this role does."""
        ...

    def policy(self, options: _Options_contra) -> Policy: ...

    def transport(
        self, options: _Options_contra, engine: Engine, identity: Identity, emit: Callable[[Any], None]
    ) -> Transport: ...

    def endpoints(self, transport: Any) -> tuple[str, ...]:
        """Where hand-offs are received."""
        ...

    def worker(
        self, options: _Options_contra, engine: Engine, transport: Any, tell: Callable[[str, Told], None]
    ) -> Worker: ...

    def register(
        self,
        grpc_server: grpc.aio.Server,
        rim: WorkerRim,
        host: Host,
        worker: Any,
        limits: OrderLimits,
        desk: TicketDesk,
        guides: GuideCompiler,
    ) -> None: ...


def run(options: _Options, role: Role[_Options]) -> None:
    """Serve until a signal. Raises StartupError, EngineError or TransferError when it cannot start, before it loads the
    model if that can be told; RankLost is no reason not to be started again."""
    require_servable(options)
    role.require_allowed(options)
    board = None if options.core_board is None else CoreBoard.open(options.core_board)
    model = resolve_model(options.model)
    with following(options, model, role.nice, crash) as followers:
        _run(options, role, model, board, followers)


def _run(
    options: _Options,
    role: Role[_Options],
    model: Path,
    board: CoreBoard | None,
    followers: ProcessFollowers | None,
) -> None:
    wishes = role.wishes(_wishes(options, model, followers), options)
    sole = board is not None and board.sole(options.core_seat)
    computes = partial(_compute_behind, role.nice, sole=sole)
    progress = Progress(readiness.loading, time.monotonic)
    before = other_threads()
    # The threads that compute are begun by the one that assembles, and make way as it does.
    computing = ThreadPoolExecutor(1, initializer=computes)
    with computing, ThreadPoolExecutor(1) as reading:
        assembling = computing.submit(
            assemble,
            wishes,
            role.policy(options),
            memory_bytes=int(free_memory_bytes() * options.host_memory_share),
            progress=progress,
            followers=followers,
        )
        vocabulary = reading.submit(read_vocabulary, model)
        engine = assembling.result()
    helpers = other_threads() - before
    if followers is not None:
        helpers = (helpers - followers.group_threads) | set(followers.threads)
    engine_threads = EngineThreads(helpers)
    guides = GuideCompiler(vocabulary.result, engine.config.vocab_size)
    with suppress(GuideRefused):  # then each guided request is refused so
        guides.load()
    keep_freed_memory(KEPT_BYTES)
    take_short_turns()
    if engine.note:
        structlog.get_logger().warning(engine.note)
    if options.max_model_len is not None and engine.capacity.tokens_max < options.max_model_len:
        shorter = f"requests have at most {engine.capacity.tokens_max} tokens: more do not fit the KV blocks"
        structlog.get_logger().warning(shorter, max_model_len=options.max_model_len)

    def begin() -> None:
        computes()
        bind_to_cores(wishes.cores.own)

    server.run(_serve(options, role, engine, board, guides, engine_threads, begin))


def _wishes(options: WorkerOptions, model: Path, followers: ProcessFollowers | None) -> EngineWishes:
    if followers is None:
        cores = CoreShare(own=options.cores or (), board=options.core_board, seat=options.core_seat)
        return EngineWishes.of(options, model, cores)
    # What one rank borrows would shorten no step: it waits for the others.
    share, all_cores = followers.collective.share, options.cores or ()
    wishes = EngineWishes.of(options, model, CoreShare(own=cores_of(all_cores, share)))
    return replace(wishes, threads=threads_of(options.threads, all_cores, share))


async def _serve(
    options: _Options,
    role: Role[_Options],
    engine: Engine,
    board: CoreBoard | None,
    guides: GuideCompiler,
    engine_threads: EngineThreads,
    begin: Callable[[], None],
) -> None:
    """begin: what the step thread does first."""
    identity = Identity(worker_id=options.worker_id, epoch=secrets.randbits(63))
    rim = WorkerRim(role.response, asyncio.get_running_loop())

    def on_transfer(event: object) -> None:
        loop.insist(partial(worker.on_transfer, event))

    transport = role.transport(options, engine, identity, on_transfer)
    worker = role.worker(options, engine, transport, rim.tell)
    index = engine.core.pool.index

    def on_start() -> None:
        engine_threads.start()
        engine.enter()
        begin()

    loop = EngineLoop(
        engine.core,
        clock=time.monotonic,
        on_step=worker.on_step,
        on_turn=lambda steps: rim.flush(worker.load(steps), index.changes()),
        on_crash=crash,
        on_start=on_start,
        on_compute=_nothing if board is None else partial(board.compute, options.core_seat),
        on_rest=_nothing if board is None else partial(board.rest, options.core_seat),
        chore=partial(_take_memory, engine.cache),
        inbox_actions_max=INBOX_ACTIONS_MAX,
    )
    # Until its first action it would pass for one without a free block.
    rim.flush(worker.load(0))
    crash_with_any_thread()
    transport.start()
    copying = _copying(engine, loop)
    loop.start()

    async def stop() -> None:
        await asyncio.to_thread(loop.stop)
        await asyncio.to_thread(copying.stop)
        await asyncio.to_thread(transport.close)

    looks_max = STILL_LOOKS_MAX if engine.device == "cpu" else DEVICE_LOOKS_MAX
    welcome = _welcome(options, engine, identity, role.endpoints(transport))
    host = Host(worker=worker, welcome=welcome, post=loop.post, insist=loop.insist, refusals=_REFUSALS)
    limits = OrderLimits(vocab_size=engine.config.vocab_size, tokens_max=engine.capacity.tokens_max)
    desk = _desk(options, role, engine, identity)
    service = WorkerService(
        name=role.service,
        register=lambda grpc_server: role.register(grpc_server, rim, host, worker, limits, desk, guides),
        rim=rim,
        facts={
            "worker_id": options.worker_id,
            "blocks": engine.capacity.num_blocks,
            "tokens": engine.capacity.tokens,
            "tokens_max": engine.capacity.tokens_max,
            "full_requests": engine.capacity.full_requests(),
        },
        cleanups=[stop],
        pulse=Pulse(loop.insist, engine_threads.used_ns, engine_threads.starved, looks_max),
        counts=lambda: {**worker.counts(), **_transfer_counts(transport, engine)},
    )
    await serve_worker(options, service)


def _compute_behind(nice: int, *, sole: bool) -> None:
    """This thread, and those that it starts, compute; whoever moves tokens or blocks goes first. sole: no other worker
    computes on the same cores: it would have to wait for the end of a slice."""
    give_way(nice)
    if sole:
        compute_in_long_slices()


def _take_memory(cache: KVCache) -> bool:
    """Some of what the KV cache is going to need, as long as there is room. False when all is there, or none."""
    return free_memory_bytes() > LEFT_FREE_BYTES and cache.populate()


def _copying(engine: Engine, loop: EngineLoop) -> Copying:
    """Begun where blocks are on a device."""
    copying = Copying(loop.insist, crash, engine.enter)
    if engine.cache.copy_beside(copying.begin):
        copying.start()
    return copying


def _nothing() -> None:
    """Nobody wants to know whether this worker computes."""


def _transfer_counts(transport: Transport, engine: Engine) -> dict[str, int]:
    """What hand-offs have met here, and the bytes of what they moved."""
    met = transport.counters()
    moved = met.get("blocks_sent", 0) + met.get("blocks_placed", 0)
    counts = {_count_name(name): count for name, count in met.items()}
    return {TRANSFER_BYTES: moved * engine.cache.layout.block_bytes(), **counts}


def _count_name(met: str) -> str:
    over = met.removeprefix(COMMITTED_OVER)
    return f"{TRANSFER_EVENTS}.{met}" if over == met else f"{TRANSFERS}.{over}"


def _desk(options: _Options, role: Role[_Options], engine: Engine, identity: Identity) -> TicketDesk:
    return TicketDesk(
        key=options.ticket_key.get_secret_value(),
        identity=identity,
        end=role.end,
        layout_fingerprint=engine.cache.layout.fingerprint(),
        block_size=engine.cache.layout.block_size,
    )


def _welcome(
    options: WorkerOptions, engine: Engine, identity: Identity, kv_endpoints: tuple[str, ...]
) -> pb.Welcome:
    layout = engine.cache.layout
    return pb.Welcome(
        protocol_version=PROTOCOL_VERSION,
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        layout_fingerprint=layout.fingerprint(),
        kv_endpoints=kv_endpoints,
        model_digest=engine.model_digest,
        max_model_len=engine.capacity.max_model_len,
        vocab_size=engine.config.vocab_size,
        block_size=layout.block_size,
        total_blocks=engine.capacity.num_blocks,
        max_num_seqs=options.max_num_seqs,
        eos_token_ids=engine.config.eos_token_ids,
        ticket_key_check=key_check(options.ticket_key.get_secret_value()),
        layout_fields=[pb.LayoutField(name=name, value=value) for name, value in layout.fields().items()],
    )
