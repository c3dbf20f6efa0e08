"""The shell of a worker process: server, health, readiness, drain, end. Knows neither engine nor role.

The caller wires its worker and says how its parts are stopped; this file runs until a signal.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import structlog

from service.config import WorkerOptions
from service.garbage import freeze_garbage
from service.health import Health
from service.readiness import Field, announce
from service.server import Cleanup, bind, create_server, run_until_signal
from service.worker_rim import WorkerRim

KEEPALIVE_MS = 2_000
INBOX_ACTIONS_MAX = 65_536
EXIT_CRASHED = 70
"""EX_SOFTWARE of sysexits.h: a mistake of ours, worth a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerService:
    """name: full name of the gRPC service. register: adds its servicer to a server. facts: what to announce.
    cleanups: run in order at the end, after the server has stopped."""

    name: str
    register: Callable[[grpc.aio.Server], None]
    rim: WorkerRim
    facts: dict[str, Field]
    cleanups: Sequence[Cleanup]


async def serve_worker(options: WorkerOptions, service: WorkerService) -> None:
    """Serve until SIGTERM or SIGINT. Raises BindError."""
    server = create_server(keepalive_ms=KEEPALIVE_MS, ping_timeout_ms=KEEPALIVE_MS)
    health = Health([service.name])
    await health.register(server)
    service.register(server)
    port = bind(server, options.listen, allow_wildcard=options.allow_wildcard_bind)
    await server.start()
    await health.set_ready(True)
    reporter = asyncio.create_task(service.rim.report_load())
    address = f"{options.listen.rpartition(':')[0]}:{port}" if port else options.listen
    freeze_garbage()
    announce({"grpc": address, **service.facts})
    try:
        await run_until_signal(
            server,
            health,
            grace_s=options.shutdown_timeout,
            before_stop=service.rim.drain,
            cleanups=service.cleanups,
        )
    finally:
        reporter.cancel()


def crash(error: BaseException | None) -> None:
    """End the process at once: one of its threads made a mistake, and what it holds cannot be trusted. Peers see
    their streams break and go on elsewhere."""
    structlog.get_logger().critical("a thread crashed", exc_info=error)
    os._exit(EXIT_CRASHED)


def crash_with_any_thread() -> None:
    """From now on an exception that ends any thread ends the process: without one of them it would only look alive."""
    threading.excepthook = lambda failed: crash(failed.exc_value)
