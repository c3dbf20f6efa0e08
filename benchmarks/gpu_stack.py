"""Layers of a dense decoder with random weights, by the single operations of a backend. Needs torch alone.

What the transformer does, without files: to compare backends, and to measure a step on a GPU.
"""

from dataclasses import dataclass

import torch

from engine.kernels.backend import GROUP, AttentionMeta, Backend, PackedLinear, QuantizedWeight

EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Sizes:
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    ffn: int
    vocab: int
    layers: int

    def products(self) -> dict[str, tuple[int, int]]:
        """[out, in] of each product of a layer."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.dim, self.hidden),
            "output": (self.hidden, self.heads * self.dim),
            "gate_up": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
        }


LLAMA_8B = Sizes(hidden=4096, heads=32, kv_heads=8, dim=128, ffn=14336, vocab=128256, layers=32)
SMALL = Sizes(hidden=64, heads=4, kv_heads=2, dim=16, ffn=96, vocab=120, layers=2)


class Stack:
    """bits: of the weights, 4 or 8; None for floats of the backend's dtype. made_on: device of the random numbers,
    which are others on another one."""

    def __init__(
        self, sizes: Sizes, backend: Backend, bits: int | None, made_on: torch.device, seed: int = 0
    ) -> None:
        self._sizes, self._backend, self._bits = sizes, backend, bits
        self._random = torch.Generator(made_on).manual_seed(seed)
        self._layers = [
            {name: self._pack(*shape) for name, shape in sizes.products().items()}
            for _ in range(sizes.layers)
        ]
        self._head = self._pack(sizes.vocab, sizes.hidden)
        self._norm = torch.ones(sizes.hidden, device=backend.device)
        angles = torch.outer(torch.arange(8192.0), torch.logspace(0, -4, sizes.dim // 2)).to(backend.device)
        self._cos, self._sin = angles.cos(), angles.sin()

    def forward(
        self, x: torch.Tensor, kv: torch.Tensor, meta: AttentionMeta, window: int | None = None
    ) -> torch.Tensor:
        """float32 [T, hidden] -> logits of every row, float32 [T, vocab]. Writes kv."""
        backend, residual, sizes = self._backend, torch.zeros_like(x), self._sizes
        for index, layer in enumerate(self._layers):
            x = backend.add_rms_norm(x, residual, self._norm, EPS)
            fused = backend.linear(x, layer["qkv"]).view(len(x), -1, sizes.dim)
            q, k, v = fused.split([sizes.heads, sizes.kv_heads, sizes.kv_heads], dim=1)
            backend.rotary(q, k, meta.positions, self._cos, self._sin)
            backend.write_kv(kv, index, k, v, meta.slots)
            mixed = backend.attention(q, kv, index, meta, sizes.dim**-0.5, window)
            x = backend.linear(mixed.flatten(1), layer["output"])
            x = backend.add_rms_norm(x, residual, self._norm, EPS)
            x = backend.linear(backend.silu_mul(backend.linear(x, layer["gate_up"])), layer["down"])
        return backend.linear(backend.add_rms_norm(x, residual, self._norm, EPS), self._head)

    def weight_bytes(self) -> int:
        """Read in one step."""
        sizes = self._sizes
        count = sizes.layers * sum(rows * columns for rows, columns in sizes.products().values())
        count += sizes.vocab * sizes.hidden
        if self._bits is None:
            return count * self._backend.dtype.itemsize
        return count * self._bits // 8 + count // GROUP * (2 if self._bits == 8 else 4)

    def _pack(self, rows: int, columns: int) -> PackedLinear:
        made = {"generator": self._random, "device": self._random.device}
        if self._bits is None:
            return self._backend.pack(torch.randn(rows, columns, **made) / columns**0.5)
        codes = torch.randint(0, 1 << self._bits, (rows, columns), dtype=torch.uint8, **made)
        scales = (torch.rand(rows, columns // GROUP, **made) * (4 / columns**0.5 / (1 << self._bits))).half()
        half = 1 << (self._bits - 1)
        least = -half * scales if self._bits == 4 else None
        return self._backend.pack_quantized(
            QuantizedWeight(codes=codes, scales=scales, least=least, bits=self._bits, zero=half)
        )
