"""What this process may use of its machine: cores and memory. Asked once, at start-up."""

import ctypes
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from service.startup import StartupError

KEPT_BYTES = 64 * 1024 * 1024
"""Of freed memory in a worker: about what is on its way to it at once."""

TURN_S = 0.0002
"""Of one thread in the interpreter, while another waits for it: a few messages' worth."""

SLICE_S = 0.02
"""Ten times what is usual: of threads that have a core to themselves, but for what wakes and soon sleeps again."""

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_ATTR = "IIQiIQQQ"
"""Of struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period; times in ns."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3), glibc
_MMAP_THRESHOLD_MAX = 32 * 1024 * 1024


def bind_to_cores(cores: Sequence[int] | None) -> None:
    """Run this thread, and the threads it starts, on these cores only. None leaves it as it is."""
    if cores:
        os.sched_setaffinity(0, cores)


def require_cores(flag: str, cores: Sequence[int] | None) -> None:
    """Raises StartupError, which names the flag, for cores that this process may not use or that are not there."""
    here = os.sched_getaffinity(0)
    missing = [str(core) for core in cores or () if core not in here]
    if missing:
        ours = ", ".join(map(str, sorted(here)))
        raise StartupError(f"{flag}: no core {', '.join(missing)} here: this process has {ours}")


def take_short_turns() -> None:
    """Let this process' threads have the interpreter for TURN_S at a time and not, as usual, for 5 ms: one that moves
    blocks or tokens must not stand behind one that computes in small pieces."""
    sys.setswitchinterval(TURN_S)


def give_way(nice: int) -> None:
    """Let others of this machine go first, where they want the same cores: this thread, and all that it starts from now
    on. nice: see nice(2), 0 for nobody. Among processes of different sessions it says nothing where the system takes
    each session for one (sched_autogroup in sched(7))."""
    os.nice(nice)


def compute_in_long_slices() -> bool:
    """This thread, and those that it starts from now on, compute for SLICE_S where others want the same core: whoever
    wakes with a shorter slice, as is usual, then goes first instead of waiting for the end of this one's (EEVDF, Linux
    6.12; sched_setattr(2)). False where the system has no such thing."""
    call = _SCHED_SETATTR.get(os.uname().machine)
    if call is None:
        return False
    size, nice = struct.calcsize(_SCHED_ATTR), os.getpriority(os.PRIO_PROCESS, 0)
    attributes = struct.pack(_SCHED_ATTR, size, os.SCHED_OTHER, 0, nice, 0, int(SLICE_S * 1e9), 0, 0)
    return bool(ctypes.CDLL(None).syscall(call, 0, attributes, 0) == 0)


def free_memory_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that a new process can take without swapping: what the machine has (MemAvailable of proc(5)) and what each
    control group of this process leaves it (memory.max of version 2)."""
    return min([_available_bytes(proc / "meminfo"), *_left_in_groups(proc / "self/cgroup", groups)])


def _available_bytes(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        name, value = line.split(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_in_groups(own: Path, groups: Path) -> Iterator[int]:
    """Of each group with a limit, from the process's own upwards."""
    with suppress(OSError):
        path = next((line[3:] for line in own.read_text().splitlines() if line.startswith("0::")), "/")
        group = groups / path.strip("/")
        for each in (group, *group.parents):
            if each == groups.parent:
                return
            with suppress(OSError, ValueError):  # no limit, or none of this version
                limit = int((each / "memory.max").read_text())
                yield max(0, limit - _used_bytes(each))


def _used_bytes(group: Path) -> int:
    """Without the file pages that the system drops when it needs the room."""
    lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    droppable = next((int(size) for name, size in lines if name == "inactive_file"), 0)
    return int((group / "memory.current").read_text()) - droppable


def keep_freed_memory(kept_bytes: int) -> None:
    """Let the C library keep so much freed memory rather than return it to the system and fault it in again
    with the next message: most of what a receiver of large messages would otherwise do. kept_bytes: per arena
    of the allocator. Does nothing where the library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _MMAP_THRESHOLD_MAX)
        mallopt(_TRIM_THRESHOLD, kept_bytes)
