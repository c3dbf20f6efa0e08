"""Products of rows with a float weight, the same bits for a row whatever rows stand beside it.

Inputs are taken in chunks of CHUNK at absolute boundaries; each chunk's sum starts afresh, and chunks are added in
order. So it does not matter whether one program walks over all chunks (`multiply_floats`) or each chunk has a program
of its own (`multiply_floats_split`, `add_chunks`), which fills the GPU where rows are few. Called by the backend.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import EXACT, dot_type
from engine.kernels.triton.tiles import LinearTile

CHUNK = 1024
"""Inputs that are summed as one: a multiple of every tile's `inner`."""

ADD_TILE = 256
"""Columns of one program of `add_chunks`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFloats:
    """weight: [out, in], contiguous, on the device; bias: float32 [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]


def float_linear(x: torch.Tensor, packed: PackedFloats, tile: LinearTile, *, split: bool) -> torch.Tensor:
    """float [T, in] -> float32 [T, out]. x is rounded to the weight's dtype; sums are float32. split changes no bit."""
    assert x.stride(1) == 1 and x.shape[1] == packed.in_features, (x.stride(), x.shape)
    rows, inputs = x.shape
    columns = packed.out_features
    out = torch.empty((rows, columns), dtype=torch.float32, device=x.device)
    shape = {"ROWS": tile.rows, "COLUMNS": tile.columns, "INNER": tile.inner, "CHUNK": CHUNK}
    shape |= {"DOT": dot_type(packed.weight.dtype)}
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers, **EXACT}
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns))
    if split:
        chunks = triton.cdiv(inputs, CHUNK)
        parts = torch.empty((chunks, rows, columns), dtype=torch.float32, device=x.device)
        numbers = (rows, columns, inputs, x.stride(0))
        multiply_floats_split[(*grid, chunks)](x, packed.weight, parts, *numbers, **shape, **options)
        add_parts(parts, packed.bias, out)
    else:
        bias = out if packed.bias is None else packed.bias
        numbers = (rows, columns, inputs, x.stride(0))
        multiply_floats[grid](
            x, packed.weight, bias, out, *numbers, BIASED=packed.bias is not None, **shape, **options
        )
    return out


def add_parts(parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """parts float32 [chunks, T, n], in order, and bias float32 [n] -> out float32 [T, n]."""
    chunks, rows, columns = parts.shape
    add_chunks[(rows, triton.cdiv(columns, ADD_TILE))](
        parts, out if bias is None else bias, out, chunks, columns,
        BIASED=bias is not None, TILE=ADD_TILE, num_warps=4, **EXACT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def multiply_floats(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    columns: tl.tensor,
    inputs: tl.tensor,
    x_stride: tl.tensor,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Grid: (row tiles, column tiles)."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for first in range(0, inputs, CHUNK):
        total += _chunk(
            x, weight, row, column, first, count, columns, inputs, x_stride, ROWS, COLUMNS, INNER, CHUNK, DOT
        )
    if BIASED:
        total += tl.load(bias + column, mask=column < columns, other=0.0)[None, :]
    inside = (row < count)[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["count"])
def multiply_floats_split(
    x: tl.tensor,
    weight: tl.tensor,
    parts: tl.tensor,
    count: tl.tensor,
    columns: tl.tensor,
    inputs: tl.tensor,
    x_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Grid: (row tiles, column tiles, chunks). parts: float32 [chunks, T, columns]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    chunk = tl.program_id(2)
    sums = _chunk(
        x,
        weight,
        row,
        column,
        chunk * CHUNK,
        count,
        columns,
        inputs,
        x_stride,
        ROWS,
        COLUMNS,
        INNER,
        CHUNK,
        DOT,
    )
    inside = (row < count)[:, None] & (column < columns)[None, :]
    place = (chunk.to(tl.int64) * count + row)[:, None] * columns + column[None, :]
    tl.store(parts + place, sums, mask=inside)


@triton.jit(do_not_specialize=["chunks"])
def add_chunks(
    parts: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    chunks: tl.tensor,
    columns: tl.tensor,
    BIASED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Second pass of a split product. Grid: (T, columns / TILE)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < columns
    total = tl.full([TILE], 0.0, tl.float32)
    for chunk in range(chunks):
        place = (chunk * tl.num_programs(0).to(tl.int64) + row) * columns + column
        total += tl.load(parts + place, mask=inside, other=0.0)
    if BIASED:
        total += tl.load(bias + column, mask=inside, other=0.0)
    tl.store(out + row * columns + column, total, mask=inside)


@triton.jit
def _chunk(
    x: tl.tensor,
    weight: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    columns: tl.tensor,
    inputs: tl.tensor,
    x_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
) -> tl.tensor:
    """Sums over the inputs [first, first + CHUNK) alone: float32 [ROWS, COLUMNS]."""
    sums = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for start in range(first, tl.minimum(first + CHUNK, inputs), INNER):
        place = start + tl.arange(0, INNER)
        there = place < inputs
        a = tl.load(
            x + (row * x_stride)[:, None] + place[None, :],
            mask=(row < count)[:, None] & there[None, :],
            other=0.0,
        ).to(DOT)
        b = tl.load(
            weight + (column * inputs)[None, :] + place[:, None],
            mask=(column < columns)[None, :] & there[:, None],
            other=0.0,
        ).to(DOT)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    return sums
