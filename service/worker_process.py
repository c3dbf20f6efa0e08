"""The shell of a worker process: server, health, readiness, drain, end. Knows neither engine nor role.

The caller wires its worker and says how its parts are stopped; this file runs until a signal.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import grpc
import structlog

from service import worker_access
from service.bind_rules import BindRules, require_free
from service.config import WorkerOptions
from service.garbage import freeze_garbage
from service.guard import Guard
from service.health import Health
from service.machine import require_cores
from service.orca import OpenRca, worker_report
from service.pulse import LOOK_INTERVAL_S, Pulse
from service.readiness import Field, announce
from service.server import Cleanup, bind, create_server, run_until_signal
from service.tls import server_tls
from service.watched_files import keep_fresh
from service.worker_rim import WorkerRim

KEEPALIVE_MS = 2_000
INBOX_ACTIONS_MAX = 65_536
EXIT_CRASHED = 70
"""EX_SOFTWARE of sysexits.h: a mistake of ours, worth a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerService:
    """name: full name of the gRPC service. register: adds its servicer to a server. facts: what to announce.
    cleanups: run in order at the end, after the server has stopped. pulse: of its step thread. counts: since
    the start, by the names of `service.worker_counts`."""

    name: str
    register: Callable[[grpc.aio.Server], None]
    rim: WorkerRim
    facts: dict[str, Field]
    cleanups: Sequence[Cleanup]
    pulse: Pulse
    counts: Callable[[], Mapping[str, int]]


def require_servable(options: WorkerOptions) -> None:
    """Raises what `serve_worker` would, BindError or StartupError, as far as that can be told without listening."""
    require_cores("--cores", options.cores)
    tls = server_tls(options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs)
    _bind_rules(options).check(options.listen, encrypted=tls is not None)
    require_free(options.listen)


async def serve_worker(options: WorkerOptions, service: WorkerService) -> None:
    """Serve until SIGTERM or SIGINT. Raises BindError, or StartupError when TLS cannot be had."""
    guard = Guard(worker_access.check_with(options.ticket_key.get_secret_value()))
    server = create_server([guard], keepalive_ms=KEEPALIVE_MS, ping_timeout_ms=KEEPALIVE_MS)
    tls = server_tls(options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs)
    health = Health([service.name])
    health.register(server)
    service.rim.counts = service.counts
    service.register(server)
    open_rca = OpenRca(lambda: worker_report(service.rim.load, options.max_num_seqs))
    server.add_generic_rpc_handlers((open_rca,))
    port = bind(server, options.listen, _bind_rules(options), tls)
    await server.start()
    health.set_ready(True)
    background = [
        asyncio.create_task(service.rim.report_load()),
        asyncio.create_task(watch_pulse(service.pulse, service.rim, health)),
    ]
    if tls is not None:
        background.append(asyncio.create_task(keep_fresh([tls.refresh])))
    address = f"{options.listen.rpartition(':')[0]}:{port}" if port else options.listen
    freeze_garbage()
    announce({"grpc": address, **service.facts})

    async def drain() -> None:
        open_rca.end()
        await service.rim.drain()

    try:
        await run_until_signal(
            server,
            health,
            grace_s=options.shutdown_timeout,
            before_stop=drain,
            cleanups=service.cleanups,
        )
    finally:
        for task in background:
            task.cancel()


def _bind_rules(options: WorkerOptions) -> BindRules:
    return BindRules(allow_wildcard=options.allow_wildcard_bind, allow_insecure=options.allow_insecure)


async def watch_pulse(pulse: Pulse, rim: WorkerRim, health: Health) -> None:
    """Tell health and gateways whether the engine moves."""
    while True:
        await asyncio.sleep(LOOK_INTERVAL_S)
        frozen = pulse.frozen()
        if frozen != rim.frozen:
            rim.frozen = frozen
            structlog.get_logger().warning("the engine stands still" if frozen else "the engine moves again")
            health.set_ready(not frozen)


def crash(error: BaseException | None) -> NoReturn:
    """End the process at once: one of its threads made a mistake, and what it holds cannot be trusted. Peers see
    their streams break and go on elsewhere."""
    structlog.get_logger().critical("a thread crashed", exc_info=error)
    os._exit(EXIT_CRASHED)


def crash_with_any_thread() -> None:
    """From now on an exception that ends any thread ends the process: without one of them it would only look alive."""
    threading.excepthook = lambda failed: crash(failed.exc_value)
