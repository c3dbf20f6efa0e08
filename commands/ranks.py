"""The ranks of one worker: which cores each has, and the processes of those that follow.

Called by the worker's process, which is the first rank. Does nothing where there is only that one.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from commands.runtime_folder import runtime_folder
from engine.collective import Share
from engine.errors import RankLost
from engine.model.config import read_config
from service import config
from service.config import EngineOptions, RankOptions, WorkerOptions
from service.pulse import other_threads
from service.startup import StartupError
from tensor_parallel.followers import Meeting, ProcessFollowers
from tensor_parallel.group import STALL_S, require_group
from tensor_parallel.wire import MESSAGE_BYTES_MAX, batch_bytes_max


def cores_of(cores: tuple[int, ...], share: Share) -> tuple[int, ...]:
    """Those of the worker that are the rank's: as many for each, and at least one. What is left over is nobody's; where
    there are too few, ranks share them."""
    each = max(1, len(cores) // share.size)
    return tuple(cores[(share.rank * each + i) % len(cores)] for i in range(each)) if cores else ()


def threads_of(threads: int | None, cores: tuple[int, ...], share: Share) -> int:
    """threads: of all ranks together, None for as many as there are cores."""
    return max(1, (threads or len(cores)) // share.size)


@contextmanager
def following(
    options: WorkerOptions,
    model: Path,
    nice: int,
    on_lost: Callable[[RankLost], None],
    stall_s: float = STALL_S,
) -> Iterator[ProcessFollowers | None]:
    """The processes of all ranks but this one, until the block ends; None where there are none. They load at once.

    nice: how far they make way. on_lost: see `ProcessFollowers`. stall_s: after which one that others wait for is given
    up. What cannot be is refused before there is one, as ModelError, CapacityError or StartupError.
    """
    size = options.tensor_parallel_size
    if size == 1:
        yield None
        return
    _require(options, model)
    with runtime_folder() as folder:
        spawn = partial(_spawn, options, nice)
        try:
            followers = ProcessFollowers(
                size,
                folder,
                spawn,
                on_lost,
                device=options.device,
                stall_s=stall_s,
                own_threads=other_threads,
            )
        except OSError as error:
            raise StartupError(f"a rank of {size} cannot be started: {error.strerror}") from error
        try:
            yield followers
        except BaseException:
            followers.kill()
            raise
        followers.stop()


def _require(options: WorkerOptions, model: Path) -> None:
    size = options.tensor_parallel_size
    if sys.platform != "linux":
        raise StartupError("--tensor-parallel-size: several ranks need Linux")
    if options.async_scheduling:
        raise StartupError(f"async_scheduling needs tensor_parallel_size 1, not {size}")
    require_group(options.device)
    architecture = read_config(model)
    architecture.require_shares(size)
    _require_room(options, options.max_model_len or architecture.max_position)


def _require_room(options: WorkerOptions, max_model_len: int) -> None:
    """Whatever may be in a step can be said to the other ranks."""
    largest = batch_bytes_max(
        runs=options.max_num_seqs,
        tokens=options.max_num_batched_tokens + options.max_num_seqs,
        blocks=-(-max_model_len // options.block_size),
    )
    if largest > MESSAGE_BYTES_MAX:
        raise StartupError(
            f"tensor_parallel_size {options.tensor_parallel_size}: a step of max_num_seqs {options.max_num_seqs}, "
            f"max_num_batched_tokens {options.max_num_batched_tokens}, max_model_len {max_model_len} and block_size "
            f"{options.block_size} may take {largest} bytes to tell, more than {MESSAGE_BYTES_MAX}"
        )


def _spawn(options: WorkerOptions, nice: int, share: Share, meeting: Meeting) -> subprocess.Popen[bytes]:
    cores = options.cores or ()
    fields = {name: getattr(options, name) for name in EngineOptions.model_fields} | {
        "log_level": options.log_level,
        "log_format": options.log_format,
        "die_with_parent": True,
        "worker_id": options.worker_id,
        "rank": share.rank,
        "endpoint": meeting.endpoint,
        "memory": meeting.memory,
        "rendezvous": meeting.rendezvous,
        "threads": threads_of(options.threads, cores, share),
        "cores": cores_of(cores, share) or None,
        "nice": nice,
    }
    argv = config.to_argv(RankOptions.model_validate(fields))
    return subprocess.Popen(
        [sys.executable, "-m", "commands.follower", *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=config.child_environment(config.environment(), {}),
        pass_fds=(meeting.memory, meeting.rendezvous),
    )
