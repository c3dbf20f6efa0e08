"""What this process may use of its machine: cores and memory. Asked once, at start-up."""

import os
from collections.abc import Sequence


def bind_to_cores(cores: Sequence[int] | None) -> None:
    """Run this thread, and the threads it starts, on these cores only. None leaves it as it is."""
    if cores:
        os.sched_setaffinity(0, cores)


def free_memory_bytes() -> int:
    """Memory that a new process can take without swapping (MemAvailable of proc(5))."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            name, value = line.split(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
