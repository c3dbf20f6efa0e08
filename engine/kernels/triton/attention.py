"""Causal attention over the paged cache, the same bits however rows are cut into calls.

Keys are taken in tiles, and tiles in chunks of CHUNK positions at absolute boundaries. A chunk's softmax starts
afresh, and chunks are folded in order. So it does not matter whether one program walks over all chunks of its rows
(`attend_whole`, for many rows) or each chunk has a program of its own (`attend_split`, `fold_chunks`, for single rows
over long contexts): both run `_chunk` and `_fold` on tiles of one shape. A tile in which a row sees nothing leaves the
row as it was. Called by the backend; never writes the cache.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.backend import CODE_MAX, AttentionMeta
from engine.kernels.triton.codes import coding, factors_of, load_scale, stored
from engine.kernels.triton.launch import EXACT, dot_type
from engine.kernels.triton.tiles import SPLIT_BYTES_MAX, AttentionTile, attention_tile

CHUNK = 256
"""Positions whose keys are folded as one: a multiple of every tile's keys."""

_LOG2_E = 1.4426950408889634


def attention(
    q: torch.Tensor, kv: torch.Tensor, layer: int, meta: AttentionMeta, scale: float, window: int | None
) -> torch.Tensor:
    """q float [T, heads, d], rows contiguous in themselves -> a new tensor like it. See Operations.attention.

    Queries and softmax weights are rounded to the cache's dtype, or to bfloat16 if that is bytes; sums are float32.
    """
    rows, heads, dim = q.shape
    sequences, table_width = meta.block_tables.shape
    group = heads // kv.shape[4]
    tile = attention_tile(kv.dtype, dim)
    group_padded = triton.next_power_of_2(group)
    assert heads % kv.shape[4] == 0 and group_padded <= tile.rows, (q.shape, kv.shape)
    assert q.stride()[1:] == (dim, 1) and kv.is_contiguous(), (q.stride(), kv.stride())
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shape = geometry(kv, dim, group, tile, windowed=window is not None)
    places = (q, stored(kv)[:, layer], meta.query_starts, meta.context_lengths, meta.block_tables)
    numbers = (q.stride(0), kv.stride(0), kv.stride(2), table_width, scale * _LOG2_E, window or 0)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers, **EXACT}
    chunks = triton.cdiv(table_width * kv.shape[3], CHUNK)
    if rows > sequences or 4 * rows * heads * chunks * (dim + 2) > SPLIT_BYTES_MAX:
        tiles = rows // (tile.rows // group_padded) + sequences
        grid = (tiles, kv.shape[4])
        attend_whole[grid](out, *places, *numbers, sequences, **shape, **options)
        return out
    mixed = torch.empty((rows, heads, chunks, dim), dtype=torch.float32, device=q.device)
    weight = torch.empty((2, rows, heads, chunks), dtype=torch.float32, device=q.device)
    attend_split[(rows, kv.shape[4], chunks)](mixed, weight, *places, *numbers, chunks, **shape, **options)
    fold = {
        name: shape[name] for name in ("KV_HEADS", "GROUP", "GROUP_PADDED", "DIM", "DIM_PADDED", "WINDOWED")
    }
    fold_chunks[(rows, kv.shape[4])](
        out,
        mixed,
        weight,
        meta.context_lengths,
        chunks,
        window or 0,
        **fold,
        CHUNK=CHUNK,
        num_warps=4,
        **EXACT,
    )
    return out


def geometry(
    kv: torch.Tensor, dim: int, group: int, tile: AttentionTile, *, windowed: bool
) -> dict[str, Any]:
    """What the kernels are compiled for, by the names of their parameters."""
    return {
        "BLOCK_SIZE": kv.shape[3],
        "KV_HEADS": kv.shape[4],
        "GROUP": group,
        "GROUP_PADDED": triton.next_power_of_2(group),
        "DIM": dim,
        "DIM_PADDED": max(16, triton.next_power_of_2(dim)),
        "WINDOWED": windowed,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "CHUNK": CHUNK,
        "DOT": dot_type(torch.bfloat16 if kv.dtype in CODE_MAX else kv.dtype),
        **coding(kv, dim),
    }


@triton.jit(do_not_specialize=["table_stride", "window", "sequences"])
def attend_whole(
    out: tl.tensor,
    q: tl.tensor,
    kv: tl.tensor,
    query_starts: tl.tensor,
    context_lengths: tl.tensor,
    block_tables: tl.tensor,
    q_stride: tl.tensor,
    block_stride: tl.tensor,
    half: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    sequences: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    WINDOWED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
    ROW: tl.constexpr,
    CODES: tl.constexpr,
) -> None:
    """One program for some tokens of a sequence and the query heads of one key head. Grid: (T // tokens + S, KV_HEADS),
    so that every sequence has its last, partly filled tile."""
    TOKENS: tl.constexpr = ROWS // GROUP_PADDED
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = _sequence_of(tile, query_starts, sequences, TOKENS)
    begin = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - begin
    first_token = (tile - begin // TOKENS - sequence) * TOKENS
    if first_token >= count:
        return
    context = tl.load(context_lengths + sequence)
    token = first_token + tl.arange(0, ROWS) // GROUP_PADDED
    head = tl.arange(0, ROWS) % GROUP_PADDED
    live = (token < count) & (head < GROUP)
    position = tl.where(live, context - count + token, -1)
    dims = tl.arange(0, DIM_PADDED)
    row = (begin + token).to(tl.int64)
    head_place = (kv_head * GROUP + head) * DIM
    inside = live[:, None] & (dims < DIM)[None, :]
    queries = tl.load(q + (row * q_stride + head_place)[:, None] + dims[None, :], mask=inside, other=0.0).to(
        DOT
    )

    first = 0
    if WINDOWED:
        first = tl.maximum(context - count + first_token - window + 1, 0) // KEYS
    end = (context - count + tl.minimum(first_token + TOKENS, count) + KEYS - 1) // KEYS
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    mixed = tl.full([ROWS, DIM_PADDED], 0.0, tl.float32)
    PER_CHUNK: tl.constexpr = CHUNK // KEYS
    keys = kv + kv_head * ROW
    table = block_tables + sequence.to(tl.int64) * table_stride
    for chunk in range(first // PER_CHUNK, (end + PER_CHUNK - 1) // PER_CHUNK):
        chunk_peak, chunk_total, chunk_mixed = _chunk(
            queries, position, keys, table, tl.maximum(first, chunk * PER_CHUNK),
            tl.minimum(end, (chunk + 1) * PER_CHUNK), context, block_stride, half, scale, window,
            BLOCK_SIZE, KV_HEADS, DIM, DIM_PADDED, WINDOWED, ROWS, KEYS, DOT, ROW, CODES,
        )  # fmt: skip
        peak, total, mixed = _fold(peak, total, mixed, chunk_peak, chunk_total, chunk_mixed)
    out_row = out + (row * (KV_HEADS * GROUP * DIM) + head_place)[:, None] + dims[None, :]
    tl.store(out_row, (mixed / tl.where(live, total, 1.0)[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["table_stride", "window", "chunks"])
def attend_split(
    mixed_out: tl.tensor,
    weight_out: tl.tensor,
    q: tl.tensor,
    kv: tl.tensor,
    query_starts: tl.tensor,
    context_lengths: tl.tensor,
    block_tables: tl.tensor,
    q_stride: tl.tensor,
    block_stride: tl.tensor,
    half: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    chunks: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    WINDOWED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
    ROW: tl.constexpr,
    CODES: tl.constexpr,
) -> None:
    """One program for one chunk of the one row that each sequence has. Grid: (S, KV_HEADS, chunks).

    mixed_out: float32 [S, heads, chunks, d]; weight_out: float32 [2, S, heads, chunks], peaks and totals.
    """
    sequence, kv_head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(context_lengths + sequence)
    seen_from = 0
    if WINDOWED:
        seen_from = tl.maximum(context - window, 0)
    if (chunk * CHUNK >= context) | ((chunk + 1) * CHUNK <= seen_from):
        return
    slot = tl.arange(0, ROWS)
    live = slot < GROUP
    position = tl.where(live, context - 1, -1)
    dims = tl.arange(0, DIM_PADDED)
    row = tl.load(query_starts + sequence).to(tl.int64)
    head = kv_head * GROUP + slot
    inside = live[:, None] & (dims < DIM)[None, :]
    queries = tl.load(q + row * q_stride + (head * DIM)[:, None] + dims[None, :], mask=inside, other=0.0).to(
        DOT
    )

    PER_CHUNK: tl.constexpr = CHUNK // KEYS
    first = tl.maximum(seen_from // KEYS, chunk * PER_CHUNK)
    end = tl.minimum((context + KEYS - 1) // KEYS, (chunk + 1) * PER_CHUNK)
    table = block_tables + sequence.to(tl.int64) * table_stride
    peak, total, mixed = _chunk(
        queries, position, kv + kv_head * ROW, table, first, end, context, block_stride, half, scale, window,
        BLOCK_SIZE, KV_HEADS, DIM, DIM_PADDED, WINDOWED, ROWS, KEYS, DOT, ROW, CODES,
    )  # fmt: skip
    place = (row * (KV_HEADS * GROUP) + head) * chunks + chunk
    peaks = weight_out + place
    tl.store(peaks, peak, mask=live)
    tl.store(peaks + tl.num_programs(0).to(tl.int64) * (KV_HEADS * GROUP) * chunks, total, mask=live)
    tl.store(mixed_out + (place * DIM)[:, None] + dims[None, :], mixed, mask=inside)


@triton.jit(do_not_specialize=["chunks", "window"])
def fold_chunks(
    out: tl.tensor,
    mixed_in: tl.tensor,
    weight_in: tl.tensor,
    context_lengths: tl.tensor,
    chunks: tl.tensor,
    window: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Second pass of `attend_split`: the chunks of one row, in order. Grid: (S, KV_HEADS)."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    context = tl.load(context_lengths + row)
    first = 0
    if WINDOWED:
        first = tl.maximum(context - window, 0) // CHUNK
    slot = tl.arange(0, GROUP_PADDED)
    live = slot < GROUP
    dims = tl.arange(0, DIM_PADDED)
    inside = live[:, None] & (dims < DIM)[None, :]
    head = row * (KV_HEADS * GROUP) + kv_head * GROUP + slot
    totals = weight_in + tl.num_programs(0).to(tl.int64) * (KV_HEADS * GROUP) * chunks
    peak = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.full([GROUP_PADDED], 0.0, tl.float32)
    mixed = tl.full([GROUP_PADDED, DIM_PADDED], 0.0, tl.float32)
    for chunk in range(first, (context + CHUNK - 1) // CHUNK):
        place = head * chunks + chunk
        chunk_peak = tl.load(weight_in + place, mask=live, other=float("-inf"))
        chunk_total = tl.load(totals + place, mask=live, other=0.0)
        chunk_mixed = tl.load(mixed_in + (place * DIM)[:, None] + dims[None, :], mask=inside, other=0.0)
        peak, total, mixed = _fold(peak, total, mixed, chunk_peak, chunk_total, chunk_mixed)
    out_row = out + (head * DIM)[:, None] + dims[None, :]
    tl.store(out_row, (mixed / tl.where(live, total, 1.0)[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sequence_of(
    tile: tl.tensor, query_starts: tl.tensor, sequences: tl.tensor, TOKENS: tl.constexpr
) -> tl.tensor:
    """The last sequence whose tiles start at or before this one; sequence s starts at starts[s] // TOKENS + s."""
    low, high = 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _chunk(
    queries: tl.tensor,
    position: tl.tensor,
    keys: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    context: tl.tensor,
    block_stride: tl.tensor,
    half: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    WINDOWED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DOT: tl.constexpr,
    ROW: tl.constexpr,
    CODES: tl.constexpr,
) -> tl.tensor:
    """Softmax over the key tiles [first, end) alone: (peaks [ROWS], totals [ROWS], mixed values [ROWS, DIM_PADDED]).

    position: of each row, -1 where there is none. What lies past the context is not read: it may be anything.
    """
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    mixed = tl.full([ROWS, DIM_PADDED], 0.0, tl.float32)
    dims = tl.arange(0, DIM_PADDED)
    for tile in range(first, end):
        key = tile * KEYS + tl.arange(0, KEYS)
        there = key < context
        block = tl.load(table + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        place = block * block_stride + (key % BLOCK_SIZE) * (KV_HEADS * ROW)
        k = tl.load(
            keys + place[None, :] + dims[:, None], mask=there[None, :] & (dims < DIM)[:, None], other=0
        )
        scores = tl.dot(queries, factors_of(k, CODES, DOT), input_precision="ieee") * scale
        if CODES != "":
            scores = scores * load_scale(keys + place, there, DIM)[None, :]
        seen = key[None, :] <= position[:, None]
        if WINDOWED:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(peak - anchor)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(
            keys + half + place[:, None] + dims[None, :],
            mask=there[:, None] & (dims < DIM)[None, :],
            other=0,
        )
        if CODES != "":
            weights = weights * load_scale(keys + half + place, there, DIM)[None, :]
        values = factors_of(v, CODES, DOT)
        mixed = tl.dot(weights.to(DOT), values, mixed * shrink[:, None], input_precision="ieee")
        peak = higher
    return peak, total, mixed


@triton.jit
def _fold(
    peak: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    chunk_peak: tl.tensor,
    chunk_total: tl.tensor,
    chunk_mixed: tl.tensor,
) -> tl.tensor:
    """Parts of a softmax and those of the next chunk, as one."""
    higher = tl.maximum(peak, chunk_peak)
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    keep = tl.exp2(peak - anchor)
    take = tl.exp2(chunk_peak - anchor)
    mixed = mixed * keep[:, None] + chunk_mixed * take[:, None]
    return higher, total * keep + chunk_total * take, mixed
