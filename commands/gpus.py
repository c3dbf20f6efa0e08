"""Which GPUs the workers of `serve` compute on, and with how many others each shares its own."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_DRIVER = Path("/proc/driver/nvidia/gpus")


class Seat(NamedTuple):
    """device: see engine.devices. sharers: workers on the busiest of its GPUs, itself among them."""

    device: str
    sharers: int


def deal_gpus(workers: Sequence[tuple[str, str, int]], gpus: int) -> dict[str, Seat]:
    """workers: name, device and ranks of each, in order. gpus: that there are. Whoever names no GPU gets as many as it
    has ranks, the next ones; when too few are left, it starts over with the first."""
    firsts: dict[str, int] = {}
    left = 0
    for name, device, ranks in workers:
        if device == "cuda":
            firsts[name] = left = left if left + ranks <= gpus else 0
            left += ranks
        elif device.startswith("cuda:"):
            firsts[name] = int(device.partition(":")[2])
    taken = {name: range(firsts[name], firsts[name] + ranks) for name, _, ranks in workers if name in firsts}
    crowd = Counter(gpu for each in taken.values() for gpu in each)
    return {
        name: Seat(f"cuda:{firsts[name]}", max(crowd[gpu] for gpu in taken[name]))
        if name in taken
        else Seat(device, len(workers))
        for name, device, _ in workers
    }


def visible_gpus(environ: Mapping[str, str], driver: Path = _DRIVER) -> int:
    """How many a process with this environment sees, as far as that can be told without asking the driver; at least
    one: whoever finds out more says so."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return max(1, len([each for each in listed.split(",") if each.strip()]))
    return max(1, len(list(driver.glob("*"))))
