"""The numeric operations a model is made of, on one device.

A Backend is row-invariant: what it computes for one token's row does not depend on which other rows are in
the call, on how a prompt was cut into chunks, or on the number of threads. Activations are float32 on the CPU
backends whatever the weights are; a backend rounds where its own kernels need it to. One caller at a time.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMeta:
    """Where the rows of a flat batch stand. T rows, S sequences; contiguous, on the backend's device.

    positions: int32 [T], absolute, ascending by one within a sequence. slots: int64 [T], where the row's KV
    goes: block id * block_size + offset. query_starts: int32 [S + 1], row ranges of the sequences.
    context_lengths: int32 [S], tokens up to and including the sequence's last row. block_tables: int32
    [S, most blocks], padded with -1.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    context_lengths: torch.Tensor
    block_tables: torch.Tensor


class PackedLinear(Protocol):
    """A weight [out_features, in_features] in the backend's own order, with an optional bias."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


GROUP = 32
"""Inputs of a quantized weight that share a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A weight [out, in] of small integers; `in` is a multiple of GROUP.

    codes: uint8 [out, in], of `bits` bits. scales, least: float16 [out, in / GROUP]. A weight is code * scale + least,
    or (code - zero) * scale where least is None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    least: torch.Tensor | None
    bits: int
    zero: int

    def values(self) -> torch.Tensor:
        """float32 [out, in]."""
        groups = self.codes.view(self.scales.shape[0], -1, GROUP).float()
        scales = self.scales.float().unsqueeze(-1)
        if self.least is None:
            return ((groups - self.zero) * scales).view(self.codes.shape)
        return (groups * scales + self.least.float().unsqueeze(-1)).view(self.codes.shape)


class Backend(Protocol):
    """See the module. `kv` is the whole cache [blocks, layers, 2, block_size, kv_heads, head_dim].

    Tensors are contiguous; q, k and v need only be so within each row: slices of a fused projection will do.
    """

    name: str
    device: torch.device
    """Where packed weights are, and every tensor of a call."""
    dtype: torch.dtype
    """dtype of the packed weights: float32 or bfloat16."""
    numerics: str
    """What decides the last bits of a result besides its inputs. Two backends that say the same compute the same."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """Take a float32 or bfloat16 weight [out, in]; the argument is not kept."""
        ...

    def pack_quantized(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> PackedLinear:
        """Take a weight as it is. `linear` with it rounds its input to signed bytes, with a scale for each row and
        GROUP of inputs; the argument is not kept."""
        ...

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

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        """Rotate in place, halves layout (as Hugging Face): q [T, heads, d], k [T, kv_heads, d], float32.

        cos, sin: float32 [max positions, d / 2].
        """
        ...

    def write_kv(
        self, kv: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Store k, v float32 [T, kv_heads, d] at their slots, rounded to kv's dtype."""
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
