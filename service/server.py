"""A gRPC server with our limits, its address, and its end. What it serves is registered by the caller.

Settings have their reasons beside them; none is left to a default that can cut a stream or share a port
silently.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from service.bind_rules import LOOPBACK, BindError, BindRules, require_free
from service.health import Health
from service.tls import ServerTls

MESSAGE_BYTES_MAX = 16 << 20
METADATA_BYTES_MAX = 16 << 10
STREAMS_MAX = 4096
_CLEANUP_S = 10.0
_HURRIED_S = 2.0
_LAST_WORDS_S = 1.0
"""From when calls are told that they end here, until they are cut."""

Cleanup = Callable[[], Coroutine[Any, Any, None]]
T = TypeVar("T")


def create_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    *,
    message_bytes_max: int = MESSAGE_BYTES_MAX,
    keepalive_ms: int = 60_000,
    ping_timeout_ms: int = 20_000,
    share_port: bool = False,
    connection_age_ms: int | None = None,
) -> grpc.aio.Server:
    """keepalive_ms: silence after which a peer is pinged; ping_timeout_ms: after which it is given up.
    share_port: with other processes that say so too. connection_age_ms: after which a connection takes no new calls, so
    that its client dials again; those that run on it are not cut. To be called in the running event loop."""
    options: tuple[tuple[str, int], ...] = (
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_send_message_length", message_bytes_max),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", ping_timeout_ms),
        ("grpc.http2.ping_timeout_ms", ping_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        # The default, 300 s, answers honest keepalives with GOAWAY "too many pings" and ends all their
        # streams.
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_pings_without_data", 0),
        # The defaults cancel streams when some two thousand start at once; we refuse by our own admission.
        ("grpc.server.max_pending_requests", 20_000),
        ("grpc.server.max_pending_requests_hard_limit", 40_000),
        # A compressed message is unpacked whole before its size is looked at. 1: identity alone.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # Of one connection; its other calls wait at the client. What all may have at once is admission's to say.
        ("grpc.max_concurrent_streams", STREAMS_MAX),
        # Above the first a call may be refused, above the second it is.
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES_MAX),
        # With 1 a second process shares our port without a word.
        ("grpc.so_reuseport", int(share_port)),
    )
    if connection_age_ms is not None:
        options += (("grpc.max_connection_age_ms", connection_age_ms),)
    return grpc.aio.server(interceptors=list(interceptors), options=options)


def bind(
    server: grpc.aio.Server, address: str, rules: BindRules = LOOPBACK, tls: ServerTls | None = None
) -> int:
    """Listens on host:port or unix:path, from `server.start()` on; returns the port, 0 for a path, which has no TLS.

    Raises BindError when the address is taken, or when the rules forbid it.
    """
    local = address.startswith("unix:")
    rules.check(address, encrypted=tls is not None)
    require_free(address)
    try:
        if tls is None or local:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, tls.grpc_credentials())
    except RuntimeError:
        why = "is it a path for a socket?" if local else "is the port taken?"
        raise BindError(f"{address}: cannot listen there; {why}") from None
    return 0 if local else port


async def run_until_signal(
    server: grpc.aio.Server,
    health: Health,
    *,
    grace_s: float,
    before_stop: Cleanup | None = None,
    beside: Cleanup | None = None,
    last_words: Callable[[], None] | None = None,
    cleanups: Sequence[Cleanup] = (),
    ended: asyncio.Event | None = None,
) -> None:
    """Waits for SIGTERM, SIGINT or `ended`; then NOT_SERVING, before_stop, no new calls, the end of running
    ones (grace_s for all of these together), and the cleanups in order. A second signal cuts what runs.

    before_stop: ends what would otherwise keep calls running for ever; it is cancelled when the time is over.
    beside: the end of what runs on other servers, for which as long is waited. last_words: has whatever runs then told
    why it ends; a moment later it is cut.
    """
    clock = asyncio.get_running_loop().time
    with _signals() as (first, second):
        await _first_of(first, ended)
        health.shut_down()
        deadline = clock() + grace_s
        if before_stop is not None:
            await _until(before_stop(), second, grace_s)
        health.release()
        left = max(0.0, deadline - clock())
        await _until(_stopped(server, left + _CLEANUP_S, beside), second, left)
        if last_words is not None:
            last_words()
            await _until(_stopped(server, _CLEANUP_S, beside), asyncio.Event(), _LAST_WORDS_S)
        await server.stop(None)
        for cleanup in cleanups:
            await _until(cleanup(), asyncio.Event(), _HURRIED_S if second.is_set() else _CLEANUP_S)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a process's main coroutine, on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


@contextmanager
def _signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    first, second = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        yield first, second
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _first_of(*events: asyncio.Event | None) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events if event is not None]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _stopped(server: grpc.aio.Server, grace_s: float, beside: Cleanup | None) -> None:
    """Returns when nothing runs any more, there or beside it."""
    async with asyncio.TaskGroup() as ends:
        ends.create_task(_stop(server, grace_s))
        if beside is not None:
            ends.create_task(beside())


async def _stop(server: grpc.aio.Server, grace_s: float) -> None:
    await server.stop(grace_s)


async def _until(work: Coroutine[Any, Any, object], hurry: asyncio.Event, seconds: float) -> None:
    """Runs the work until it is done, or there is hurry, or its time is over; then it is cancelled."""
    task, hurried = asyncio.ensure_future(work), asyncio.ensure_future(hurry.wait())
    await asyncio.wait({task, hurried}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if task.done():
        task.result()
    else:
        task.cancel()
        await asyncio.wait({task}, timeout=_HURRIED_S)
