"""The process of a rank that follows: reads its settings, ties its life to the first rank's, and does as it is told.

Started by `commands.ranks`; no command of an operator's.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence

import structlog

from engine.collective import Share
from engine.errors import RankLost
from engine.kernels.core_share import CoreShare
from engine.wishes import EngineWishes
from service import config, logs, parent
from service.config import RankOptions
from service.garbage import freeze_garbage
from service.machine import bind_to_cores, give_way
from service.model_source import resolve_model
from service.pulse import other_threads
from service.worker_process import EXIT_CRASHED
from tensor_parallel.follower import follow
from tensor_parallel.followers import Meeting


def main(argv: Sequence[str]) -> int:
    """Returns 0 when told to stop, EXIT_REFUSED when it has said why it cannot start, else EXIT_CRASHED."""
    options = config.load(RankOptions, argv, config.environment(), prog="crossdock rank")
    parent.die_with_parent()
    _end_with_the_first_rank()
    fields = {"worker_id": options.worker_id, "rank": str(options.rank)}
    logs.configure(level=options.log_level, log_format=options.log_format, fields=fields)
    give_way(options.nice)
    bind_to_cores(options.cores)
    model = resolve_model(options.model)
    wishes = EngineWishes.of(options, model, CoreShare(own=options.cores or ()))
    share = Share(rank=options.rank, size=options.tensor_parallel_size)
    meeting = Meeting(endpoint=options.endpoint, memory=options.memory, rendezvous=options.rendezvous)
    try:
        return follow(wishes, share, meeting, _loaded)
    except RankLost as error:
        structlog.get_logger().critical("a rank ends", reason=str(error))
        return EXIT_CRASHED


def _end_with_the_first_rank() -> None:
    """Whoever signals all processes of a worker wants it to drain, and that takes every rank."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _loaded() -> tuple[int, ...]:
    """What there is stays. Returns the kernel ids of all threads."""
    freeze_garbage()
    return (threading.get_native_id(), *sorted(other_threads()))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # threads of a group that is broken may not end
