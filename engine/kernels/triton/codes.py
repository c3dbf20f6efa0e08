"""Keys and values as bytes with a scale behind them: how kernels make and read what a cache of int8 or fp8 holds.

Called by kernels. The definition is that of `engine.kernels.reference`, to the bit. fp8 is e4m3 of finite numbers, put
together and taken apart by integers, so that GPUs without an instruction for it give the same bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.backend import CODE_MAX, dtype_name, scale_elements


def stored(kv: torch.Tensor) -> torch.Tensor:
    """The cache as kernels take it: what is a byte and a scale is signed bytes to them."""
    return kv.view(torch.int8) if kv.dtype in CODE_MAX else kv


def coding(kv: torch.Tensor, dim: int) -> dict[str, Any]:
    """What a kernel is compiled for, by the names of its parameters. dim: of a head."""
    assert kv.shape[-1] == dim + scale_elements(kv.dtype), (kv.shape, dim)
    if kv.dtype not in CODE_MAX:
        return {"CODES": "", "ROW": dim}
    assert dim % 4 == 0, f"scales behind {dim} bytes are not where float32 can be"
    return {"CODES": dtype_name(kv.dtype), "ROW": kv.shape[-1]}


@triton.jit
def store_head(
    place: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    dims: tl.tensor,
    inside: tl.tensor,
    DIM: tl.constexpr,
    CODES: tl.constexpr,
) -> None:
    """Round both halves of one head, float32, into the cache at `place`."""
    HALF: tl.constexpr = DIM // 2
    if CODES == "":
        tl.store(place + dims, first.to(place.dtype.element_ty), mask=inside)
        tl.store(place + HALF + dims, second.to(place.dtype.element_ty), mask=inside)
    else:
        GREATEST: tl.constexpr = 127.0 if CODES == "int8" else 448.0
        greatest = tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0))
        broken = tl.max(_is_nan(first) | _is_nan(second), 0)
        greatest = tl.where(broken > 0, float("nan"), greatest)
        inverse = tl.where(greatest > 0, tl.div_rn(GREATEST, tl.where(greatest > 0, greatest, 1.0)), 0.0)
        tl.store(place + dims, _code(first * inverse, CODES), mask=inside)
        tl.store(place + HALF + dims, _code(second * inverse, CODES), mask=inside)
        tl.store((place + DIM).to(tl.pointer_type(tl.float32)), tl.div_rn(greatest, GREATEST))


@triton.jit
def load_scale(place: tl.tensor, there: tl.tensor, DIM: tl.constexpr) -> tl.tensor:
    """float32, of the heads that begin at `place`."""
    return tl.load((place + DIM).to(tl.pointer_type(tl.float32)), mask=there, other=0.0)


@triton.jit
def factors_of(codes: tl.tensor, CODES: tl.constexpr, DOT: tl.constexpr) -> tl.tensor:
    """What was read of the cache as factors of a product; without its scale, if it has one."""
    if CODES == "fp8":
        # The byte's exponent and mantissa where those of a float32 are; exponents start 120 lower.
        bits = (codes.to(tl.int32) << 20) & -0x78100000
        values = (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DOT)
    elif CODES == "int8":
        values = codes.to(tl.float32).to(DOT)
    else:
        values = codes.to(DOT)
    return values


@triton.jit
def _is_nan(x: tl.tensor) -> tl.tensor:
    return ((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > 0x7F800000).to(tl.int32)


@triton.jit
def _code(x: tl.tensor, CODES: tl.constexpr) -> tl.tensor:
    """The nearest code, ties to even, as int8; 0 for what is not finite."""
    x = tl.where(tl.abs(x) < 512.0, x, 0.0)
    if CODES == "int8":
        code = (x + 12582912.0) - 12582912.0  # whole numbers have no other place in a float32 of this size
    else:
        bits = x.to(tl.int32, bitcast=True)
        least = bits & 0x7FFFFFFF
        normal = ((least + 0x7FFFF + ((least >> 20) & 1)) >> 20) - 960
        # Below 2^-6 codes are multiples of 2^-9, which is what a float32 of 2^14 counts in.
        small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(tl.abs(x) < 0.015625, small, normal) | ((bits >> 24) & 0x80)
    return code.to(tl.int8)
