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
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from engine.collective import Share
from kvtransfer.dist_group import SOURCE_RANK, TARGET_RANK, GroupOptions, Rendezvous, join
from tensor_parallel.group import TorchCollective

SHAPES = ((1, 48), (3, 512), (256, 2048))
"""Rows and columns of a rank's part."""

BLOCK_BYTES = (1, 4096, 2 << 20)
"""Of blocks that a pair moves, one after the other."""

PAIR_S = 60.0
"""For making a pair, and for each block: longer than any that works takes."""


def gathered_error(device: str, ranks: int) -> float:
    """0 where every rank had from all others, bit for bit, what these had; infinity where one had not, or failed."""
    with tempfile.NamedTemporaryFile() as rendezvous:
        return _run(
            _gather, [(Share(rank=rank, size=ranks), rendezvous.name, device) for rank in range(ranks)]
        )


def moved_error(device: str) -> float:
    """0 where blocks came over, bit for bit, from one end of a pair to the other, as between workers; infinity where
    one did not."""
    ends = multiprocessing.get_context("spawn").Pipe()
    return _run(_move, [(rank, ends[rank], device) for rank in (SOURCE_RANK, TARGET_RANK)])


def _run(work: Callable[..., None], everybody: list[tuple[object, ...]]) -> float:
    """Each in a process of its own; 0 where all end well."""
    spawning = multiprocessing.get_context("spawn")
    processes = [spawning.Process(target=work, args=arguments) for arguments in everybody]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return 0.0 if all(process.exitcode == 0 for process in processes) else math.inf


def _gather(share: Share, rendezvous: str, device_type: str) -> None:
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
    options = GroupOptions(
        allow_remote=True, device=f"{device_type}:{rank}", join_s=PAIR_S, move_s=PAIR_S
    )  # what NCCL listens on is its own choice
    rendezvous = Rendezvous(lambda key, value: other.send((key, value)), PAIR_S)
    threading.Thread(target=_listen, args=(other, rendezvous), daemon=True).start()
    group = join("nccl" if device_type == "cuda" else "gloo", rank, rendezvous, options)
    same = True
    for number, size in enumerate(BLOCK_BYTES):
        block = torch.randint(256, (size,), generator=torch.Generator().manual_seed(number)).byte()
        if rank == SOURCE_RANK:
            group.send(number, block).wait(PAIR_S)
        else:
            place = torch.zeros(size, dtype=torch.uint8)
            group.receive(number, place).wait(PAIR_S)
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
