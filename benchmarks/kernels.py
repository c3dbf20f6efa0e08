"""How far the CPU kernels are from what the machine can do, on the shapes of SmolLM2-135M.

Prints one line per product and per attention case: the time, and the floor under it, which is the larger of
bytes / measured read bandwidth and floating-point operations / the best rate of the largest product.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from engine.kernels.backend import AttentionMeta, scale_elements
from engine.kernels.cpu.build import COMPILERS, built, default_cache_folder, host_flags
from engine.kernels.cpu.crew import Crew
from engine.kernels.cpu.library import Library
from engine.kernels.cpu.operations import CpuOperations

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 576, 9, 3, 64, 1536, 49152
BLOCK_SIZE = 16
LAYERS = 4  # enough that the caches of a large batch do not fit the processor's
LINEARS = {
    "qkv": (HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
    "output": (HIDDEN, HIDDEN),
    "gate_up": (HIDDEN, 2 * FFN),
    "down": (FFN, HIDDEN),
    "lm_head": (HIDDEN, VOCAB),
}
ATTENTION = ((1, 1, 512), (8, 1, 512), (32, 1, 512), (8, 1, 2048), (1, 512, 512), (1, 512, 2048))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was measured here: bytes per second read from memory, operations per second of the best product."""

    bandwidth: float
    rate: float

    def floor_s(self, num_bytes: float, operations: float) -> float:
        return max(num_bytes / self.bandwidth, operations / self.rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    bandwidth = measure_bandwidth(arguments.repeats)
    print(f"{arguments.threads} threads, memory reads at {bandwidth / 1e9:.1f} GB/s")
    library = Library(built(default_cache_folder(), COMPILERS, host_flags()))
    for dtype in (torch.float32, torch.bfloat16):
        kernels = CpuOperations(dtype, Crew(library, arguments.threads))
        rate = measure_rate(kernels, arguments.repeats)
        print(f"\n{dtype}, best product {rate / 1e9:.0f} GF/s")
        machine = Machine(bandwidth=bandwidth, rate=rate)
        print_linears(kernels, machine, arguments.repeats)
        for kv_dtype in (dtype, torch.int8):
            print_attention(kernels, machine, kv_dtype, arguments.repeats)


def measure_bandwidth(repeats: int) -> float:
    """Bytes per second of summing 512 MiB."""
    memory = torch.ones(2**26, dtype=torch.float64)
    return memory.nbytes / fastest_s(memory.sum, repeats)


def measure_rate(kernels: CpuOperations, repeats: int) -> float:
    packed = kernels.pack(torch.randn(2048, 1024))
    x = torch.randn(504, 1024)
    return 2 * 504 * 1024 * 2048 / fastest_s(lambda: kernels.linear(x, packed), repeats)


def print_linears(kernels: CpuOperations, machine: Machine, repeats: int) -> None:
    print(f"{'product':>10} {'rows':>5} {'us':>9} {'GF/s':>7} {'GB/s':>6} {'floor us':>9} {'of floor':>9}")
    for name, (inputs, outputs) in LINEARS.items():
        packed = kernels.pack(torch.randn(outputs, inputs))
        for rows in (1, 8, 32, 256):
            x = torch.randn(rows, inputs)
            taken = fastest_s(partial(kernels.linear, x, packed), repeats)
            num_bytes = inputs * outputs * kernels.dtype.itemsize
            operations = 2.0 * rows * inputs * outputs
            floor = machine.floor_s(num_bytes, operations)
            print(
                f"{name:>10} {rows:>5} {taken * 1e6:>9.1f} {operations / taken / 1e9:>7.1f} "
                f"{num_bytes / taken / 1e9:>6.1f} {floor * 1e6:>9.1f} {floor / taken:>9.0%}"
            )


def print_attention(kernels: CpuOperations, machine: Machine, kv_dtype: torch.dtype, repeats: int) -> None:
    print(f"cache in {kv_dtype}")
    print(
        f"{'attention':>10} {'rows':>5} {'context':>8} {'us':>9} {'ns/token-kv-head':>17} {'GF/s':>7} {'of floor':>9}"
    )
    for sequences, rows, context in ATTENTION:
        taken = time_attention(kernels, kv_dtype, sequences, rows, context, repeats)
        tokens = sequences * context * KV_HEADS
        pairs = sequences * (rows * (context - rows) + rows * (rows + 1) / 2)
        operations = pairs * HEADS * HEAD_DIM * 4
        floor = machine.floor_s(tokens * 2 * row_elements(kv_dtype) * kv_dtype.itemsize, operations)
        print(
            f"{sequences:>8} x {rows:>5} {context:>8} {taken * 1e6:>9.1f} {taken * 1e9 / tokens:>17.1f} "
            f"{operations / taken / 1e9:>7.1f} {floor / taken:>9.0%}"
        )


def row_elements(kv_dtype: torch.dtype) -> int:
    """Of a head of one position in the cache."""
    return HEAD_DIM + scale_elements(kv_dtype)


def time_attention(
    kernels: CpuOperations, kv_dtype: torch.dtype, sequences: int, rows: int, context: int, repeats: int
) -> float:
    """Seconds of one layer, blocks scattered."""
    blocks = sequences * context // BLOCK_SIZE
    kv = torch.empty(blocks, LAYERS, 2, BLOCK_SIZE, KV_HEADS, row_elements(kv_dtype), dtype=kv_dtype)
    slots = torch.arange(blocks * BLOCK_SIZE)
    for layer in range(LAYERS):
        k, v = torch.randn(2, len(slots), KV_HEADS, HEAD_DIM)
        kernels.write_kv(kv, layer, k, v, slots)
    q = torch.randn(sequences * rows, HEADS, HEAD_DIM)
    meta = AttentionMeta(
        positions=torch.arange(context - rows, context, dtype=torch.int32).repeat(sequences),
        slots=torch.zeros(sequences * rows, dtype=torch.int64),
        query_starts=torch.arange(0, sequences * rows + 1, rows, dtype=torch.int32),
        context_lengths=torch.full((sequences,), context, dtype=torch.int32),
        block_tables=torch.randperm(blocks).to(torch.int32).view(sequences, -1),
    )

    def all_layers() -> None:
        for layer in range(LAYERS):
            kernels.attention(q, kv, layer, meta, HEAD_DIM**-0.5, None)

    return fastest_s(all_layers, repeats) / LAYERS


def fastest_s(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of several runs, the first one not counted."""
    work()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)


if __name__ == "__main__":
    main()
