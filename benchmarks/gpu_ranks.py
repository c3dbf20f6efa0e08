"""Whether ranks on several GPUs gather, over NCCL, the bits that each of them had. Needs torch alone.

Each rank is a process with a device of its own. On a processor the same runs over gloo:
`python -m benchmarks.gpu_ranks --device cpu --ranks 2`; what it says of NCCL then is nothing.
"""

import argparse
import math
import multiprocessing
import os
import sys
import tempfile

import torch

from engine.collective import Share
from tensor_parallel.group import TorchCollective

SHAPES = ((1, 48), (3, 512), (256, 2048))
"""Rows and columns of a rank's part."""


def gathered_error(device: str, ranks: int) -> float:
    """0 where every rank had from all others, bit for bit, what these had; infinity where one had not, or failed."""
    spawning = multiprocessing.get_context("spawn")
    with tempfile.NamedTemporaryFile() as rendezvous:
        processes = [
            spawning.Process(target=_gather, args=(Share(rank=rank, size=ranks), rendezvous.name, device))
            for rank in range(ranks)
        ]
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


def _part(rank: int, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rank))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    error = gathered_error(arguments.device, arguments.ranks)
    print("the same bits" if error == 0 else "FAULT")
    return 0 if error == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
