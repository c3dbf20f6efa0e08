"""What every launch has in common: how sums are rounded, and in which type products are taken.

Numbers that differ from call to call (rows, sequences, chunks) are not specialized on: one compiled kernel serves every
batch, so that none can sum in another order because it happens to hold sixteen rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl

EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Options of kernels that must agree with each other: the compiler may not join products and sums as it likes."""

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on tensors in host memory."""
    return bool(triton.knobs.runtime.interpret)


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """The type that the factors of a product are rounded to. The interpreter takes bfloat16 for integers, silently:
    there it is float32."""
    return tl.float32 if interpreted() and dtype == torch.bfloat16 else _TYPES[dtype]
