"""What is done to each row by itself: RMS norm, with or without a residual, and the gate of the MLP.

Called by the backend. A row is one program's, or the elements are independent: nothing depends on other rows.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import EXACT

GATE_TILE = 1024
"""Elements of one program of `gate`."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, n], or [T, heads, n] whose rows may be slices of wider ones. See Operations.rms_norm."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, x, weight, out, eps, added=False)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See Operations.add_rms_norm."""
    assert x.is_contiguous() and residual.is_contiguous() and x.shape == residual.shape, (
        x.shape,
        residual.shape,
    )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, residual, weight, out, eps, added=True)
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See Operations.silu_mul."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous(), gate_up.stride()
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    gate[(rows, triton.cdiv(width, GATE_TILE))](gate_up, out, width, TILE=GATE_TILE, num_warps=4, **EXACT)
    return out


def norm_warps(width: int) -> int:
    """By the width alone: how a row is summed depends on it."""
    return 4 if width <= 4096 else 8


@triton.jit(do_not_specialize=["heads"])
def norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    PADDED: tl.constexpr,
    ADDED: tl.constexpr,
) -> None:
    """Grid: (T * heads,). x: rows of `heads` runs of `width`; residual, out: contiguous."""
    run = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED)
    inside = place < width
    values = tl.load(x + run // heads * row_stride + run % heads * width + place, mask=inside, other=0.0).to(
        tl.float32
    )
    if ADDED:
        sums = residual + run * width + place
        values = values + tl.load(sums, mask=inside, other=0.0).to(tl.float32)
        tl.store(sums, values.to(residual.dtype.element_ty), mask=inside)
    mean = tl.sum(values * values, 0) / width
    scale = 1.0 / tl.sqrt_rn(mean + eps)
    normed = values * scale * tl.load(weight + place, mask=inside, other=0.0)
    tl.store(out + run * width + place, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate(gate_up: tl.tensor, out: tl.tensor, width: tl.tensor, TILE: tl.constexpr) -> None:
    """Grid: (T, width / TILE)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = place < width
    first = gate_up + row * 2 * width + place
    opened = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(first + width, mask=inside, other=0.0).to(tl.float32)
    passed = opened / (1.0 + tl.exp(-opened)) * up
    tl.store(out + row * width + place, passed.to(out.dtype.element_ty), mask=inside)


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    *,
    added: bool,
) -> None:
    width = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    assert x.stride(-1) == 1 and (heads == 1 or x.stride(1) == width), x.stride()
    padded = triton.next_power_of_2(width)
    norm[(x.shape[0] * heads,)](
        x, residual, weight, out, x.stride(0), heads, width, eps,
        PADDED=padded, ADDED=added, num_warps=norm_warps(width), **EXACT,
    )  # fmt: skip
