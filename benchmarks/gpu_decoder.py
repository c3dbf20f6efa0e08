"""A dense decoder of random weights, packed by a backend. Needs torch alone.

What the transformer packs, without files: to compare backends, and to measure a step on a GPU.
"""

from dataclasses import dataclass

import torch

from engine.kernels.backend import (
    GROUP,
    Backend,
    Decoder,
    DecoderWeights,
    LayerWeights,
    PackedLinear,
    QuantizedWeight,
)

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

    def weight_bytes(self, dtype: torch.dtype, bits: int | None) -> int:
        """Read in one step. bits: see random_decoder."""
        count = self.layers * sum(rows * columns for rows, columns in self.products().values())
        count += self.vocab * self.hidden
        if bits is None:
            return count * dtype.itemsize
        return count * bits // 8 + count // GROUP * (2 if bits == 8 else 4)


LLAMA_8B = Sizes(hidden=4096, heads=32, kv_heads=8, dim=128, ffn=14336, vocab=128256, layers=32)
SMALL = Sizes(hidden=64, heads=4, kv_heads=2, dim=16, ffn=96, vocab=120, layers=2)


def random_decoder(
    sizes: Sizes, backend: Backend, bits: int | None, made_on: torch.device, seed: int = 0
) -> Decoder:
    """bits: of the weights, 4 or 8; None for floats of the backend's dtype. made_on: device of the random numbers,
    which are others on another one."""
    pack = _Packer(backend, bits, torch.Generator(made_on).manual_seed(seed))
    norm = torch.ones(sizes.hidden)
    angles = torch.outer(torch.arange(8192.0), torch.logspace(0, -4, sizes.dim // 2))
    return backend.decoder(
        DecoderWeights(
            embedding=pack.random(sizes.vocab, sizes.hidden).to(backend.dtype),
            layers=tuple(_layer(sizes, pack, norm) for _ in range(sizes.layers)),
            final_norm=norm,
            head=pack.product(sizes.vocab, sizes.hidden),
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.dim,
            eps=EPS,
            scale=sizes.dim**-0.5,
            cos=angles.cos(),
            sin=angles.sin(),
        )
    )


def _layer(sizes: Sizes, pack: "_Packer", norm: torch.Tensor) -> LayerWeights:
    products = {name: pack.product(*shape) for name, shape in sizes.products().items()}
    return LayerWeights(**products, input_norm=norm, q_norm=None, k_norm=None, post_norm=norm, window=None)


class _Packer:
    """Random weights, one after another."""

    def __init__(self, backend: Backend, bits: int | None, random: torch.Generator) -> None:
        self._backend, self._bits, self._random = backend, bits, random

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random, device=self._random.device)

    def product(self, rows: int, columns: int) -> PackedLinear:
        if self._bits is None:
            return self._backend.pack(self.random(rows, columns) / columns**0.5)
        random, device = self._random, self._random.device
        codes = torch.randint(
            0, 1 << self._bits, (rows, columns), dtype=torch.uint8, generator=random, device=device
        )
        uniform = torch.rand(rows, columns // GROUP, generator=random, device=device)
        scales = (uniform * (4 / columns**0.5 / (1 << self._bits))).half()
        half = 1 << (self._bits - 1)
        least = -half * scales if self._bits == 4 else None
        return self._backend.pack_quantized(
            QuantizedWeight(codes=codes, scales=scales, least=least, bits=self._bits, zero=half)
        )
