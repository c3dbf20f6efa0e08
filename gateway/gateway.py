"""One gateway process: wires the faces, the orchestrator and the worker pools, and runs them."""

import asyncio
import random
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from itertools import chain

import grpc
import structlog

from crossdock.v1 import control_pb2, inference_pb2
from crossdock.v1.control_pb2_grpc import add_ControlServiceServicer_to_server
from crossdock.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from crossdock.worker.v1 import worker_pb2
from gateway.access import Access
from gateway.admission import Admission, Bounds
from gateway.api_keys import ApiKeys
from gateway.attach import DECODE, PREFILL, Dialect, make_hello
from gateway.control import ControlServicer
from gateway.frontend import Frontend
from gateway.guide_check import GuideCheck
from gateway.http_server import HttpServer
from gateway.openai_http import openai_app
from gateway.orchestrator import Orchestrator
from gateway.reading import Reading
from gateway.served_model import ServedModel
from gateway.servicer import InferenceServicer
from gateway.tokenizer import Tokenizer, load_tokenizer
from gateway.utilization import Utilization
from gateway.window import LIGHT_TOKENS, window_of
from gateway.worker_pool import WorkerPool, WorkerRecord
from kvtransfer.ticket import key_check
from service import orca, server, worker_access
from service.bind_rules import BindRules
from service.channel import open_channel
from service.config import DEFAULT_MODEL, GatewayOptions
from service.garbage import freeze_garbage
from service.guard import Guard
from service.health import HEALTH, Health
from service.metrics import Metrics, Pool
from service.model_source import ModelFilesError, resolve_model
from service.orca import OpenRca
from service.readiness import announce
from service.reflection import enable_reflection
from service.startup import StartupError
from service.tls import client_tls, server_tls
from service.watched_files import keep_fresh

METRICS_INTERVAL_S = 0.5
STRAGGLERS_WAIT_S = 10.0
_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_CONTROL = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name


def run(options: GatewayOptions) -> None:
    """Serve until a signal. Raises StartupError when it cannot start."""
    path = resolve_model(options.model)
    try:
        tokenizer = load_tokenizer(path)
    except ModelFilesError as error:
        raise StartupError(str(error)) from error
    name = options.served_model_name or (options.model if options.model == DEFAULT_MODEL else path.stem)
    server.run(_Gateway(options, name, tokenizer, GuideCheck(path)).serve())


class _Gateway:
    """The parts, and their order of starting and ending."""

    def __init__(
        self, options: GatewayOptions, name: str, tokenizer: Tokenizer, guide_check: GuideCheck
    ) -> None:
        self._options = options
        self._guide_check = guide_check
        epoch = secrets.randbits(63)
        hello = make_hello(f"gateway-{epoch:x}", epoch)
        ticket_key = options.ticket_key.get_secret_value()
        self._model = ServedModel(
            name, tokenizer, lambda: chain(self._prefills, self._decodes), key_check(ticket_key)
        )
        self._prefills = self._pool(options.prefill_workers, PREFILL, hello)
        self._decodes = self._pool(options.decode_workers, DECODE, hello)
        self._tls = server_tls(options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs)
        self._keys = None if options.api_keys is None else ApiKeys(options.api_keys)
        self._weights = dict(options.tenant_weights)
        self._admission = self._make_admission()
        self._metrics = Metrics(options.metrics_names)
        token = options.control_token
        if token is None and not options.control_identities:
            structlog.get_logger().info("no operators: neither --control-token nor --control-identities")
        self._access = Access(
            keys=self._keys,
            control_token=None if token is None else token.get_secret_value(),
            control_identities=options.control_identities,
            on_refused=lambda: self._metrics.count_request("unauthorised"),
        )
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
            ready=lambda: self._ready.is_set() and not self._health.ended,
            admission=self._admission,
            reading=Reading(self._weight),
            require_guide=guide_check.require,
        )
        self._utilization = Utilization(
            self._prefills, self._decodes, self._admission, options.queue_requests_max, time.monotonic
        )
        self._open_rca = OpenRca(self._utilization.report)
        self._router_services = _services_for_routers()
        self._health = Health((_INFERENCE, *self._router_services), standing=(_CONTROL,))

    async def serve(self) -> None:
        """From the listening sockets to the end of the last stream."""
        options = self._options
        request_bytes_max = options.grpc_max_message_bytes
        grpc_server = server.create_server(
            [Guard(self._access.check, self._metrics.count_refusal, message_bytes_max=request_bytes_max)],
            # Above this gRPC itself refuses, without details.
            message_bytes_max=max(request_bytes_max, server.MESSAGE_BYTES_MAX),
            share_port=options.share_grpc_port,
            connection_age_ms=_milliseconds(options.grpc_max_connection_age),
        )
        self._health.register(grpc_server)
        inference = InferenceServicer(self._frontend, self._access, self._utilization.trailer)
        add_InferenceServiceServicer_to_server(inference, grpc_server)
        control = ControlServicer(
            self._prefills, self._decodes, self._admission, owns=self._orchestrator.asked_for
        )
        add_ControlServiceServicer_to_server(control, grpc_server)
        self._serve_routers(grpc_server)
        if options.enable_reflection:
            served = (_INFERENCE, _CONTROL, HEALTH, orca.SERVICE, *self._router_services)
            enable_reflection(grpc_server, served)
        grpc_server.add_generic_rpc_handlers((self._open_rca,))
        rules = BindRules(allow_wildcard=options.allow_wildcard_bind, allow_insecure=options.allow_insecure)
        grpc_port = server.bind(grpc_server, f"{options.grpc_host}:{options.grpc_port}", rules, self._tls)
        app = openai_app(self._frontend, self._access, body_bytes_max=request_bytes_max)
        http = HttpServer(app, options.http_host, options.http_port, rules, self._tls)
        await grpc_server.start()
        await http.start()
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._prefills.run()),
                tasks.create_task(self._decodes.run()),
                tasks.create_task(self._prefills.watch()),
                tasks.create_task(self._decodes.watch()),
                tasks.create_task(self._watch_load()),
                tasks.create_task(self._watch_readiness()),
                tasks.create_task(keep_fresh(self._refreshes())),
            ]
            announcing = tasks.create_task(self._announce(grpc_port, http.url))
            await server.run_until_signal(
                grpc_server,
                self._health,
                grace_s=options.shutdown_timeout,
                before_stop=partial(self._linger, http),
                beside=http.finish,
                last_words=self._orchestrator.end,
                cleanups=[http.stop, self._guide_check.close],
            )
            for task in (*background, announcing):
                task.cancel()

    def _serve_routers(self, grpc_server: grpc.aio.Server) -> None:
        if self._router_services:
            from gateway import vllm_engine

            load = self._utilization.engine
            trailer = self._utilization.trailer
            vllm_engine.register(grpc_server, self._frontend, self._access, trailer, load)

    async def _announce(self, grpc_port: int, http_url: str) -> None:
        """Say that this process serves: once all workers are there, or some time after one is that generates."""
        await self._ready.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(STRAGGLERS_WAIT_S):
                while not (self._prefills.all_ready() and self._decodes.all_ready()):
                    await self._orchestrator.next_change().wait()
        freeze_garbage()
        grpc_address = f"{self._options.grpc_host}:{grpc_port}"
        announce({"grpc": grpc_address, "http": http_url})

    def _pool(self, addresses: tuple[str, ...], dialect: Dialect, hello: worker_pb2.Hello) -> WorkerPool:
        options = self._options
        tls = client_tls(options.worker_ssl_ca_certs, options.worker_ssl_certfile, options.worker_ssl_keyfile)
        dialect = replace(
            dialect,
            open_channel=lambda address: open_channel(address, tls),
            credential=worker_access.credential(options.ticket_key.get_secret_value()),
        )
        refusal = self._model.refusal
        return WorkerPool(addresses, dialect, hello, refusal=refusal, on_change=self._changed)

    def _make_admission(self) -> Admission:
        options = self._options
        bounds = Bounds(
            requests=options.queue_requests_max,
            tokens=options.queue_tokens_max,
            bytes=options.queue_bytes_max,
            shared=self._keys is not None,
        )
        return Admission(
            bounds,
            clock=time.monotonic,
            window=lambda: window_of(self._prefills.views(), self._decodes.views()),
            weight=self._weight,
            light_tokens=LIGHT_TOKENS,
        )

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _refreshes(self) -> list[Callable[[], None]]:
        return [each.refresh for each in (self._tls, self._keys) if each is not None]

    async def _linger(self, http: HttpServer) -> None:
        """Take calls until everybody who balances over us has heard that we end, and then none at either port."""
        await asyncio.sleep(self._options.drain_window)
        self._open_rca.end()
        http.close()

    def _changed(self) -> None:
        self._orchestrator.workers_changed()
        if self._decodes.serves():  # they can do without the others
            self._ready.set()
        else:
            self._ready.clear()

    async def _watch_readiness(self) -> None:
        """Keep the health service in step with the pools."""
        shown = False
        while True:
            changed, ready = self._orchestrator.next_change(), self._ready.is_set()
            if ready != shown:
                self._health.set_ready(ready)
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
        welcome = worker.welcome
        self._metrics.set_cache(
            pool, worker.worker_id, block_size=welcome.block_size, blocks=welcome.total_blocks
        )
        self._metrics.set_counts(pool, worker.worker_id, worker.counts)

    async def _watch_load(self) -> None:
        """Show what the workers report."""
        while True:
            for worker in self._prefills:
                self._show("prefill", worker)
            for worker in self._decodes:
                self._show("decode", worker)
            await asyncio.sleep(METRICS_INTERVAL_S)


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else max(1, round(seconds * 1000))


def _services_for_routers() -> tuple[str, ...]:
    """vLLM's, where its messages are installed."""
    if find_spec("smg_grpc_proto") is None:
        return ()
    from gateway.vllm_engine import SERVICE

    return (SERVICE,)
