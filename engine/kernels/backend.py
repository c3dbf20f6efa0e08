"""What computes a model on one device: it packs weights, and makes a decoder of them.

A Backend is row-invariant: what it computes for one token's row does not depend on which other rows are in
the call, on how a prompt was cut into chunks, or on the number of threads. Activations are float32 on the CPU
backends whatever the weights are; a backend rounds where its own kernels need it to. One caller at a time.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from engine.collective import ALONE, Collective


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


CODE_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""What a head's greatest magnitude becomes in a cache of bytes, by dtype."""


def dtype_name(dtype: torch.dtype) -> str:
    """As operators write it."""
    return "fp8" if dtype == torch.float8_e4m3fn else str(dtype).removeprefix("torch.")


def scale_elements(dtype: torch.dtype) -> int:
    """How many elements each head of a position has in the cache behind its head_dim: for bytes the four of the
    float32 that its elements are multiplied by, the greatest magnitude / CODE_MAX."""
    return torch.float32.itemsize if dtype in CODE_MAX else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A weight [out, in] of small integers; `in` is a multiple of GROUP.

    codes: uint8 [out, in], of `bits` bits. scales, least: float16 [out, in / GROUP]; zeros: uint8, likewise. A weight
    is code * scale + least, or (code - zero) * scale where least is None, with the group's own zero where there are
    zeros. At most one of least and zeros is there. (code - zero) * scale is exact in float32.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    least: torch.Tensor | None
    bits: int
    zero: int
    zeros: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """float32 [out, in]."""
        groups = self.codes.view(self.scales.shape[0], -1, GROUP).float()
        scales = self.scales.float().unsqueeze(-1)
        if self.least is None:
            zero = self.zero if self.zeros is None else self.zeros.float().unsqueeze(-1)
            return ((groups - zero) * scales).view(self.codes.shape)
        return (groups * scales + self.least.float().unsqueeze(-1)).view(self.codes.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Norms: float32 [hidden]; those of heads [head_dim], in models that have them.

    qkv: the outputs of queries, keys and values side by side; gate_up: those of the gate and of what it gates.
    window: how many positions a row attends to, itself included, None for all before it.
    """

    input_norm: torch.Tensor
    qkv: PackedLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: PackedLinear
    post_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A dense decoder, packed by the backend that is to compute it, or the share of one that a rank has: some of the
    heads, and of each linear's outputs as many as all others have of it.

    embedding: [vocab, hidden] in the backend's dtype. heads: a multiple of kv_heads. cos, sin: float32
    [max positions, head_dim / 2], halves layout (as Hugging Face). scale: of the products of queries and keys. What is
    not packed may be in host memory.
    """

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: PackedLinear
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float
    cos: torch.Tensor
    sin: torch.Tensor


class Decoder(Protocol):
    """Computes flat batches with one set of weights. Between two calls it keeps memory, never a sequence's state."""

    def forward(
        self, token_ids: torch.Tensor, kv: torch.Tensor, meta: AttentionMeta, rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute all rows, write their KV, and return the logits of the chosen ones.

        token_ids: int64 [T], T >= 1, in [0, vocab). kv: the cache of these heads [blocks, layers, 2, block_size,
        kv_heads, head_dim + scale_elements], rounded to its dtype, one of the backend's kv_dtypes. rows: int64 [n],
        each in [0, T), n <= T. Tensors are contiguous; the cache of a share may be a view of one with all heads.
        Returns a new float32 [n, vocab], in the order of rows.
        """
        ...


Numerics: TypeAlias = tuple[tuple[str, str], ...]
"""What decides the last bits of a result besides its inputs: names and values."""


class Backend(Protocol):
    """See the module."""

    name: str
    device: torch.device
    """Where packed weights are, and every tensor of a decoder's call."""
    dtype: torch.dtype
    """dtype of the packed weights: float32 or bfloat16."""
    kv_dtypes: frozenset[torch.dtype]
    """What a cache can be rounded to."""
    numerics: Numerics
    """Two backends that say the same compute the same."""

    def borrowed_s(self) -> float:
        """Seconds that cores of other workers have computed for this backend, over all of them."""
        ...

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """Take a float32 or bfloat16 weight [out, in]; the argument is not kept."""
        ...

    def pack_quantized(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> PackedLinear:
        """Take a weight as it is. Products with it round their input to signed bytes, with a scale for each row and
        GROUP of inputs; the argument is not kept."""
        ...

    def decoder(self, weights: DecoderWeights, collective: Collective = ALONE) -> Decoder:
        """A decoder of weights that this backend packed; they are kept. collective: of the ranks that each have a share
        of them; `weights` are those of this one."""
        ...
