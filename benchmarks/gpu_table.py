"""What each GPU kernel takes of the chip, from ahead-of-time compilation: needs no GPU.

Launches kernels on a driver that compiles for compute capability 8.0 and 9.0 and runs nothing. Prints tables of
registers, spilled bytes and shared memory: of every kernel in the shapes that stand for all, on both, and of all that
is served and of every tile that a benchmark may try, on 9.0. --write FILE puts them between the marks in FILE. --check
FILE compiles what stands for all, and fails where FILE has other figures, or lacks a shape. Both fail when a kernel
spills on 9.0, of whichever table.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.gpu_calls import Call, calls

CAPABILITIES = (80, 90)
BEGIN, END = "<!-- made by benchmarks/gpu_table.py -->", "<!-- end -->"
SHARED_MAX_BYTES = {80: 163 << 10, 90: 227 << 10}

SECOND_PASSES = ("fold_chunks", "add_chunks")
"""They have no tile."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """One kernel as it was compiled. name: of what was compiled, whoever launched it. products: kind and shape of each
    matrix instruction. sums: how what is summed, in products and along rows, lies over the threads, as (shape, layout).
    fused: whether a float64 is multiplied and added without rounding in between."""

    kernel: str
    shape: str
    name: str
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
        return int(self._local.capability)

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._local.capability, 32)


def _launched(call: Call, kernel: Any) -> Launched:
    registers, stack = _resources(kernel.asm["cubin"])
    found = re.findall(r"(wgmma|mma)(?:\.mma_async)?\.\S*?(m\d+n\d+k\d+)", kernel.asm["ptx"])
    return Launched(
        kernel=kernel.metadata.name,
        shape=call.shape if kernel.metadata.name in SECOND_PASSES else call.name(),
        name=kernel.hash,
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


def compiled(
    compiling: CompilingDriver, every: list[Call], capabilities: tuple[int, ...]
) -> dict[int, list[Launched]]:
    """By capability, in the same order."""
    tasks = list(product(capabilities, every))
    with ThreadPoolExecutor(max_workers=2) as pool:
        found = pool.map(lambda task: compiling.compile(task[1], task[0]), tasks)
        made: dict[int, list[Launched]] = {capability: [] for capability in capabilities}
        for (capability, _), launched in zip(tasks, found, strict=True):
            made[capability] += launched
    return made


def table(found: dict[int, list[Launched]], known: Iterable[Launched] = ()) -> list[str]:
    """Rows of Markdown, the head among them. What several calls share stands at the first of them, and nowhere if it is
    known."""
    names = " | ".join(f"sm_{capability}" for capability in found)
    lines = [f"| kernel | shape | warps | {names} | instruction |", "|---" * (4 + len(found)) + "|"]
    seen = {one.name for one in known}
    for alike in zip(*found.values(), strict=True):
        last = alike[-1]
        if last.name in seen:
            continue
        seen.add(last.name)
        cells = (f"{one.registers} / {one.spilled_bytes} / {one.shared_bytes / 1024:.0f}" for one in alike)
        instruction = ", ".join(f"{kind} {shape}" for kind, shape in last.products)
        lines.append(f"| {last.kernel} | {last.shape} | {last.warps} | {' | '.join(cells)} | {instruction} |")
    return lines


def faults(found: dict[int, list[Launched]]) -> Iterator[str]:
    """Spills on 9.0, too much shared memory, weights of tokens in other bits than the host's, kernels that promise the
    same bits and sum in different ways, and those that are compiled anew for another call of the same shape, which a
    stream would wait for."""
    for capability, launched in found.items():
        seen: dict[tuple[str, str], Launched] = {}
        names: dict[tuple[str, str], str] = {}
        for one in launched:
            name = f"{one.kernel} ({one.shape}) on sm_{capability}"
            if one.spilled_bytes and capability == 90:
                yield f"{name} spills {one.spilled_bytes} bytes"
            if one.shared_bytes > SHARED_MAX_BYTES[capability]:
                yield f"{name} wants {one.shared_bytes} bytes of shared memory"
            if one.fused:
                yield f"{name} joins products and sums of float64"
            if names.setdefault((one.kernel, one.shape), one.name) != one.name:
                yield f"{name} is compiled anew for another call"
            family = one.kernel.removesuffix("_split").removesuffix("_whole")
            twin = seen.setdefault((family, one.shape), one)
            if (twin.products, twin.sums) != (one.products, one.sums):
                yield f"{name} sums unlike {twin.kernel}"


def differences(text: str, every: list[Call], made: list[str]) -> Iterator[str]:
    """Where a page has not what was compiled now, lacks a shape that was not, or has one that spills."""
    there = text.partition(BEGIN)[2].partition(END)[0].splitlines()
    if f"Triton {triton.__version__}." not in there:
        yield f"it is not of Triton {triton.__version__}"
    yield from (f"it lacks: {row}" for row in made if row not in there)
    shapes = {row.split(" | ")[1] for row in there if " | " in row}
    yield from (f"it lacks {call.name()}" for call in every if call.name() not in shapes)
    for row in there:
        if re.search(r"\| \d+ / [1-9]\d* / \d+ \| [^/]*$", row):
            yield f"it spills on 9.0: {row}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--write", type=Path, metavar="FILE")
    group.add_argument("--check", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    compiling, every = CompilingDriver(), list(calls())
    compiling.install()
    found = compiled(compiling, [call for call in every if call.stands_for_all], CAPABILITIES)
    rows, wrong = table(found), list(faults(found))
    if arguments.check:
        told = differences(arguments.check.read_text(), every, rows)
        wrong += [f"the table in {arguments.check}: {one}; run: make gpu-table" for one in told]
    else:
        last = CAPABILITIES[-1]
        others = compiled(compiling, [call for call in every if not call.stands_for_all], (last,))
        wrong += faults(others)
        text = "\n".join([f"Triton {triton.__version__}.", "", *rows, "", *table(others, known=found[last])])
        if arguments.write:
            before, left = arguments.write.read_text().split(BEGIN)
            arguments.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{left.split(END)[1]}")
        else:
            print(text)
    for fault in wrong:
        print(fault, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
