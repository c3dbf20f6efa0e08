"""Geometry and dtype of a block, and the digest that both ends of a hand-off compare."""

import hashlib
from dataclasses import dataclass
from math import prod

import torch

from engine.kernels.backend import Numerics, dtype_name, scale_elements

LAYOUT_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """A block holds KV of `block_size` consecutive positions, all layers, in one contiguous run of bytes.

    numerics: what decides the last bits of its contents besides model and tokens (see kernels.Backend), by names that
    none of the other fields has. Workers that differ in it would not continue each other's sequences exactly.
    """

    model_digest: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    numerics: Numerics = ()

    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[layers, 2 (key, value), block_size, kv_heads, head_dim and behind it the bytes of its scale, if any]."""
        row = self.head_dim + scale_elements(self.dtype)
        return (self.layers, 2, self.block_size, self.kv_heads, row)

    def block_bytes(self) -> int:
        return prod(self.block_shape()) * self.dtype.itemsize

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` positions."""
        return -(-tokens // self.block_size)

    def fields(self) -> dict[str, str]:
        """What the fingerprint covers, by name: two workers that differ are told which field differs."""
        geometry = {
            "version": str(LAYOUT_VERSION),
            "model": self.model_digest,
            "layers": str(self.layers),
            "kv_heads": str(self.kv_heads),
            "head_dim": str(self.head_dim),
            "block_size": str(self.block_size),
            "dtype": dtype_name(self.dtype),
        }
        assert geometry.keys().isdisjoint(dict(self.numerics)), "a name twice"
        return geometry | dict(self.numerics)

    def fingerprint(self) -> bytes:
        """SHA-256 over the length-prefixed fields: 32 bytes."""
        digest = hashlib.sha256()
        for name, value in sorted(self.fields().items()):
            for part in (name.encode(), value.encode()):
                digest.update(len(part).to_bytes(4, "big") + part)
        return digest.digest()
