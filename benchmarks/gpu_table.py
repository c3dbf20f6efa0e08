"""What each GPU kernel takes of the chip, from ahead-of-time compilation: needs no GPU.

Compiles every kernel in every shape that it is used in or could be, for compute capability 8.0 and 9.0, and prints
a table of registers, spilled bytes and shared memory. --write FILE puts it between the marks in FILE, --check FILE
fails where FILE has another one; both fail when a kernel spills on 9.0.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.backend import GROUP
from engine.kernels.triton import attention, blocks, heads, linear, quantized, rows
from engine.kernels.triton.launch import EXACT
from engine.kernels.triton.tiles import LINEAR, QUANTIZED, LinearTile, attention_tile

CAPABILITIES = (80, 90)
BEGIN, END = "<!-- made by benchmarks/gpu_table.py -->", "<!-- end -->"
SHARED_MAX_BYTES = {80: 163 << 10, 90: 227 << 10}

_POINTERS = {2: "*bf16", 4: "*fp32"}
_TYPES = {2: tl.bfloat16, 4: tl.float32}
_DTYPES = {2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel as it is launched. pointers: their types by parameter; all others are float32, or numbers."""

    shape: str
    kernel: Any
    constants: dict[str, Any]
    pointers: dict[str, str]
    warps: int
    stages: int = 3
    used: bool = True


@dataclass(frozen=True, kw_only=True)
class Figures:
    """products: kind and shape of each matrix instruction."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    products: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.registers} / {self.spilled_bytes} / {self.shared_bytes / 1024:.0f}"


def cases() -> Iterator[Case]:
    yield from attention_cases()
    yield from linear_cases()
    yield from quantized_cases()
    yield from other_cases()


def attention_cases() -> Iterator[Case]:
    for size, dim, group, windowed in (
        (2, 64, 4, False), (2, 128, 4, False), (2, 128, 4, True), (2, 256, 4, False), (4, 64, 3, False),
    ):  # fmt: skip
        cache = torch.empty((1, 1, 2, 16, 8, dim), dtype=_DTYPES[size], device="meta")
        tile = attention_tile(cache.dtype, dim)
        constants = attention.geometry(cache, dim, group, tile, windowed=windowed) | {"DOT": _TYPES[size]}
        shape = f"{_POINTERS[size][1:]}, d = {dim}, {group} heads a key{', window' if windowed else ''}"
        pointers = {
            "kv": _POINTERS[size],
            "query_starts": "*i32",
            "context_lengths": "*i32",
            "block_tables": "*i32",
        }
        for kernel in (attention.attend_whole, attention.attend_split):
            yield Case(
                shape=shape,
                kernel=kernel,
                constants=constants,
                pointers=pointers,
                warps=tile.warps,
                stages=tile.stages,
            )
    fold = {name: constants[name] for name in attention.fold_chunks.arg_names if name in constants}
    fold |= {"DIM": 128, "DIM_PADDED": 128}
    yield Case(
        shape="d = 128",
        kernel=attention.fold_chunks,
        constants=fold,
        pointers={"context_lengths": "*i32"},
        warps=4,
    )


def linear_cases() -> Iterator[Case]:
    for size, tiles in LINEAR.items():
        name, pointers = _POINTERS[size][1:], {"weight": _POINTERS[size]}
        for tile in tiles:
            constants = {"INNER": tile.inner, "CHUNK": linear.CHUNK, "DOT": _TYPES[size]}
            yield _tiled(linear.multiply_floats, tile, tiles, name, constants | {"BIASED": True}, pointers)
            if tile == tiles[0]:
                yield _tiled(linear.multiply_floats_split, tile, tiles, name, constants, pointers)
    constants = {"BIASED": True, "TILE": linear.ADD_TILE}
    yield Case(shape="", kernel=linear.add_chunks, constants=constants, pointers={}, warps=4)


def quantized_cases() -> Iterator[Case]:
    pointers = {"codes": "*u8", "scales": "*fp16", "least": "*fp16"}
    for size, tiles in QUANTIZED.items():
        for bits, zero, least in ((8, 128, False), (4, 0, True)):
            constants = {"BITS": bits, "ZERO": zero, "LEAST": least, "GROUP": GROUP, "CHUNK": linear.CHUNK}
            constants |= {"DOT": _TYPES[size]}
            name = f"int{bits} x {_POINTERS[size][1:]}"
            for tile in tiles:
                yield _tiled(
                    quantized.multiply_integers, tile, tiles, name, constants | {"BIASED": True}, pointers
                )
            yield _tiled(quantized.multiply_integers_split, tiles[0], tiles, name, constants, pointers)


def other_cases() -> Iterator[Case]:
    places = {"positions": "*i32", "slots": "*i64", "kv": "*bf16"}
    constants = {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "HALF_PADDED": 64, "BLOCK_SIZE": 16}
    for rotated, written in ((True, False), (False, True), (True, True)):
        what = " and ".join(word for word, done in (("rotated", rotated), ("written", written)) if done)
        flags = {"ROTATED": rotated, "WRITTEN": written}
        yield Case(
            shape=what, kernel=heads.place_heads, constants=constants | flags, pointers=places, warps=1
        )
    for width, added in ((128, False), (4096, True), (8192, True)):
        yield Case(
            shape=f"n = {width}{', residual' if added else ''}",
            kernel=rows.norm,
            constants={"PADDED": width, "ADDED": added},
            pointers={},
            warps=rows.norm_warps(width),
        )
    yield Case(shape="", kernel=rows.gate, constants={"TILE": rows.GATE_TILE}, pointers={}, warps=4)
    words = {"source": "*i32", "target": "*i32", "source_ids": "*i64", "target_ids": "*i64"}
    yield Case(shape="", kernel=blocks.move, constants={"TILE": blocks.WORDS}, pointers=words, warps=8)


def _tiled(
    kernel: Any,
    tile: LinearTile,
    tiles: tuple[LinearTile, ...],
    name: str,
    constants: dict[str, Any],
    pointers: dict[str, str],
) -> Case:
    inner = constants.get("INNER", GROUP)
    return Case(
        shape=f"{name}, {tile.rows} x {tile.columns} x {inner}",
        kernel=kernel,
        constants=constants | {"ROWS": tile.rows, "COLUMNS": tile.columns},
        pointers=pointers,
        warps=tile.warps,
        stages=tile.stages,
        used=tile == tiles[0],
    )


_NUMBERS = {
    "q_stride", "k_stride", "v_stride", "x_stride", "row_stride", "block_stride", "half", "table_stride", "window",
    "sequences", "chunks", "count", "columns", "inputs", "heads", "width", "words",
}  # fmt: skip


def compiled(case: Case, capability: int) -> Figures:
    """Compile for one GPU. Raises what Triton raises when it cannot."""
    names = case.kernel.arg_names
    signature = {name: _type_of(case, name) for name in names}
    any_number = {parameter.name for parameter in case.kernel.params if parameter.do_not_specialize}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name] not in {"constexpr", "fp32"} and name not in any_number
    }
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=case.constants, attrs=aligned)
    options = {"num_warps": case.warps, "num_stages": case.stages, **EXACT}
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack = _resources(result.asm["cubin"])
    return Figures(
        registers=registers,
        spilled_bytes=stack,
        shared_bytes=result.metadata.shared,
        products=tuple(
            sorted(set(re.findall(r"(wgmma\.mma_async|mma)\.\S*?(m\d+n\d+k\d+)", result.asm["ptx"])))
        ),
    )


def _type_of(case: Case, name: str) -> str:
    if name in case.constants:
        return "constexpr"
    if name in case.pointers:
        return case.pointers[name]
    if name in {"scale", "eps"}:
        return "fp32"
    return "i32" if name in _NUMBERS else "*fp32"


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers of a thread, bytes of its stack, which is where registers are spilled to)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ((registers, stack, local),) = re.findall(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", said)
    return int(registers), int(stack) + int(local)


def table() -> tuple[str, list[str]]:
    """(Markdown, what is wrong)."""
    every = list(cases())
    with ThreadPoolExecutor(max_workers=2) as pool:
        figures = list(pool.map(_everywhere, every))
    lines = [
        f"Triton {triton.__version__}; registers of a thread / bytes of its stack (spilled registers) / KiB of shared",
        "memory of a program, and the matrix instruction on sm_90. What is not used is there for `make gpu-bench`.",
        "",
        "| kernel | shape | warps | sm_80 | sm_90 | instruction |",
        "|---|---|---|---|---|---|",
    ]
    for case, found in zip(every, figures, strict=True):
        cells = " | ".join(str(found.get(capability, "")) for capability in CAPABILITIES)
        instruction = ", ".join(f"{kind.split('.')[0]} {shape}" for kind, shape in found[90].products)
        name = f"{case.kernel.__name__}{'' if case.used else ' (not used)'}"
        lines.append(f"| {name} | {case.shape} | {case.warps} | {cells} | {instruction} |")
    return "\n".join(lines), [*_too_large(every, figures), *_unlike(every, figures)]


def _everywhere(case: Case) -> dict[int, Figures]:
    return {each: compiled(case, each) for each in CAPABILITIES if case.used or each == 90}


def _too_large(every: list[Case], figures: list[dict[int, Figures]]) -> Iterator[str]:
    for case, found in zip(every, figures, strict=True):
        for capability, one in found.items():
            name = f"{case.kernel.__name__} ({case.shape}) on sm_{capability}"
            if one.spilled_bytes and capability == 90:
                yield f"{name} spills {one.spilled_bytes} bytes"
            if one.shared_bytes > SHARED_MAX_BYTES[capability]:
                yield f"{name} wants {one.shared_bytes} bytes of shared memory"


def _unlike(every: list[Case], figures: list[dict[int, Figures]]) -> Iterator[str]:
    """Two kernels that promise the same bits must multiply by the same instruction."""
    seen: dict[tuple[str, str, int, int], tuple[tuple[str, str], ...]] = {}
    for case, found in zip(every, figures, strict=True):
        family = case.kernel.__name__.removesuffix("_split").removesuffix("_whole")
        for capability, one in found.items():
            if seen.setdefault((family, case.shape, case.warps, capability), one.products) != one.products:
                yield f"{case.kernel.__name__} ({case.shape}) multiplies unlike its twin on sm_{capability}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--write", type=Path, metavar="FILE")
    group.add_argument("--check", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    made, faults = table()
    path = arguments.write or arguments.check
    if path is None:
        print(made)
    else:
        before, rest = path.read_text().split(BEGIN)
        old, after = rest.split(END)
        if arguments.write:
            path.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")
        elif old.strip() != made:
            faults.append(
                f"the table in {path} is not this one; run: python -m benchmarks.gpu_table --write {path}"
            )
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
