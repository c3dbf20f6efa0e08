"""One process: reads its settings, ties its life to its parent's if asked, and runs it.

The only place that turns "cannot start" into one line and exit code 2; to lose a rank meanwhile is to crash. It knows
neither what a process serves nor who supervises it.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from service import config, logs, parent, readiness
from service.flags import ConfigError
from service.startup import EXIT_CODE, StartupError

_Options = TypeVar("_Options", bound=config.Options)


def gateway_main(argv: Sequence[str]) -> int:
    """`crossdock gateway`."""

    def run(options: config.GatewayOptions) -> None:
        from gateway.gateway import run as run_gateway

        run_gateway(options)

    return _process("gateway", config.GatewayOptions, argv, run)


def prefill_worker_main(argv: Sequence[str]) -> int:
    """`crossdock prefill-worker`."""

    def run(options: config.WorkerOptions) -> None:
        from commands.worker import run as run_worker
        from prefill_worker.role import PrefillRole

        _without_library_errors(partial(run_worker, role=PrefillRole()), options)

    return _process("prefill-worker", config.WorkerOptions, argv, run)


def decode_worker_main(argv: Sequence[str]) -> int:
    """`crossdock decode-worker`."""

    def run(options: config.DecodeWorkerOptions) -> None:
        from commands.worker import run as run_worker
        from decode_worker.role import DecodeRole

        _without_library_errors(partial(run_worker, role=DecodeRole()), options)

    return _process("decode-worker", config.DecodeWorkerOptions, argv, run)


def _process(
    verb: str, options_class: type[_Options], argv: Sequence[str], run: Callable[[_Options], None]
) -> int:
    prog = f"crossdock {verb}"
    try:
        options = config.load(options_class, argv, config.environment(), prog=prog)
    except ConfigError as error:
        print(*(f"{prog}: {line}" for line in error.lines), sep="\n", file=sys.stderr)
        return EXIT_CODE
    if options.die_with_parent:
        parent.die_with_parent()
    logs.configure(level=options.log_level, log_format=options.log_format, fields=_fields(verb, options))
    try:
        run(options)
    except StartupError as error:
        _refuse(prog, str(error), supervised=options.die_with_parent)
        return EXIT_CODE
    return 0


def _fields(verb: str, options: config.Options) -> dict[str, str]:
    pool = {"pool": verb.removesuffix("-worker")}
    return pool | {"worker_id": options.worker_id} if isinstance(options, config.WorkerOptions) else pool


def _without_library_errors(run: Callable[[_Options], None], options: _Options) -> None:
    from engine.errors import EngineError, RankLost
    from kvtransfer.errors import TransferError
    from service.worker_process import crash

    try:
        run(options)
    except RankLost as error:
        crash(error)
    except (EngineError, TransferError) as error:
        raise StartupError(str(error)) from error


def _refuse(prog: str, error: str, *, supervised: bool) -> None:
    """Whoever supervises us repeats the line; said twice it would read as two mistakes."""
    line = " ".join(error.split())
    if supervised:
        readiness.refuse(line)
    else:
        print(f"{prog}: {line}", file=sys.stderr)
