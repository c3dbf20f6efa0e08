"""What each GPU kernel takes of the chip, from ahead-of-time compilation: needs no GPU.

Launches every kernel, in the shapes that it is used in, on a driver that compiles for compute capability
8.0 and 9.0 and runs nothing. Prints a table of registers, spilled bytes and shared memory. --write FILE puts it
between the marks in FILE, --check FILE fails where FILE has another one; both fail when a kernel spills on 9.0.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.gpu_checks import INTEGERS, quantized_weight
from benchmarks.gpu_scene import LAYER, Geometry, Scene
from engine.kernels.backend import CODE_MAX, dtype_name, scale_elements
from engine.kernels.composed import Angles
from engine.kernels.triton import blocks, heads, rows, sampling
from engine.kernels.triton.attention import attention
from engine.kernels.triton.linear import CHUNK, PackedFloats, float_linear
from engine.kernels.triton.quantized import pack_integers, quantized_linear
from engine.kernels.triton.tiles import LinearTile, linear_tile, quantized_tile
from engine.sequence import SamplingParams

CAPABILITIES = (80, 90)
BEGIN, END = "<!-- made by benchmarks/gpu_table.py -->", "<!-- end -->"
SHARED_MAX_BYTES = {80: 163 << 10, 90: 227 << 10}

HOST = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Something that launches kernels, as the backend does."""

    shape: str
    run: Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Launched:
    """One kernel as it was compiled. products: kind and shape of each matrix instruction. sums: how what is summed, in
    products and along rows, lies over the threads, as (shape, layout). fused: whether a float64 is multiplied and added
    without rounding in between."""

    kernel: str
    shape: str
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    products: tuple[tuple[str, str], ...]
    sums: tuple[tuple[str, str], ...]
    fused: bool


class CompilingDriver:
    """In place of Triton's: each thread has a GPU of the capability it asked for, on which nothing runs."""

    def __init__(self) -> None:
        self._local = threading.local()

    def compile(self, call: Call, capability: int) -> list[Launched]:
        """Every kernel that the call launches. Raises what Triton raises when it cannot compile."""
        self._local.capability, self._local.kernels = capability, []
        call.run()
        return [_launched(call, kernel) for kernel in self._local.kernels]

    def install(self) -> None:
        """For the rest of this process."""
        driver.set_active(self)
        launch = JITFunction.run

        def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            made = launch(kernel, *arguments, grid=grid, warmup=True, **options)
            self._local.kernels.append(made)
            return made

        JITFunction.run = compile_only

    def get_current_device(self) -> int:
        return self._local.capability

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._local.capability, 32)


def calls() -> Iterator[Call]:
    yield from attention_calls()
    yield from product_calls()
    yield from other_calls()


def attention_calls() -> Iterator[Call]:
    half, single = DTYPES
    shapes = (
        (half, 64, 4, None),
        (half, 128, 4, None),
        (half, 128, 4, 300),
        (half, 256, 4, None),
        (single, 64, 3, None),
        *product(CODE_MAX, (128,), (4,), (None,)),
    )
    for dtype, dim, group, window in shapes:
        geometry = Geometry(kv_heads=2, group=group, dim=dim, block_size=16, dtype=dtype, window=window)
        scene = Scene([20, 9], geometry, HOST)
        name = f"{dtype_name(dtype)}, d = {dim}, {group} heads a key{', window' if window else ''}"
        for runs in ([(0, 0, 20), (1, 0, 9)], [(0, 19, 20), (1, 8, 9)]):
            arguments = (scene.rows(runs), scene.cache, LAYER, scene.meta(runs), dim**-0.5, window)
            yield Call(shape=name, run=partial(attention, *arguments))


def product_calls() -> Iterator[Call]:
    outputs, inputs = 256, 2 * CHUNK
    x, bias = torch.zeros(17, inputs), torch.zeros(outputs)
    for dtype in DTYPES:
        packed = PackedFloats(weight=torch.zeros(outputs, inputs, dtype=dtype), bias=bias)
        yield from _both_ways(str(dtype)[6:], linear_tile(dtype), partial(float_linear, x, packed))
    for dtype, (bits, offsets) in product(DTYPES, INTEGERS):
        packed_integers = pack_integers(quantized_weight(outputs, inputs, bits, offsets), bias, HOST)
        multiply = partial(quantized_linear, x, packed_integers, dtype=dtype)
        yield from _both_ways(f"int{bits}, {offsets}, x {str(dtype)[6:]}", quantized_tile(dtype), multiply)


def _both_ways(name: str, tile: LinearTile, multiply: Callable[..., object]) -> Iterator[Call]:
    shape = f"{name}, {tile.rows} x {tile.columns} x {tile.inner}"
    for split in (False, True):
        yield Call(shape=shape, run=partial(multiply, tile=tile, split=split))


def other_calls() -> Iterator[Call]:
    q, k, v = torch.zeros(3, 48, 128).split([32, 8, 8], dim=1)
    places, slots = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    angles = torch.zeros(32, 64)
    for dtype in (torch.bfloat16, *CODE_MAX):
        cache = torch.zeros(2, 2, 2, 16, 8, 128 + scale_elements(dtype), dtype=dtype)
        run = partial(heads.rotate_and_write, q, k, v, Angles(places, angles, angles), cache, 0, slots)
        yield Call(shape=dtype_name(dtype), run=run)
    yield Call(shape="n = 128 of a head", run=partial(rows.rms_norm, q, torch.zeros(128), 1e-5))
    for width in (4096, 8192):
        x = torch.zeros(3, width)
        run = partial(rows.add_rms_norm, x, x.clone(), torch.zeros(width), 1e-5)
        yield Call(shape=f"n = {width}, residual", run=run)
    yield Call(shape="", run=partial(rows.silu_mul, torch.zeros(3, 4096)))
    yield Call(shape="", run=partial(blocks.gather_blocks, cache, torch.zeros(1, dtype=torch.int64)))
    yield Call(shape="", run=partial(sampling.draw, torch.zeros(1, 4096), [0], [SamplingParams()], [0]))


def _launched(call: Call, kernel: Any) -> Launched:
    registers, stack = _resources(kernel.asm["cubin"])
    found = re.findall(r"(wgmma|mma)(?:\.mma_async)?\.\S*?(m\d+n\d+k\d+)", kernel.asm["ptx"])
    return Launched(
        kernel=kernel.metadata.name,
        shape=call.shape,
        warps=kernel.metadata.num_warps,
        registers=registers,
        spilled_bytes=stack,
        shared_bytes=kernel.metadata.shared,
        products=tuple(sorted(set(found))),
        sums=_sums(kernel.asm["ttgir"]),
        fused="fma.rn.f64" in kernel.asm["ptx"],
    )


def _sums(code: str) -> tuple[tuple[str, str], ...]:
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    along_rows = re.findall(r"\}\) : \(tensor<([^,>]*), (#\w+)>\)", code)
    products = re.findall(r"(?:tt\.dot|ttng\.warp_group_dot) .* -> tensor<([^,>]*), (#\w+)>", code)
    return tuple(sorted({(shape, layouts[name]) for shape, name in along_rows + products}))


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers of a thread, bytes of its stack, which is where registers are spilled to)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ((registers, stack, local),) = re.findall(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", said)
    return int(registers), int(stack) + int(local)


def compiled() -> dict[int, list[Launched]]:
    """By capability, in the same order."""
    compiling, every = CompilingDriver(), list(calls())
    compiling.install()
    with ThreadPoolExecutor(max_workers=len(CAPABILITIES)) as pool:
        found = pool.map(
            lambda one: [each for call in every for each in compiling.compile(call, one)], CAPABILITIES
        )
        return dict(zip(CAPABILITIES, found, strict=True))


def table(found: dict[int, list[Launched]]) -> str:
    """Markdown."""
    lines = [
        f"Triton {triton.__version__}; registers of a thread / bytes of its stack (spilled registers) / KiB of shared",
        "memory of a program, and the matrix instruction on sm_90.",
        "",
        "| kernel | shape | warps | sm_80 | sm_90 | instruction |",
        "|---|---|---|---|---|---|",
    ]
    for both in zip(*found.values(), strict=True):
        cells = (f"{one.registers} / {one.spilled_bytes} / {one.shared_bytes / 1024:.0f}" for one in both)
        last = both[-1]
        instruction = ", ".join(f"{kind} {shape}" for kind, shape in last.products)
        lines.append(f"| {last.kernel} | {last.shape} | {last.warps} | {' | '.join(cells)} | {instruction} |")
    return "\n".join(dict.fromkeys(lines))


def faults(found: dict[int, list[Launched]]) -> Iterator[str]:
    """Spills on 9.0, too much shared memory, weights of tokens in other bits than the host's, and kernels that promise
    the same bits and sum in different ways."""
    for capability, launched in found.items():
        seen: dict[tuple[str, str], Launched] = {}
        for one in launched:
            name = f"{one.kernel} ({one.shape}) on sm_{capability}"
            if one.spilled_bytes and capability == 90:
                yield f"{name} spills {one.spilled_bytes} bytes"
            if one.shared_bytes > SHARED_MAX_BYTES[capability]:
                yield f"{name} wants {one.shared_bytes} bytes of shared memory"
            if one.fused:
                yield f"{name} joins products and sums of float64"
            family = one.kernel.removesuffix("_split").removesuffix("_whole")
            twin = seen.setdefault((family, one.shape), one)
            if (twin.products, twin.sums) != (one.products, one.sums):
                yield f"{name} sums unlike {twin.kernel}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--write", type=Path, metavar="FILE")
    group.add_argument("--check", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    found = compiled()
    made, wrong = table(found), list(faults(found))
    path = arguments.write or arguments.check
    if path is None:
        print(made)
    else:
        before, rest = path.read_text().split(BEGIN)
        old, after = rest.split(END)
        if arguments.write:
            path.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")
        elif old.strip() != made:
            wrong.append(f"the table in {path} is not this one; run: make gpu-table")
    for fault in wrong:
        print(fault, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
