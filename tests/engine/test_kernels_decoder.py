"""A whole step in one native call: the bits of its operations one at a time, and memory that stays as it is."""

import os
from pathlib import Path

import pytest
import torch

from engine.kernels.backend import AttentionMeta, DecoderWeights, LayerWeights, scale_elements
from engine.kernels.composed import ComposedDecoder
from engine.model.quantize import quantize

LAYERS, VOCAB, BLOCK_SIZE, BLOCKS, POSITIONS = 3, 70, 4, 48, 64
SHAPES = {  # hidden, intermediate, heads, kv_heads, head_dim
    "groups": (64, 96, 6, 2, 32),
    "odd widths": (36, 50, 3, 3, 10),
    "one key head": (32, 64, 4, 1, 16),
    "rows worth two threads": (512, 512, 8, 2, 64),
}
RUNS = [
    [(0, 0, 50), (1, 0, 40)],
    [(1, 40, 41), (0, 50, 51), (2, 0, 1)],
    [(0, 51, 60), (1, 41, 42), (2, 1, 60)],
]
"""(sequence, first, end) of each step."""


@pytest.fixture
def kernels_of(backend_of):
    """Backends of compiled kernels."""
    if backend_of(torch.float32, 1).name == "reference":
        pytest.skip("plain torch has no native step")
    return backend_of


def decoder_weights(backend, shape, *, bits=None, biased=False, normed=False, window=None):
    hidden, width, heads, kv_heads, dim = shape
    random = torch.Generator().manual_seed(3)

    def tensor(*sizes):
        return torch.randn(*sizes, generator=random)

    def linear(inputs, outputs):
        weight, bias = tensor(outputs, inputs) / inputs**0.5, tensor(outputs) if biased else None
        if bits is None or inputs % 32:
            return backend.pack(weight, bias)
        return backend.pack_quantized(quantize(weight, bits), bias)

    def layer(index):
        return LayerWeights(
            input_norm=tensor(hidden),
            qkv=linear(hidden, (heads + 2 * kv_heads) * dim),
            q_norm=tensor(dim) if normed else None,
            k_norm=tensor(dim) if normed else None,
            output=linear(heads * dim, hidden),
            post_norm=tensor(hidden),
            gate_up=linear(hidden, 2 * width),
            down=linear(width, hidden),
            window=window if index % 2 else None,
        )

    angles = torch.outer(torch.arange(POSITIONS), torch.rand(dim // 2, generator=random))
    return DecoderWeights(
        embedding=tensor(VOCAB, hidden).to(backend.dtype),
        layers=tuple(layer(index) for index in range(LAYERS)),
        final_norm=tensor(hidden),
        head=linear(hidden, VOCAB),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        eps=1e-5,
        scale=dim**-0.5,
        cos=angles.cos(),
        sin=angles.sin(),
    )


def meta_of(runs) -> AttentionMeta:
    """Sequence s has every third block, from block s on."""
    positions = torch.tensor([p for _, a, b in runs for p in range(a, b)], dtype=torch.int32)
    sequences = torch.tensor([s for s, a, b in runs for _ in range(a, b)])
    starts = torch.tensor([0] + [b - a for _, a, b in runs]).cumsum(0)
    tables = torch.tensor([[s + 3 * i for i in range(BLOCKS // 3)] for s, _, _ in runs])
    slots = (sequences + 3 * (positions // BLOCK_SIZE)) * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionMeta(
        positions=positions,
        slots=slots,
        query_starts=starts.int(),
        context_lengths=torch.tensor([b for _, _, b in runs], dtype=torch.int32),
        block_tables=tables.int(),
    )


def cache_of(weights, dtype):
    row = weights.head_dim + scale_elements(dtype)
    return torch.zeros(BLOCKS, LAYERS, 2, BLOCK_SIZE, weights.kv_heads, row, dtype=dtype)


def answers(decoder, weights, kv_dtype, steps=RUNS):
    """(Logits of every other row, in reverse order, of all steps; the cache after them.)"""
    kv, logits = cache_of(weights, kv_dtype), []
    for runs in steps:
        meta = meta_of(runs)
        token_ids = (meta.positions.long() * 7 + meta.slots) % VOCAB
        chosen = torch.arange(0, len(token_ids), 2).flip(0)
        logits.append(decoder.forward(token_ids, kv, meta, chosen))
    return torch.cat(logits), kv


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_a_step_has_the_bits_of_its_operations_one_at_a_time(kernels_of, name, dtype, bits):
    operations = kernels_of(dtype, 1)
    backend = kernels_of(dtype, 2) if name == "rows worth two threads" else operations
    for options in ({}, {"biased": True}, {"normed": True, "window": 9}):
        weights = decoder_weights(backend, SHAPES[name], bits=bits, **options)
        for kv_dtype in (torch.float32, torch.bfloat16, torch.int8):
            logits, kv = answers(backend.decoder(weights), weights, kv_dtype)
            wanted_logits, wanted_kv = answers(ComposedDecoder(weights, operations), weights, kv_dtype)
            assert logits.isfinite().all() and torch.equal(logits, wanted_logits), options
            assert torch.equal(kv, wanted_kv), options


def test_a_small_batch_does_not_see_what_a_large_one_left_behind(kernels_of):
    backend = kernels_of(torch.bfloat16, 1)
    weights = decoder_weights(backend, SHAPES["groups"])
    fresh, used = backend.decoder(weights), backend.decoder(weights)
    large = meta_of([(0, 0, 60), (1, 0, 60)])  # more rows than any step of RUNS: its memory is used again
    used.forward(torch.full((120,), 3), cache_of(weights, torch.float32), large, torch.tensor([0]))
    used._memory.fill_(torch.nan)
    wanted = answers(fresh, weights, torch.float32)
    got = answers(used, weights, torch.float32)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])


def test_rows_without_logits_write_their_keys_and_values_all_the_same(backend_of):
    backend = backend_of(torch.float32, 1)
    weights = decoder_weights(backend, SHAPES["groups"])
    meta, tokens = meta_of([(0, 0, 20)]), torch.arange(20)
    silent, heard = cache_of(weights, torch.float32), cache_of(weights, torch.float32)
    nothing = backend.decoder(weights).forward(tokens, silent, meta, torch.arange(0))
    backend.decoder(weights).forward(tokens, heard, meta, torch.arange(20))
    assert nothing.shape == (0, VOCAB)
    assert torch.equal(silent, heard)


@pytest.mark.parametrize(("token", "row"), [(-1, 1), (VOCAB, 1), (5, -1), (5, 2)])
def test_a_token_or_a_row_out_of_range_is_a_mistake_of_the_caller_and_nothing_is_written(
    kernels_of, token, row
):
    backend = kernels_of(torch.float32, 1)
    weights = decoder_weights(backend, SHAPES["groups"])
    kv, meta = cache_of(weights, torch.float32), meta_of([(0, 0, 2)])
    with pytest.raises(AssertionError, match="out of range"):
        backend.decoder(weights).forward(torch.tensor([0, token]), kv, meta, torch.tensor([row]))
    assert not kv.any()


@pytest.mark.parametrize("bits", [None, 4])
def test_memory_does_not_grow_over_steps_of_the_same_size(kernels_of, bits):
    backend = kernels_of(torch.bfloat16, 1)
    weights = decoder_weights(backend, SHAPES["groups"], bits=bits)
    decoder = backend.decoder(weights)
    kv, meta = cache_of(weights, torch.bfloat16), meta_of([(0, 0, 30)])
    tokens, chosen = torch.arange(30), torch.tensor([29])

    def resident_bytes_after(steps):
        for _ in range(steps):
            decoder.forward(tokens, kv, meta, chosen)
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    one_row_of_each_step = 2000 * 64 * 4
    before = resident_bytes_after(200)
    assert resident_bytes_after(2000) - before < one_row_of_each_step
