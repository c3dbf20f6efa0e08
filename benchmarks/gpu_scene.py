"""A paged cache with sequences in scattered blocks, whose attention is known exactly. Needs torch alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kernels.backend import CODE_MAX, AttentionMeta, dtype_name, scale_elements
from engine.kernels.reference import cached, cached_values

LAYERS, LAYER = 2, 1

Run = tuple[int, int, int]
"""Sequence, first position, end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """dtype: of the cache."""

    kv_heads: int
    group: int
    dim: int
    block_size: int
    dtype: torch.dtype
    window: int | None = None

    def factors(self, device: torch.device) -> torch.dtype:
        """What queries are rounded to. The interpreter has no bfloat16."""
        coded = torch.bfloat16 if device.type != "cpu" else torch.float32
        return coded if self.dtype in CODE_MAX else self.dtype

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        heads = f"{self.kv_heads} x {self.group} heads of {self.dim}"
        return f"{heads}, blocks of {self.block_size}, {dtype_name(self.dtype)}{window}"


class Scene:
    """Every byte of the cache that belongs to no position is NaN. Queries, keys and values are random."""

    def __init__(
        self, lengths: Sequence[int], geometry: Geometry, device: torch.device, seed: int = 0
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        size, heads = geometry.block_size, geometry.kv_heads
        counts = [-(-length // size) for length in lengths]
        free = torch.randperm(sum(counts) + 3, generator=random).tolist()
        row_bytes = (geometry.dim + scale_elements(geometry.dtype)) * geometry.dtype.itemsize
        shape = (len(free), LAYERS, 2, size, heads, row_bytes)
        cache = torch.full(shape, 0xFF, dtype=torch.uint8).view(geometry.dtype)
        self.geometry = geometry
        self.device = device
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        self.queries, self._keys, self._values = (
            [torch.randn(length, count, geometry.dim, generator=random) for length in lengths]
            for count in (heads * geometry.group, heads, heads)
        )
        for table, *both in zip(self.tables, self._keys, self._values, strict=True):
            for half, held in enumerate(cached(x, geometry.dtype) for x in both):
                for position in range(len(held)):
                    cache[table[position // size], LAYER, half, position % size] = held[position]
        self.cache = cache.to(device)

    def rows(self, runs: Sequence[Run]) -> torch.Tensor:
        """Queries of some runs, float32 [T, heads, d]."""
        return torch.cat([self.queries[s][first:end] for s, first, end in runs]).to(self.device)

    def meta(self, runs: Sequence[Run]) -> AttentionMeta:
        size = self.geometry.block_size
        used = [self.tables[s][: -(-end // size)] for s, _, end in runs]
        width = max(map(len, used))
        places = [(self.tables[s][p // size] * size + p % size, p) for s, a, b in runs for p in range(a, b)]
        counts = torch.tensor([0, *(end - first for _, first, end in runs)])
        numbers = {
            "positions": [position for _, position in places],
            "query_starts": counts.cumsum(0).tolist(),
            "context_lengths": [end for _, _, end in runs],
            "block_tables": [ids + [-1] * (width - len(ids)) for ids in used],
        }
        made = {
            name: torch.tensor(each, dtype=torch.int32, device=self.device) for name, each in numbers.items()
        }
        return AttentionMeta(slots=torch.tensor([slot for slot, _ in places], device=self.device), **made)

    def exact(self, run: Run) -> torch.Tensor:
        """float64 attention of one run's rows, on queries as kernels round them, keys and values as the cache does."""
        sequence, first, end = run
        geometry = self.geometry
        q = self.queries[sequence][first:end].to(geometry.factors(self.device)).double()
        k, v = (
            cached_values(cached(x[sequence][:end], geometry.dtype))
            .double()
            .repeat_interleave(geometry.group, dim=1)
            for x in (self._keys, self._values)
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) * geometry.dim**-0.5
        age = torch.arange(first, end).unsqueeze(1) - torch.arange(end)
        hidden = (age < 0) | (age >= (geometry.window or end))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v)
