"""Paged attention: right for any geometry, and the same bits however a sequence is cut into calls."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.backend import AttentionMeta, scale_elements
from engine.kernels.composed import Operations

LAYERS = 2
LAYER = 1
DTYPES = [torch.float32, torch.bfloat16, torch.int8]
GEOMETRIES = [
    (1, 40, 16),
    (2, 80, 1),
    (3, 64, 16),
    (4, 96, 8),
    (5, 40, 32),
    (6, 16, 16),
    (7, 128, 16),
    (8, 72, 3),
]
"""Query heads per key head, head dim, block size."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The projections of one sequence, and the blocks that its keys and values go to."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    blocks: list[int]


class Cache:
    """A paged cache in which every byte that nobody wrote is NaN, and the sequences that live in it."""

    def __init__(self, lengths, *, kv_heads, group, dim, block_size, dtype, seed=0):
        random = torch.Generator().manual_seed(seed)
        counts = [-(-length // block_size) for length in lengths]
        free = torch.randperm(sum(counts) + 3, generator=random).tolist()
        row_bytes = (dim + scale_elements(dtype)) * dtype.itemsize
        shape = (len(free), LAYERS, 2, block_size, kv_heads, row_bytes)
        self.tensor = torch.full(shape, 0xFF, dtype=torch.uint8).view(dtype)
        self.block_size = block_size
        self.prompts = [
            Prompt(
                q=torch.randn(length, kv_heads * group, dim, generator=random),
                k=torch.randn(length, kv_heads, dim, generator=random),
                v=torch.randn(length, kv_heads, dim, generator=random),
                blocks=[free.pop() for _ in range(count)],
            )
            for length, count in zip(lengths, counts, strict=True)
        ]

    def attend(self, backend: Operations, runs, window=None) -> list[torch.Tensor]:
        """One call for runs of (sequence, first, end), their keys and values included; a result per run."""
        meta = self._meta(runs)
        q, k, v = (
            torch.cat([getattr(self.prompts[s], name)[a:b] for s, a, b in runs]) for name in ("q", "k", "v")
        )
        backend.write_kv(self.tensor, LAYER, k, v, meta.slots)
        scale = q.shape[-1] ** -0.5
        out = backend.attention(q, self.tensor, LAYER, meta, scale, window)
        return list(out.split([b - a for _, a, b in runs]))

    def exact(self, sequence: int, window: int | None) -> torch.Tensor:
        """Float64 attention over the whole sequence, on keys and values as the cache rounds them."""
        *_, v, weights = self._doubles(sequence, window)
        return torch.einsum("hqk,khd->qhd", weights, v)

    def rounding(self, sequence: int, window: int | None) -> torch.Tensor:
        """The most that rounding all that is multiplied to bfloat16 can move each element of `exact`.

        A number moves by 2^-9 of itself at most, so a score by 2^-8 of its terms' magnitudes, and a weighted value by
        the factor e^that (1 + 2^-8); the weights' sum moves by no more.
        """
        q, k, v, weights = self._doubles(sequence, window)
        terms = torch.einsum("qhd,khd->hqk", q.abs(), k.abs()) * q.shape[-1] ** -0.5
        moved = 2**-8 * (terms.masked_fill(weights == 0, 0).amax(dim=-1) + 1)
        return torch.einsum("hqk,khd->qhd", weights, v.abs()) * (2 * moved).expm1().T.unsqueeze(-1)

    def _doubles(self, sequence: int, window: int | None) -> tuple[torch.Tensor, ...]:
        prompt = self.prompts[sequence]
        group = prompt.q.shape[1] // prompt.k.shape[1]
        q = prompt.q.double()
        k, v = (
            stored(x, self.tensor.dtype).double().repeat_interleave(group, dim=1)
            for x in (prompt.k, prompt.v)
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        age = torch.arange(len(k)).unsqueeze(1) - torch.arange(len(k))
        hidden = (age < 0) | (age >= (window or len(k)))
        return q, k, v, scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)

    def _meta(self, runs) -> AttentionMeta:
        size = self.block_size
        positions = [p for _, a, b in runs for p in range(a, b)]
        slots = [self.prompts[s].blocks[p // size] * size + p % size for s, a, b in runs for p in range(a, b)]
        starts = [0]
        for _, a, b in runs:
            starts.append(starts[-1] + b - a)
        used = [self.prompts[s].blocks[: -(-b // size)] for s, _, b in runs]
        width = max(map(len, used))
        return AttentionMeta(
            positions=torch.tensor(positions, dtype=torch.int32),
            slots=torch.tensor(slots, dtype=torch.int64),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lengths=torch.tensor([b for _, _, b in runs], dtype=torch.int32),
            block_tables=torch.tensor([ids + [-1] * (width - len(ids)) for ids in used], dtype=torch.int32),
        )


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values as a cache of this dtype rounds them."""
    if dtype != torch.int8:
        return x.to(dtype)
    greatest = x.abs().amax(dim=-1, keepdim=True)
    return torch.round(x * (torch.tensor(127.0) / greatest)) * (greatest / 127)


def cut(length: int, step: int) -> list[tuple[int, int]]:
    return [(first, min(first + step, length)) for first in range(0, length, step)]


def rounds(backend: Operations, dtype: torch.dtype) -> bool:
    return dtype != torch.float32 and ("attention", "rounded") in backend.numerics


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90) | st.integers(120, 270), min_size=1, max_size=3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    dim=st.sampled_from([8, 16, 24, 40, 64, 72, 80, 96, 128, 256]),
    block_size=st.sampled_from([1, 3, 8, 16, 32, 64, 100]),
    dtype=st.sampled_from(DTYPES),
    window=st.none() | st.integers(1, 100),
    seed=st.integers(0, 99),
)
def test_attention_of_any_geometry_is_close_to_float64(
    backend_of, lengths, kv_heads, group, dim, block_size, dtype, window, seed
):
    cache = Cache(
        lengths, kv_heads=kv_heads, group=group, dim=dim, block_size=block_size, dtype=dtype, seed=seed
    )
    backend: Operations = backend_of(torch.float32, 2)
    runs = [(sequence, 0, length) for sequence, length in enumerate(lengths)]
    for sequence, got in enumerate(cache.attend(backend, runs, window)):
        exact = cache.exact(sequence, window)
        moved = cache.rounding(sequence, window) if rounds(backend, dtype) else 0
        assert ((got - exact).abs() <= 5e-6 * (1 + exact.abs()) + moved).all()


def test_rounded_queries_and_weights_cost_a_quarter_of_a_per_cent(backend_of):
    cache = Cache([300], kv_heads=2, group=3, dim=64, block_size=16, dtype=torch.bfloat16)
    exact = cache.exact(0, None)
    error = cache.attend(backend_of(torch.bfloat16, 1), [(0, 0, 300)])[0] - exact
    assert error.norm() < 0.0025 * exact.norm()


@pytest.mark.parametrize("window", [None, 1, 37, 100])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "dim", "block_size"), GEOMETRIES)
def test_whole_prompt_chunks_and_single_tokens_agree_bit_by_bit(
    backend_of, group, dim, block_size, dtype, window
):
    length = 150
    backend: Operations = backend_of(torch.float32, 1)
    results = []
    for step in (length, 1, 7, 64):
        cache = Cache([length], kv_heads=2, group=group, dim=dim, block_size=block_size, dtype=dtype)
        parts = [cache.attend(backend, [(0, a, b)], window)[0] for a, b in cut(length, step)]
        results.append(torch.cat(parts))
    for other in results[1:]:
        assert torch.equal(other, results[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_sequence_has_the_same_bits_alone_and_among_others(backend_of, threads, dtype):
    lengths = [130, 1, 64, 400, 65]
    geometry = {"kv_heads": 3, "group": 3, "dim": 64, "block_size": 16, "dtype": dtype}
    runs = [(sequence, 0, length) for sequence, length in enumerate(lengths)]
    together = Cache(lengths, **geometry).attend(backend_of(torch.float32, threads), runs)
    lonely = Cache(lengths, **geometry)
    for run, among_others in zip(runs, together, strict=True):
        assert torch.equal(lonely.attend(backend_of(torch.float32, 1), [run])[0], among_others)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 64])
def test_the_last_tokens_of_many_sequences_have_the_bits_of_their_prompts(backend_of, dtype, dim):
    lengths = [*range(250, 262), 1, 2, 33]
    geometry = {"kv_heads": 3, "group": 3, "dim": dim, "block_size": 16, "dtype": dtype}
    cache = Cache(lengths, **geometry)
    prompts = [
        cache.attend(backend_of(torch.float32, 1), [(s, 0, length)])[0] for s, length in enumerate(lengths)
    ]
    for threads in (1, 2):
        backend = backend_of(torch.float32, threads)
        last = cache.attend(backend, [(s, length - 1, length) for s, length in enumerate(lengths)])
        for prompt, token in zip(prompts, last, strict=True):
            assert torch.equal(token[0], prompt[-1])


def test_prompt_chunks_and_single_tokens_mix_in_one_call(backend_of):
    lengths = [100, 80, 33]
    geometry = {"kv_heads": 1, "group": 4, "dim": 16, "block_size": 8, "dtype": torch.float32}
    backend: Operations = backend_of(torch.float32, 2)
    cache, mixed = Cache(lengths, **geometry), Cache(lengths, **geometry)
    wanted = [cache.attend(backend, [(s, 0, length)])[0] for s, length in enumerate(lengths)]
    mixed.attend(backend, [(0, 0, 99), (1, 0, 10)])
    got = mixed.attend(backend, [(0, 99, 100), (1, 10, 80), (2, 0, 33)])
    assert torch.equal(got[0], wanted[0][99:])
    assert torch.equal(got[1], wanted[1][10:])
    assert torch.equal(got[2], wanted[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_block_size(backend_of, dtype):
    backend: Operations = backend_of(torch.float32, 1)
    results = []
    for block_size in (1, 5, 16, 128):
        cache = Cache([140], kv_heads=2, group=2, dim=24, block_size=block_size, dtype=dtype)
        cache.prompts[0] = Prompt(
            q=torch.linspace(-1, 1, 140 * 4 * 24).sin().view(140, 4, 24),
            k=torch.linspace(-9, 2, 140 * 2 * 24).cos().view(140, 2, 24),
            v=torch.linspace(-3, 8, 140 * 2 * 24).cos().view(140, 2, 24),
            blocks=cache.prompts[0].blocks,
        )
        results.append(cache.attend(backend, [(0, 0, 140)])[0])
    for other in results[1:]:
        assert torch.equal(other, results[0])


@pytest.mark.parametrize("broken", [70, 71])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 20])
def test_a_broken_position_touches_only_the_rows_that_see_it(backend_of, window, dtype, broken):
    backend: Operations = backend_of(torch.float32, 1)
    geometry = {"kv_heads": 1, "group": 3, "dim": 64, "block_size": 16, "dtype": dtype}
    wanted = Cache([120], **geometry).attend(backend, [(0, 0, 120)], window)[0]
    cache = Cache([120], **geometry)
    cache.prompts[0].v[broken] = torch.nan
    cache.prompts[0].k[broken] = torch.nan
    got = cache.attend(backend, [(0, 0, 120)], window)[0]
    end = 120 if window is None else broken + window
    assert torch.equal(got[:broken], wanted[:broken])
    assert got[broken:end].isnan().all()
    assert torch.equal(got[end:], wanted[end:])


def test_queries_may_be_a_slice_of_a_wider_projection(backend_of):
    backend: Operations = backend_of(torch.float32, 1)
    geometry = {"kv_heads": 2, "group": 2, "dim": 16, "block_size": 4, "dtype": torch.float32}
    wanted = Cache([20], **geometry).attend(backend, [(0, 0, 20)])[0]
    cache = Cache([20], **geometry)
    prompt = cache.prompts[0]
    fused = torch.cat([prompt.q, prompt.k, prompt.v], dim=1).view(20, -1)
    q, k, v = (x.view(20, -1, 16) for x in fused.split([4 * 16, 2 * 16, 2 * 16], dim=1))
    meta = cache._meta([(0, 0, 20)])
    backend.write_kv(cache.tensor, LAYER, k, v, meta.slots)
    assert torch.equal(backend.attention(q, cache.tensor, LAYER, meta, 0.25, None), wanted)
