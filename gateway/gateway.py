"""One gateway process: wires the faces, the orchestrator and the worker pools, and runs them."""

import asyncio
import random
import secrets
import time
from contextlib import suppress
from datetime import datetime
from itertools import chain

from crossdock.v1 import control_pb2, inference_pb2
from crossdock.v1.control_pb2_grpc import add_ControlServiceServicer_to_server
from crossdock.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from gateway.admission import Admission
from gateway.attach import DECODE, PREFILL, make_hello
from gateway.control import ControlServicer
from gateway.errors import ModelFilesError
from gateway.frontend import Frontend
from gateway.http_server import HttpServer
from gateway.malformed import MalformedMessages
from gateway.openai_http import openai_app
from gateway.orchestrator import Orchestrator
from gateway.served_model import ServedModel
from gateway.servicer import InferenceServicer
from gateway.tokenizer import Tokenizer, load_tokenizer
from gateway.worker_pool import WorkerPool, WorkerRecord
from kvtransfer.ticket import key_check
from service import server
from service.config import DEFAULT_MODEL, GatewayOptions
from service.garbage import freeze_garbage
from service.health import Health
from service.metrics import Metrics, Pool
from service.model_source import resolve_model
from service.readiness import announce
from service.startup import StartupError

METRICS_INTERVAL_S = 0.5
STRAGGLERS_WAIT_S = 10.0
_SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name,
)


def run(options: GatewayOptions) -> None:
    """Serve until a signal. Raises StartupError when it cannot start."""
    path = resolve_model(options.model)
    try:
        tokenizer = load_tokenizer(path)
    except ModelFilesError as error:
        raise StartupError(str(error)) from error
    name = options.served_model_name or (options.model if options.model == DEFAULT_MODEL else path.stem)
    server.run(_Gateway(options, name, tokenizer).serve())


class _Gateway:
    """The parts, and their order of starting and ending."""

    def __init__(self, options: GatewayOptions, name: str, tokenizer: Tokenizer) -> None:
        self._options = options
        epoch = secrets.randbits(63)
        hello = make_hello(f"gateway-{epoch:x}", epoch)
        ticket_key = options.ticket_key.get_secret_value()
        self._model = ServedModel(
            name, tokenizer, lambda: chain(self._prefills, self._decodes), key_check(ticket_key)
        )
        self._prefills = WorkerPool(
            options.prefill_workers, PREFILL, hello, refusal=self._model.refusal, on_change=self._changed
        )
        self._decodes = WorkerPool(
            options.decode_workers, DECODE, hello, refusal=self._model.refusal, on_change=self._changed
        )
        self._admission = Admission(options.queue_requests_max)
        self._metrics = Metrics()
        self._ready = asyncio.Event()
        self._orchestrator = Orchestrator(
            prefills=self._prefills,
            decodes=self._decodes,
            admission=self._admission,
            ticket_key=ticket_key,
            gateway_epoch=epoch,
            randomness=secrets.token_bytes,
            clock=time.monotonic,
        )
        dice = random.SystemRandom()
        self._frontend = Frontend(
            card=self._model.card,
            tokenizer=tokenizer,
            source=self._orchestrator,
            metrics=self._metrics,
            new_id=lambda: secrets.token_hex(12),
            new_seed=lambda: dice.getrandbits(63),
            monotonic=time.monotonic,
            wall=datetime.now,
            ready=self._ready.is_set,
        )
        self._health = Health(_SERVICES)

    async def serve(self) -> None:
        """From the listening sockets to the end of the last stream."""
        options = self._options
        request_bytes_max = options.grpc_max_message_bytes
        grpc_server = server.create_server(
            [MalformedMessages(request_bytes_max)],
            # Above this gRPC itself refuses, without details.
            message_bytes_max=max(request_bytes_max, server.MESSAGE_BYTES_MAX),
        )
        await self._health.register(grpc_server)
        add_InferenceServiceServicer_to_server(InferenceServicer(self._frontend), grpc_server)
        token = options.control_token
        control = ControlServicer(
            self._prefills,
            self._decodes,
            self._admission,
            token.get_secret_value() if token else None,
            owns=self._orchestrator.asked_for,
        )
        add_ControlServiceServicer_to_server(control, grpc_server)
        if options.enable_reflection:
            server.enable_reflection(grpc_server, _SERVICES)
        allow = options.allow_wildcard_bind
        grpc_port = server.bind(grpc_server, f"{options.grpc_host}:{options.grpc_port}", allow_wildcard=allow)
        app = openai_app(self._frontend, body_bytes_max=request_bytes_max)
        http = HttpServer(app, options.http_host, options.http_port, allow_wildcard=allow)
        await grpc_server.start()
        await http.start()
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._prefills.run()),
                tasks.create_task(self._decodes.run()),
                tasks.create_task(self._watch_load()),
                tasks.create_task(self._watch_readiness()),
            ]
            announcing = tasks.create_task(self._announce(grpc_port, http.port))
            await server.run_until_signal(
                grpc_server, self._health, grace_s=options.shutdown_timeout, cleanups=[http.stop]
            )
            for task in (*background, announcing):
                task.cancel()

    async def _announce(self, grpc_port: int, http_port: int) -> None:
        """Say that this process serves: once all workers are there, or some time after one is that generates."""
        await self._ready.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(STRAGGLERS_WAIT_S):
                while not (self._prefills.all_ready() and self._decodes.all_ready()):
                    await self._orchestrator.next_change().wait()
        freeze_garbage()
        grpc_address = f"{self._options.grpc_host}:{grpc_port}"
        announce({"grpc": grpc_address, "http": f"http://{self._options.http_host}:{http_port}"})

    def _changed(self) -> None:
        self._orchestrator.workers_changed()
        if self._decodes.any_ready():  # they can do without the others
            self._ready.set()
        else:
            self._ready.clear()

    async def _watch_readiness(self) -> None:
        """Keep the health service in step with the pools."""
        shown = False
        while True:
            changed, ready = self._orchestrator.next_change(), self._ready.is_set()
            if ready != shown:
                await self._health.set_ready(ready)
                shown = ready
            await changed.wait()

    def _show(self, pool: Pool, worker: WorkerRecord) -> None:
        if worker.welcome is None:
            return
        load = worker.load
        used = 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
        self._metrics.set_load(
            pool,
            worker.worker_id,
            running=load.running_sequences,
            waiting=load.waiting_sequences,
            kv_usage=used,
            borrowed_s=load.borrowed_core_ms / 1000,
        )

    async def _watch_load(self) -> None:
        """Show what the workers report."""
        while True:
            for worker in self._prefills:
                self._show("prefill", worker)
            for worker in self._decodes:
                self._show("decode", worker)
            await asyncio.sleep(METRICS_INTERVAL_S)
