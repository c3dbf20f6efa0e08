"""Products of rows with a weight of small integers, used as it is.

The integers are exact in the type of the product; each GROUP of inputs is multiplied and summed by itself, then scaled
in float32. So the weight loses nothing, and only the input is rounded. Chunks as in `linear`, which also adds them up.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.backend import GROUP, QuantizedWeight
from engine.kernels.triton.launch import EXACT, dot_type
from engine.kernels.triton.linear import CHUNK, add_parts
from engine.kernels.triton.tiles import LinearTile


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedIntegers:
    """A QuantizedWeight turned over, on the device: outputs are contiguous.

    codes: uint8 [in, out]; of 4 bits: [in / 2, out] in runs of GROUP, the low halves those of an even group, the high
    ones those of the odd group after it, whose scale is zero where there is none. scales, least: float16 [groups, out];
    zeros: uint8, likewise, instead of zero. bias: float32 [out] or None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    least: torch.Tensor | None
    zeros: torch.Tensor | None
    bits: int
    zero: int
    in_features: int
    bias: torch.Tensor | None

    @property
    def out_features(self) -> int:
        return self.codes.shape[1]


def pack_integers(weight: QuantizedWeight, bias: torch.Tensor | None, device: torch.device) -> PackedIntegers:
    """Codes of 5 to 8 bits take a byte each, fewer half a byte."""
    codes = weight.codes.T
    odd = weight.bits <= 4 and weight.scales.shape[1] % 2
    if weight.bits <= 4:
        codes = torch.nn.functional.pad(codes, (0, 0, 0, GROUP if odd else 0))
        pairs = codes.reshape(-1, 2, GROUP, codes.shape[1])
        codes = (pairs[:, 0] | pairs[:, 1] << 4).flatten(0, 1)

    def turned(groups: torch.Tensor | None) -> torch.Tensor | None:
        return (
            None
            if groups is None
            else torch.nn.functional.pad(groups.T, (0, 0, 0, odd)).contiguous().to(device)
        )

    scales = turned(weight.scales)
    assert scales is not None
    return PackedIntegers(
        codes=codes.contiguous().to(device),
        scales=scales,
        least=turned(weight.least),
        zeros=turned(weight.zeros),
        bits=4 if weight.bits <= 4 else 8,
        zero=0 if weight.least is not None else weight.zero,
        in_features=weight.codes.shape[1],
        bias=None if bias is None else bias.to(device, torch.float32, copy=True),
    )


def quantized_linear(
    x: torch.Tensor, packed: PackedIntegers, tile: LinearTile, dtype: torch.dtype, *, split: bool
) -> torch.Tensor:
    """float [T, in] -> float32 [T, out]. x is rounded to `dtype`; sums are float32. split changes no bit."""
    assert x.stride(1) == 1 and x.shape[1] == packed.in_features, (x.stride(), x.shape)
    rows, inputs = x.shape
    columns = packed.out_features
    chunks = triton.cdiv(inputs, CHUNK)
    shape = {"BITS": packed.bits, "ZERO": packed.zero, "GROUP": GROUP}
    shape |= {"LEAST": packed.least is not None, "ZEROS": packed.zeros is not None}
    shape |= {"ROWS": tile.rows, "COLUMNS": tile.columns, "CHUNK": CHUNK, "DOT": dot_type(dtype)}
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers, **EXACT}
    offsets = next((found for found in (packed.least, packed.zeros) if found is not None), packed.scales)
    weight = (packed.codes, packed.scales, offsets)
    out = torch.empty((rows, columns), dtype=torch.float32, device=x.device)
    bias = out if packed.bias is None else packed.bias
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns))
    numbers = (rows, columns, inputs, x.stride(0))
    if split:
        parts = torch.empty((chunks, rows, columns), dtype=torch.float32, device=x.device)
        multiply_integers_split[(*grid, chunks)](x, *weight, parts, *numbers, **shape, **options)
        add_parts(parts, packed.bias, out)
    else:
        biased = packed.bias is not None
        multiply_integers[grid](x, *weight, bias, out, *numbers, BIASED=biased, **shape, **options)
    return out


@triton.jit(do_not_specialize=["count"])
def multiply_integers(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    columns: tl.tensor,
    inputs: tl.tensor,
    x_stride: tl.tensor,
    BIASED: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    LEAST: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Grid: (row tiles, column tiles)."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for first in range(0, inputs, CHUNK):
        total += _chunk(
            x, codes, scales, offsets, row, column, first, count, columns, inputs, x_stride,
            BITS, ZERO, LEAST, ZEROS, GROUP, ROWS, COLUMNS, CHUNK, DOT,
        )  # fmt: skip
    if BIASED:
        total += tl.load(bias + column, mask=column < columns, other=0.0)[None, :]
    inside = (row < count)[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["count"])
def multiply_integers_split(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    parts: tl.tensor,
    count: tl.tensor,
    columns: tl.tensor,
    inputs: tl.tensor,
    x_stride: tl.tensor,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    LEAST: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Grid: (row tiles, column tiles, chunks). parts: float32 [chunks, T, columns]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    chunk = tl.program_id(2)
    sums = _chunk(
        x, codes, scales, offsets, row, column, chunk * CHUNK, count, columns, inputs, x_stride,
        BITS, ZERO, LEAST, ZEROS, GROUP, ROWS, COLUMNS, CHUNK, DOT,
    )  # fmt: skip
    inside = (row < count)[:, None] & (column < columns)[None, :]
    place = (chunk.to(tl.int64) * count + row)[:, None] * columns + column[None, :]
    tl.store(parts + place, sums, mask=inside)


@triton.jit
def _chunk(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    columns: tl.tensor,
    inputs: tl.tensor,
    x_stride: tl.tensor,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    LEAST: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
) -> tl.tensor:
    """Sums over the inputs [first, first + CHUNK) alone: float32 [ROWS, COLUMNS]."""
    PER_BYTE: tl.constexpr = 8 // BITS
    sums = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for start in range(first, tl.minimum(first + CHUNK, inputs), GROUP * PER_BYTE):
        byte = start // PER_BYTE + tl.arange(0, GROUP)
        packed = tl.load(
            codes + (byte.to(tl.int64) * columns)[:, None] + column[None, :],
            mask=(column < columns)[None, :],
            other=0,
        )
        for half in tl.static_range(PER_BYTE):
            values = (packed >> (half * 4) & 15) if BITS == 4 else packed
            group = start // GROUP + half
            spot = group.to(tl.int64) * columns + column
            if ZEROS:
                zeros = tl.load(offsets + spot, mask=column < columns, other=0).to(tl.int32)[None, :]
                b = (values.to(tl.int32) - zeros).to(DOT)
            else:
                b = (values.to(tl.int32) - ZERO).to(DOT)
            place = group * GROUP + tl.arange(0, GROUP)
            inside = (row < count)[:, None] & (place < inputs)[None, :]
            a = tl.load(x + (row * x_stride)[:, None] + place[None, :], mask=inside, other=0.0).to(DOT)
            scale = tl.load(scales + spot, mask=column < columns, other=0.0).to(tl.float32)
            factors = tl.broadcast_to(scale[None, :], [ROWS, COLUMNS])
            sums = tl.fma(tl.dot(a, b, input_precision="ieee"), factors, sums)
            if LEAST:
                low = tl.load(offsets + spot, mask=column < columns, other=0.0).to(tl.float32)
                lows = tl.broadcast_to(low[None, :], [ROWS, COLUMNS])
                sums = tl.fma(
                    tl.broadcast_to(tl.sum(a.to(tl.float32), 1)[:, None], [ROWS, COLUMNS]), lows, sums
                )
    return sums
