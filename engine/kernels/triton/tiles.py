"""Shapes of the tiles that kernels work in, by dtype: fixed, so that no row's bits depend on how many rows there are.

All are compiled ahead of time, and none may spill on compute capability 9.0 (docs/gpu-kernels.md). The alternatives are
there for a benchmark on a GPU to choose from. Nothing here chooses while it serves: what differs in a tile may differ
in the last bits.
"""

from dataclasses import dataclass

import torch

SPLIT_BYTES_MAX = 256 << 20
"""Of what attention, or a product, keeps between two passes; beyond it one pass does the whole, with the same bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTile:
    """rows: tokens times the query heads of a key head; keys: positions. registers: see LinearTile."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None

    def __str__(self) -> str:
        return f"{self.rows} x {self.keys} by {self.warps} warps"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTile:
    """rows: of the input; columns: of the output; inner: inputs per product. A quantized weight's are a GROUP.
    registers: that a thread may have. Left to itself the assembler takes fewer where more programs could then run side
    by side, and may spill for it."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    registers: int | None = None

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns} by {self.warps} warps"


def attention_tile(dtype: torch.dtype, dim: int) -> AttentionTile:
    """dtype: of the cache; dim: of a head."""
    return _ATTENTION[max(2, dtype.itemsize), dim > 128]


def linear_tile(dtype: torch.dtype) -> LinearTile:
    """dtype: of the weights."""
    return LINEAR[dtype.itemsize][0]


def quantized_tile(dtype: torch.dtype) -> LinearTile:
    """dtype: of what is multiplied with a quantized weight."""
    return QUANTIZED[dtype.itemsize][0]


_ATTENTION = {
    (2, False): AttentionTile(rows=64, keys=64, warps=8, stages=2),
    (2, True): AttentionTile(rows=32, keys=32, warps=8, stages=2),
    (4, False): AttentionTile(rows=32, keys=16, warps=8, stages=1, registers=248),
    (4, True): AttentionTile(rows=32, keys=16, warps=8, stages=1, registers=248),
}
"""By bytes of what is multiplied, and whether a head is wider than 128. Bytes of a cache are multiplied as bfloat16."""

LINEAR = {
    2: (
        LinearTile(rows=64, columns=128, inner=64, warps=8, stages=3),
        LinearTile(rows=64, columns=64, inner=64, warps=4, stages=4),
        LinearTile(rows=128, columns=128, inner=64, warps=8, stages=3),
    ),
    4: (LinearTile(rows=32, columns=64, inner=32, warps=4, stages=2, registers=248),),
}
"""By bytes of an element; the first of each is used."""

QUANTIZED = {
    2: (
        LinearTile(rows=64, columns=128, inner=32, warps=8, stages=3),
        LinearTile(rows=64, columns=64, inner=32, warps=8, stages=3),
        LinearTile(rows=64, columns=64, inner=32, warps=4, stages=4),
    ),
    4: (LinearTile(rows=32, columns=64, inner=32, warps=4, stages=2),),
}
"""As LINEAR."""
