"""Rotary embedding of queries and keys, and keys and values on their way into the cache, in one pass.

Called by the backend. Halves layout, as Hugging Face. One program per row and head.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.composed import Angles
from engine.kernels.triton.codes import coding, store_head, stored
from engine.kernels.triton.launch import EXACT


def rotate_and_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    angles: Angles,
    kv: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
) -> None:
    """See Operations.rotate_and_write; k itself stays as it was."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    assert dim % 2 == 0, dim
    place = stored(kv)[:, layer]
    strides = (_row_stride(q), _row_stride(k), _row_stride(v), place.stride(0), place.stride(1))
    place_heads[(rows, heads + kv_heads)](
        q, k, v, place, angles.positions, slots, angles.cos, angles.sin, *strides,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, HALF_PADDED=triton.next_power_of_2(dim // 2),
        BLOCK_SIZE=kv.shape[3], **coding(kv, dim), num_warps=1, **EXACT,
    )  # fmt: skip


@triton.jit
def place_heads(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    kv: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    block_stride: tl.tensor,
    half: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    CODES: tl.constexpr,
) -> None:
    """Grid: (T, HEADS + KV_HEADS). Queries go back to where they came from, keys and values to the cache."""
    HALF: tl.constexpr = DIM // 2
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, HALF_PADDED)
    inside = dims < HALF
    source = q + row * q_stride + head * DIM + dims
    if head >= HEADS:
        source = k + row * k_stride + (head - HEADS) * DIM + dims
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = tl.load(positions + row).to(tl.int64) * HALF + dims
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    first, second = first * c - second * s, second * c + first * s
    if head >= HEADS:
        slot = tl.load(slots + row).to(tl.int64)
        keys = kv + slot // BLOCK_SIZE * block_stride + (slot % BLOCK_SIZE * KV_HEADS + head - HEADS) * ROW
        store_head(keys, first, second, dims, inside, DIM, CODES)
        values = v + row * v_stride + (head - HEADS) * DIM + dims
        v_first = tl.load(values, mask=inside, other=0.0).to(tl.float32)
        v_second = tl.load(values + HALF, mask=inside, other=0.0).to(tl.float32)
        store_head(keys + half, v_first, v_second, dims, inside, DIM, CODES)
    else:
        tl.store(source, first.to(q.dtype.element_ty), mask=inside)
        tl.store(source + HALF, second.to(q.dtype.element_ty), mask=inside)


def _row_stride(x: torch.Tensor) -> int:
    """Elements between the rows of [T, heads, d] whose rows are contiguous."""
    assert x.stride()[1:] == (x.shape[2], 1), x.stride()
    return x.stride(0)
