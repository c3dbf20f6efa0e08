"""Whether ranks on several GPUs gather, over NCCL, the bits that each of them had, and whether a pair of workers hands
over the bits of a block. Needs torch and numpy alone.

Each rank, and each end of a pair, is a process with a device of its own. On a processor the same runs over gloo:
`python -m benchmarks.gpu_ranks --device cpu --ranks 2`; what it says of NCCL then is nothing.
"""

import argparse
import math
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from benchmarks.gpu_runs import end_with_parent
from engine.collective import Share
from kvtransfer.dist_group import CONNECT_MS, SOURCE_RANK, TARGET_RANK, GroupOptions, Rendezvous, join
from tensor_parallel.group import TorchCollective

SHAPES = ((1, 48), (3, 512), (256, 2048))
"""Rows and columns of a rank's part."""

BLOCK_BYTES = (1, 4096, 2 << 20)
"""Of blocks that a pair moves, one after the other."""

RUN_S = 60.0
"""For all processes together, to start, to do what they are for and to end."""


def gathered_error(device: str, ranks: int) -> float:
    """0 where every rank had from all others, bit for bit, what these had; infinity where one had not, or failed."""
    with tempfile.NamedTemporaryFile() as rendezvous:
        return _run(
            _gather, [(Share(rank=rank, size=ranks), rendezvous.name, device) for rank in range(ranks)]
        )


def moved_error(device: str) -> float:
    """0 where blocks came over, bit for bit, from one end of a pair to the other, as between workers and as
    soon as these want them; infinity where one did not."""
    ends = multiprocessing.get_context("spawn").Pipe()
    return _run(_move, [(rank, ends[rank], device) for rank in (SOURCE_RANK, TARGET_RANK)])


def _run(work: Callable[..., None], everybody: list[tuple[object, ...]]) -> float:
    """Each in a process of its own; 0 where all end well. Raises TimeoutError when some do not end, and ends them."""
    spawning = multiprocessing.get_context("spawn")
    processes = [spawning.Process(target=work, args=arguments) for arguments in everybody]
    for process in processes:
        process.start()
    late_at = time.monotonic() + RUN_S
    for process in processes:
        process.join(max(0.0, late_at - time.monotonic()))
    late = [process for process in processes if process.exitcode is None]
    for process in late:
        process.kill()
    if late:
        raise TimeoutError(f"{len(late)} of {len(processes)} processes do not end in {RUN_S:.0f} s")
    return 0.0 if all(process.exitcode == 0 for process in processes) else math.inf


def _gather(share: Share, rendezvous: str, device_type: str) -> None:
    end_with_parent()
    device = torch.device(device_type, share.rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    collective = TorchCollective(share)
    collective.join(rendezvous, device)
    same = True
    for rows, columns in SHAPES:
        parts = [_part(rank, rows, columns) for rank in range(share.size)]
        gathered = collective.all_gather(parts[share.rank].to(device)).cpu()
        same = same and torch.equal(gathered, torch.cat(parts, dim=1))
    os._exit(0 if same else 1)  # a group's own threads are not waited for


def _move(rank: int, other: Connection, device_type: str) -> None:
    """As patient as workers are with each other, and from when both are there, as these are when they meet."""
    end_with_parent()
    # What NCCL listens on is its own choice.
    options = GroupOptions(allow_remote=True, device=f"{device_type}:{rank}")
    torch.zeros(1, device=device_type if device_type == "cpu" else options.device)
    other.send("here")
    other.recv()
    rendezvous = Rendezvous(lambda key, value: other.send((key, value)), options.join_s)
    threading.Thread(target=_listen, args=(other, rendezvous), daemon=True).start()
    began = time.monotonic()
    group = join("nccl" if device_type == "cuda" else "gloo", rank, rendezvous, options)
    same = time.monotonic() - began < CONNECT_MS / 1000
    for number, size in enumerate(BLOCK_BYTES):
        block = torch.randint(256, (size,), generator=torch.Generator().manual_seed(number)).byte()
        if rank == SOURCE_RANK:
            group.send(number, block).wait(options.move_s)
        else:
            place = torch.zeros(size, dtype=torch.uint8)
            group.receive(number, place).wait(options.move_s)
            same = same and torch.equal(place, block)
    rendezvous.set(f"done {rank}", b"")
    rendezvous.get(f"done {1 - rank}")  # a send that was waited for may still be read
    os._exit(0 if same else 1)


def _listen(other: Connection, rendezvous: Rendezvous) -> None:
    while True:
        try:
            rendezvous.learn(*other.recv())
        except EOFError:
            return


def _part(rank: int, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rank))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    error = max(gathered_error(arguments.device, arguments.ranks), moved_error(arguments.device))
    print("the same bits" if error == 0 else "FAULT")
    return 0 if error == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
