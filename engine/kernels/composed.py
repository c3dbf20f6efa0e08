"""A decoder made of single operations, one call after another.

What a backend without a native step computes with, and what a native step is compared with, bit by bit. Owns the
order of a decoder's operations; computes nothing itself.
"""

from typing import NamedTuple, Protocol

import torch

from engine.collective import ALONE, Collective
from engine.kernels.backend import AttentionMeta, DecoderWeights, LayerWeights, PackedLinear


class Angles(NamedTuple):
    """How rows are rotated. positions: int32 [T]; cos, sin: float32 [max positions, d / 2]."""

    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class Operations(Protocol):
    """`kv` is the whole cache [blocks, layers, 2, block_size, kv_heads, head_dim + scale_elements].

    Tensors are contiguous; q, k and v need only be so within each row: slices of a fused projection will do.
    """

    def linear(self, x: torch.Tensor, linear: PackedLinear) -> torch.Tensor:
        """float32 [T, in] -> float32 [T, out], accumulated in float32."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """float32 [..., n], weight float32 [n] -> float32 [..., n]."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """residual += x in place, both float32 [T, n]; returns the normed new residual."""
        ...

    def rotate_and_write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: Angles,
        kv: torch.Tensor,
        layer: int,
        slots: torch.Tensor,
    ) -> None:
        """Rotate q [T, heads, d] in place, halves layout (as Hugging Face), and k [T, kv_heads, d], and store k and
        v [T, kv_heads, d] at their slots, rounded to kv's dtype. All float32; k itself may change."""
        ...

    def attention(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
        meta: AttentionMeta,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Causal paged attention, q float32 [T, heads, d] -> float32 [T, heads, d].

        A row attends to positions (p - window, p], or [0, p] without a window; heads is a multiple of
        kv_heads.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """float32 [T, 2 n] -> silu(first half) * second half, float32 [T, n]."""
        ...


class ComposedDecoder:
    """See kernels.backend.Decoder. Of several ranks each computes some outputs of every linear, and some heads; before
    the next linear they are put together. So every sum is computed whole, by one rank, and no bit depends on how many
    ranks there are."""

    def __init__(
        self, weights: DecoderWeights, operations: Operations, collective: Collective = ALONE
    ) -> None:
        self._weights = weights
        self._operations = operations
        self._collective = collective

    def forward(
        self, token_ids: torch.Tensor, kv: torch.Tensor, meta: AttentionMeta, rows: torch.Tensor
    ) -> torch.Tensor:
        weights, operations, whole = self._weights, self._operations, self._whole
        x = weights.embedding[token_ids].float()
        residual, last = torch.zeros_like(x), len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            x = operations.add_rms_norm(x, residual, layer.input_norm, weights.eps)
            x = self._attention(layer, index, x, kv, meta)
            if index == last:  # nobody looks at the others any more
                x, residual = x[rows], residual[rows]
            x = operations.add_rms_norm(x, residual, layer.post_norm, weights.eps)
            x = whole(operations.silu_mul(operations.linear(x, layer.gate_up)))
            x = whole(operations.linear(x, layer.down))
        x = operations.add_rms_norm(x, residual, weights.final_norm, weights.eps)
        # Where the vocabulary cannot be shared evenly, what is behind its end belongs to no token.
        return whole(operations.linear(x, weights.head))[:, : weights.embedding.shape[0]].contiguous()

    def _attention(
        self, layer: LayerWeights, index: int, x: torch.Tensor, kv: torch.Tensor, meta: AttentionMeta
    ) -> torch.Tensor:
        weights, operations = self._weights, self._operations
        q, k, v = self._heads(layer, operations.linear(x, layer.qkv))
        angles = Angles(meta.positions, weights.cos, weights.sin)
        operations.rotate_and_write(q, k, v, angles, kv, index, meta.slots)
        mixed = operations.attention(q, kv, index, meta, weights.scale, layer.window)
        return self._whole(operations.linear(self._whole(mixed.flatten(1)), layer.output))

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [T, n] of each rank, side by side."""
        return (
            self._collective.all_gather(x)
            if x.shape[0]
            else x.new_empty(0, self._collective.share.size * x.shape[1])
        )

    def _heads(
        self, layer: LayerWeights, qkv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split [T, (heads + 2 kv_heads) * d] into [T, heads, d] and twice [T, kv_heads, d]."""
        weights = self._weights
        heads = qkv.view(qkv.shape[0], -1, weights.head_dim)
        q, k, v = torch.split(heads, [weights.heads, weights.kv_heads, weights.kv_heads], dim=1)
        if layer.q_norm is not None:
            q = self._operations.rms_norm(q, layer.q_norm, weights.eps)
        if layer.k_norm is not None:
            k = self._operations.rms_norm(k, layer.k_norm, weights.eps)
        return q, k, v
