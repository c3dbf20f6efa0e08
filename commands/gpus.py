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
    """workers: name, device and ranks of each, in order. gpus: that there are. Whoever names no GPU gets as many in a
    row as it has ranks, where the fewest are, those who name theirs among them."""
    crowd: Counter[int] = Counter()
    taken: dict[str, range] = {}
    for name, device, ranks in sorted(workers, key=lambda worker: worker[1] == "cuda"):
        rows = [range(first, first + ranks) for first in range(max(1, gpus - ranks + 1))]
        if device.startswith("cuda:"):
            first = int(device.partition(":")[2])
            rows = [range(first, first + ranks)]
        elif device != "cuda":
            continue
        taken[name] = min(rows, key=lambda row: sorted((crowd[gpu] for gpu in row), reverse=True))
        crowd.update(taken[name])
    return {
        name: Seat(f"cuda:{taken[name][0]}", max(crowd[gpu] for gpu in taken[name]))
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
