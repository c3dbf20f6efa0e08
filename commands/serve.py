"""`crossdock serve`: gateway, prefill workers and decode workers on this machine, under one supervisor.

Decides which processes there are, on which sockets and cores, and prints the one `ready` line. It does not
know how they work, and no setting of theirs but those it must deal out.
"""

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from itertools import count, cycle, islice
from pathlib import Path

from commands import operator_token
from commands.gpus import deal_gpus, visible_gpus
from commands.runtime_folder import runtime_folder
from commands.supervisor import ChildSpec, Supervisor
from engine.devices import GPU_SHARE
from service import config, server
from service.config import DecodeWorkerOptions, EngineOptions, GatewayOptions, ServeOptions, WorkerOptions
from service.core_board import SEATS_MAX, CoreBoard
from service.flags import ConfigError
from service.machine import require_cores
from service.model_source import resolve_model
from service.readiness import Field
from service.startup import EXIT_CODE, StartupError

_PROG = "crossdock serve"
_GATEWAY = "gateway"
PORT_MAX = 65_535


def main(argv: Sequence[str]) -> int:
    """Runs until SIGTERM or SIGINT. Returns 0, or 2 when something cannot start."""
    started = time.monotonic()
    environ = config.environment()
    try:
        options = config.load(ServeOptions, argv, environ, prog=_PROG)
        resolve_model(options.model)
        require_cores("--cores", options.cores)
        with runtime_folder() as folder, core_board(options) as board:
            token = None if options.control_token is not None else secrets.token_urlsafe(32)
            seats = None if board is None else board.path
            specs = plan(options, folder, environ, secrets.token_hex(32), seats, control_token=token)
            on_end = partial(vacate, board, tuple(deal(options)))

            def on_ready(address: str) -> None:
                if token is not None:
                    operator_token.leave(folder, address, token)

            return server.run(supervise(specs, options, started, on_end, on_ready))
    except ConfigError as error:
        print(*(f"{_PROG}: {line}" for line in error.lines), sep="\n", file=sys.stderr)
    except StartupError as error:
        _say(str(error))
    return EXIT_CODE


def plan(
    options: ServeOptions,
    folder: Path,
    environ: Mapping[str, str],
    ticket_key: str,
    board: Path | None = None,
    *,
    control_token: str | None = None,
) -> tuple[ChildSpec, ...]:
    """The processes that make up the service. folder: private to this user; sockets are made there.
    ticket_key: in hexadecimal; it travels by the environment, since command lines are public. board: on which the
    workers find out whose cores are free; its seats are in the order of `deal`. control_token: where the options have
    none; it travels in the same way."""
    key = {"ticket_key": ticket_key}
    child_environ = config.child_environment(environ, key)
    workers = [
        ChildSpec(
            name=worker.worker_id,
            argv=_argv(verb, worker),
            environ=child_environ,
        )
        for verb, worker in _workers(options, folder, environ, ticket_key, board)
    ]
    if options.control_token is not None:
        control_token = options.control_token.get_secret_value()
    front_environ = config.child_environment(
        environ, key if control_token is None else key | {"control_token": control_token}
    )
    fronts = [
        ChildSpec(name=name, argv=_argv("gateway", gateway), environ=front_environ, stage=1)
        for name, gateway in _gateways(options, folder, ticket_key)
    ]
    return (*workers, *fronts)


def deal(options: ServeOptions) -> dict[str, tuple[int, ...]]:
    """The cores of each worker, by its name. Who asks for no number of threads gets a fair share of what the others
    leave, and at least one. When all are dealt it starts over with the first."""
    cores = options.cores or tuple(sorted(os.sched_getaffinity(0)))
    workers = [
        (f"{pool}-{i}", engine.threads) for pool, count, engine in _pools(options) for i in range(count)
    ]
    open_hands = sum(threads is None for _, threads in workers)
    left = max(0, len(cores) - sum(threads or 0 for _, threads in workers))
    shares = (max(1, (left + i) // open_hands) for i in reversed(range(open_hands)))
    ring = cycle(cores)
    return {name: tuple(dict.fromkeys(islice(ring, threads or next(shares)))) for name, threads in workers}


def core_board(options: ServeOptions) -> AbstractContextManager[CoreBoard | None]:
    """What the workers lend their cores by, until the block ends. None where nothing is lent: nobody wants it, or there
    are too many workers to keep apart."""
    hands = deal(options)
    if not options.lend_cores or len(hands) > SEATS_MAX:
        return nullcontext()
    return closing(CoreBoard.make(tuple(hands.values())))


async def supervise(
    specs: Sequence[ChildSpec],
    options: ServeOptions,
    started: float,
    on_end: Callable[[str], None],
    on_ready: Callable[[str], None] = lambda address: None,
) -> int:
    """Runs the processes until a signal; says once where they serve. started: seconds on the monotonic clock.
    on_end: called with the name of a process that is gone. on_ready: with the gateway's gRPC
    address, before it is said.

    Raises ChildFailure, when all are gone again, if one of them cannot start.
    """
    supervisor = Supervisor(specs, say=_say_raw, shutdown_timeout_s=options.shutdown_timeout, on_end=on_end)
    with _signals(supervisor) as asked_to_end:
        starting = asyncio.ensure_future(supervisor.start())
        ending = asyncio.ensure_future(asked_to_end.wait())
        try:
            await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                seconds = time.monotonic() - started
                said = starting.result()
                on_ready(str(said[_GATEWAY]["grpc"]))
                for name, facts in sorted(said.items()):
                    if "blocks" in facts:
                        _say(_room_line(name, facts))
                print(_ready_line(said, options, seconds), flush=True)
                await ending
        finally:
            starting.cancel()
            ending.cancel()
            await supervisor.stop()
    return 0


def _pools(options: ServeOptions) -> tuple[tuple[str, int, EngineOptions], ...]:
    return (
        ("prefill", options.prefill, options.prefill_engine),
        ("decode", options.decode, options.decode_engine),
    )


def _workers(
    options: ServeOptions, folder: Path, environ: Mapping[str, str], ticket_key: str, board: Path | None
) -> Iterator[tuple[str, WorkerOptions]]:
    hands = deal(options)
    seats = deal_gpus(
        [
            (f"{pool}-{i}", engine.device, engine.tensor_parallel_size)
            for pool, workers, engine in _pools(options)
            for i in range(workers)
        ],
        visible_gpus(environ),
    )
    for pool, workers, engine in _pools(options):
        for index in range(workers):
            name = f"{pool}-{index}"
            device, sharers = seats[name]
            takes: dict[str, object] = {}
            options_class: type[WorkerOptions] = WorkerOptions
            if pool == "decode":
                options_class, takes = DecodeWorkerOptions, {"kv_listen": [f"ipc://{folder / name}.kv"]}
            yield (
                f"{pool}-worker",
                options_class.model_validate(
                    engine.model_dump()
                    | takes
                    | {
                        "device": device,
                        "gpu_memory_utilization": _share(engine, device, sharers),
                        "host_memory_share": 1 / len(hands) if device.startswith("cuda") else 1.0,
                        "log_level": options.log_level,
                        "log_format": options.log_format,
                        "shutdown_timeout": options.shutdown_timeout,
                        "listen": _socket(folder, name),
                        "worker_id": name,
                        "ticket_key": ticket_key,
                        "cores": hands[name],
                        "core_board": board,
                        "core_seat": tuple(hands).index(name),
                        "die_with_parent": True,
                    }
                ),
            )


def _share(engine: EngineOptions, device: str, sharers: int) -> float | None:
    """Of the memory that so many share. None: as the worker thinks best, which on a GPU does not know of the others."""
    share = engine.gpu_memory_utilization
    if share is None and device.startswith("cuda"):
        share = GPU_SHARE
    return None if share is None else share / sharers


def _gateways(options: ServeOptions, folder: Path, ticket_key: str) -> Iterator[tuple[str, GatewayOptions]]:
    """All on one gRPC port, each on an HTTP port of its own. Raises StartupError when there is no port to share."""
    if options.gateways > 1 and options.grpc_port == 0:
        raise StartupError("--gateways: several need a --grpc-port that they can share")
    if options.http_port + options.gateways - 1 > PORT_MAX:
        raise StartupError(f"--gateways: their HTTP ports, from --http-port on, would end above {PORT_MAX}")
    for index in range(options.gateways):
        fields = _shared(options, GatewayOptions) | {
            "prefill_workers": [_socket(folder, f"prefill-{i}") for i in range(options.prefill)],
            "decode_workers": [_socket(folder, f"decode-{i}") for i in range(options.decode)],
            "ticket_key": ticket_key,
            "die_with_parent": True,
            "share_grpc_port": options.gateways > 1,
            "http_port": options.http_port + index if options.http_port else 0,
        }
        yield (_GATEWAY if index == 0 else f"{_GATEWAY}-{index}", GatewayOptions.model_validate(fields))


def _shared(options: ServeOptions, target: type[GatewayOptions]) -> dict[str, object]:
    """The settings that both classes have, secrets aside."""
    names = set(target.model_fields) & set(type(options).model_fields) - {"control_token"}
    return {name: getattr(options, name) for name in names}


def _argv(verb: str, options: GatewayOptions | WorkerOptions) -> tuple[str, ...]:
    return (sys.executable, "-m", "commands.main", verb, *config.to_argv(options))


def _socket(folder: Path, name: str) -> str:
    return f"unix:{folder / name}.grpc"


def vacate(board: CoreBoard | None, seats: Sequence[str], name: str) -> None:
    """Clears what a process that is gone has left on the board. seats: names of the workers."""
    if board is not None and name in seats:
        board.vacate(seats.index(name))


def _room_line(name: str, facts: Mapping[str, Field]) -> str:
    full = f"{facts['full_requests']} full-length requests of {facts['tokens_max']}"
    return f"{name}: {facts['blocks']} KV blocks hold {facts['tokens']} tokens, {full}"


def _ready_line(said: Mapping[str, Mapping[str, Field]], options: ServeOptions, seconds: float) -> str:
    fields = dict(said[_GATEWAY]) | ({"gateways": options.gateways} if options.gateways > 1 else {})
    fields |= {
        "prefill": options.prefill,
        "decode": options.decode,
        "seconds": f"{seconds:.1f}",
    }
    return " ".join(("ready", *(f"{name}={value}" for name, value in fields.items())))


@contextmanager
def _signals(supervisor: Supervisor) -> Iterator[asyncio.Event]:
    """The first signal asks to end, the second kills."""
    loop, asked_to_end, times = asyncio.get_running_loop(), asyncio.Event(), count()

    def on_signal() -> None:
        asked_to_end.set()
        if next(times) > 0:
            supervisor.kill()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        yield asked_to_end
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _say(line: str) -> None:
    _say_raw(f"{_PROG}: {line}")


def _say_raw(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
