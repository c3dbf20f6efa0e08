"""Whole blocks from place to place: to and from what is handed over or given up.

Called by the lane of copies. Knows bytes and block ids; never what is in them.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import EXACT

WORDS = 4096
"""Four-byte words of one program."""


def gather_blocks(kv: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """A new contiguous tensor of these blocks. blocks: int64 [n], on kv's device."""
    out = torch.empty((len(blocks), *kv.shape[1:]), dtype=kv.dtype, device=kv.device)
    _move(kv, blocks, out, torch.arange(len(blocks), device=kv.device))
    return out


def scatter_blocks(kv: torch.Tensor, blocks: torch.Tensor, values: torch.Tensor) -> None:
    """Put `values` [n, ...] into these blocks, no two of them the same. blocks: int64 [n], on kv's device."""
    assert values.shape[1:] == kv.shape[1:] and values.dtype == kv.dtype, (values.shape, values.dtype)
    _move(values, torch.arange(len(blocks), device=kv.device), kv, blocks)


@triton.jit
def move(
    source: tl.tensor,
    source_ids: tl.tensor,
    target: tl.tensor,
    target_ids: tl.tensor,
    words: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Grid: (n, words / TILE). source, target: int32 [any, words]."""
    run = tl.program_id(0)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = place < words
    first = source + tl.load(source_ids + run) * words
    second = target + tl.load(target_ids + run) * words
    tl.store(second + place, tl.load(first + place, mask=inside), mask=inside)


def _move(
    source: torch.Tensor, source_ids: torch.Tensor, target: torch.Tensor, target_ids: torch.Tensor
) -> None:
    assert source.is_contiguous() and target.is_contiguous(), (source.stride(), target.stride())
    if len(source_ids) == 0:
        return
    words = source[0].numel() * source.element_size() // 4
    assert words * 4 == source[0].numel() * source.element_size(), source.shape
    whole = (tensor.view(-1).view(torch.int32) for tensor in (source, target))
    first, second = whole
    move[(len(source_ids), triton.cdiv(words, WORDS))](
        first, source_ids, second, target_ids, words, TILE=WORDS, num_warps=8, **EXACT
    )
