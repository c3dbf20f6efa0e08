"""Rotary embedding of queries and keys, and keys and values on their way into the cache: apart, or in one pass.

Called by the backend. Halves layout, as Hugging Face. One program per row and head.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import EXACT


def rotate(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """In place. See Operations.rotary."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    tables = (positions, positions, cos, sin)
    constants = _constants(heads, kv_heads, dim, block_size=1, rotated=True, written=False)
    place_heads[(rows, heads + kv_heads)](
        q, k, k, k, *tables, _row_stride(q), _row_stride(k), 0, 0, 0, **constants, **_OPTIONS
    )


def write(kv: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """See Operations.write_kv."""
    rows, kv_heads, dim = k.shape
    place = kv[:, layer]
    constants = _constants(0, kv_heads, dim, block_size=kv.shape[3], rotated=False, written=True)
    strides = (0, _row_stride(k), _row_stride(v), kv.stride(0), kv.stride(2))
    place_heads[(rows, kv_heads)](k, k, v, place, slots, slots, k, k, *strides, **constants, **_OPTIONS)


def rotate_and_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
) -> None:
    """`rotate` and `write` in one pass, to the same bits in q and the cache; k itself stays as it was."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    constants = _constants(heads, kv_heads, dim, block_size=kv.shape[3], rotated=True, written=True)
    strides = (_row_stride(q), _row_stride(k), _row_stride(v), kv.stride(0), kv.stride(2))
    place_heads[(rows, heads + kv_heads)](
        q, k, v, kv[:, layer], positions, slots, cos, sin, *strides, **constants, **_OPTIONS
    )


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
    ROTATED: tl.constexpr,
    WRITTEN: tl.constexpr,
) -> None:
    """Grid: (T, HEADS + KV_HEADS). Keys go to the cache if WRITTEN, else back to where they came from."""
    HALF: tl.constexpr = DIM // 2
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, HALF_PADDED)
    inside = dims < HALF
    source = q + row * q_stride + head * DIM + dims
    if head >= HEADS:
        source = k + row * k_stride + (head - HEADS) * DIM + dims
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if ROTATED:
        angle = tl.load(positions + row).to(tl.int64) * HALF + dims
        c = tl.load(cos + angle, mask=inside, other=0.0)
        s = tl.load(sin + angle, mask=inside, other=0.0)
        first, second = first * c - second * s, second * c + first * s
    if WRITTEN:
        if head >= HEADS:
            slot = tl.load(slots + row).to(tl.int64)
            place = (
                slot // BLOCK_SIZE * block_stride
                + slot % BLOCK_SIZE * (KV_HEADS * DIM)
                + (head - HEADS) * DIM
            )
            keys = kv + place + dims
            tl.store(keys, first.to(kv.dtype.element_ty), mask=inside)
            tl.store(keys + HALF, second.to(kv.dtype.element_ty), mask=inside)
            values = v + row * v_stride + (head - HEADS) * DIM + dims
            v_first = tl.load(values, mask=inside, other=0.0).to(kv.dtype.element_ty)
            v_second = tl.load(values + HALF, mask=inside, other=0.0).to(kv.dtype.element_ty)
            tl.store(keys + half, v_first, mask=inside)
            tl.store(keys + half + HALF, v_second, mask=inside)
        else:
            tl.store(source, first.to(q.dtype.element_ty), mask=inside)
            tl.store(source + HALF, second.to(q.dtype.element_ty), mask=inside)
    else:
        tl.store(source, first.to(q.dtype.element_ty), mask=inside)
        tl.store(source + HALF, second.to(q.dtype.element_ty), mask=inside)


_OPTIONS: dict[str, Any] = {"num_warps": 1, **EXACT}


def _constants(
    heads: int, kv_heads: int, dim: int, *, block_size: int, rotated: bool, written: bool
) -> dict[str, Any]:
    assert dim % 2 == 0, dim
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "HALF_PADDED": triton.next_power_of_2(dim // 2),
        "BLOCK_SIZE": block_size,
        "ROTATED": rotated,
        "WRITTEN": written,
    }


def _row_stride(x: torch.Tensor) -> int:
    """Elements between the rows of [T, heads, d] whose rows are contiguous."""
    assert x.stride()[1:] == (x.shape[2], 1), x.stride()
    return x.stride(0)
