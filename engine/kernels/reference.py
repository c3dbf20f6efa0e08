"""The Backend in plain torch: the oracle that kernels are compared with, and what serves without a compiler.

Called by tests and, through `choose_backend`, by a worker on a machine with no C++ compiler. Written to be
read and to be right, never to be fast.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from engine.collective import ALONE, Collective
from engine.kernels.backend import (
    CODE_MAX,
    GROUP,
    AttentionMeta,
    Decoder,
    DecoderWeights,
    Numerics,
    PackedLinear,
    QuantizedWeight,
    dtype_name,
    scale_elements,
)
from engine.kernels.composed import Angles, ComposedDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainWeight:
    """A float32 weight [out_features, in_features], its values already rounded. quantized: its input is rounded to
    bytes rather than to the backend's dtype."""

    out_features: int
    in_features: int
    weight: torch.Tensor
    bias: torch.Tensor | None
    quantized: bool = False


class ReferenceBackend:
    """All arithmetic in float32, on values rounded where the CPU kernels round them.

    Whatever sums over more than one element takes one row at a time, in tensors whose shapes depend on the
    row's position alone and which start on a fresh allocation. So a row does not depend on the batch or on
    the chunking. torch does not promise the same result for another number of torch threads: keep it.
    """

    name = "reference"
    kv_dtypes = frozenset({torch.float32, torch.bfloat16, *CODE_MAX})

    def __init__(self, dtype: torch.dtype) -> None:
        assert dtype in {torch.float32, torch.bfloat16}, dtype
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.numerics: Numerics = (
            ("kernels", f"reference torch={torch.__version__}"),
            ("processor", platform.machine()),
            ("weights", dtype_name(dtype)),
        )

    def borrowed_s(self) -> float:
        return 0.0

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        rows, columns = weight.shape
        return PlainWeight(
            out_features=rows,
            in_features=columns,
            weight=weight.to(self.dtype).to(torch.float32, copy=True).contiguous(),
            bias=None if bias is None else bias.to(torch.float32, copy=True),
        )

    def pack_quantized(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> PackedLinear:
        rows, columns = weight.codes.shape
        return PlainWeight(
            out_features=rows,
            in_features=columns,
            weight=weight.values(),
            bias=None if bias is None else bias.to(torch.float32, copy=True),
            quantized=True,
        )

    def decoder(self, weights: DecoderWeights, collective: Collective = ALONE) -> Decoder:
        return ComposedDecoder(weights, self, collective)

    def linear(self, x: torch.Tensor, linear: PackedLinear) -> torch.Tensor:
        assert isinstance(linear, PlainWeight), linear
        rounded = round_to_bytes(x) if linear.quantized else x.to(self.dtype).to(torch.float32)
        out = _by_row(lambda row: torch.mv(linear.weight, row), rounded, linear.out_features)
        return out if linear.bias is None else out + linear.bias

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        def norm(row: torch.Tensor) -> torch.Tensor:
            return row * torch.rsqrt(row.square().mean() + eps) * weight

        return _by_row(norm, x.reshape(-1, x.shape[-1]), x.shape[-1]).reshape(x.shape)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        c = cos[positions].unsqueeze(1)
        s = sin[positions].unsqueeze(1)
        for x in (q, k):
            first, second = x.chunk(2, dim=-1)
            x.copy_(torch.cat((first * c - second * s, second * c + first * s), dim=-1))

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
        self.rotary(q, k, *angles)
        self.write_kv(kv, layer, k, v, slots)

    def write_kv(
        self, kv: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        block_size = kv.shape[3]
        blocks, offsets = slots // block_size, slots % block_size
        for half, x in enumerate((k, v)):
            kv[blocks, layer, half, offsets] = cached(x, kv.dtype)

    def attention(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
        meta: AttentionMeta,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        out = torch.empty(q.shape)
        starts = meta.query_starts.tolist()
        for sequence, (begin, end) in enumerate(pairwise(starts)):
            table = meta.block_tables[sequence].long()
            for row in range(begin, end):
                last = int(meta.positions[row])
                first = 0 if window is None else max(0, last - window + 1)
                seen = torch.arange(first, last + 1)
                block_size = kv.shape[3]
                both = cached_values(kv[table[seen // block_size], layer, :, seen % block_size])
                out[row] = _attend(q[row].clone(), both[:, 0], both[:, 1], scale)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def round_to_bytes(x: torch.Tensor) -> torch.Tensor:
    """float32 [T, n] -> the nearest values that signed bytes with one scale for each row and GROUP can say."""
    scaled, scales = _scaled(x.view(x.shape[0], -1, GROUP), CODE_MAX[torch.int8])
    return (torch.round(scaled) * scales).view(x.shape)


def _scaled(x: torch.Tensor, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., n] -> numbers in [-most, most], and what they are multiplied by, [..., 1]: NaN or infinity where x
    is broken, and then the numbers there are 0."""
    greatest = x.abs().amax(dim=-1, keepdim=True)
    # A number / tensor would be rounded twice, as number * (1 / tensor).
    inverse = torch.where(greatest > 0, torch.tensor(most) / greatest, 0.0)
    return (x * inverse).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), greatest / most


def cached(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 [..., head_dim] -> what a cache of any dtype holds of it, [..., head_dim + scale_elements]."""
    if dtype not in CODE_MAX:
        return x.to(dtype)
    scaled, scales = _scaled(x, CODE_MAX[dtype])
    codes = (torch.round(scaled) if dtype == torch.int8 else scaled).to(dtype)
    return torch.cat((codes.view(torch.int8), scales.view(torch.int8)), dim=-1).view(dtype)


def cached_values(held: torch.Tensor) -> torch.Tensor:
    """What a cache holds, [..., head_dim + scale_elements] of any dtype -> float32 [..., head_dim]."""
    if held.dtype not in CODE_MAX:
        return held.to(torch.float32)
    dim = held.shape[-1] - scale_elements(held.dtype)
    return held[..., :dim].to(torch.float32) * held[..., dim:].clone().view(torch.float32)


def _by_row(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, width: int) -> torch.Tensor:
    """Each row by itself, on a fresh copy: torch picks its kernels by shape and by alignment."""
    out = torch.empty(x.shape[0], width)
    for i in range(x.shape[0]):
        out[i] = function(x[i].clone())
    return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One row: q [heads, d], k and v [seen, kv_heads, d] -> [heads, d]."""
    kv_heads = k.shape[1]
    grouped = q.view(kv_heads, -1, q.shape[-1]) * scale
    scores = torch.einsum("hgd,nhd->hgn", grouped, k)
    weights = torch.softmax(scores, dim=-1)
    return torch.einsum("hgn,nhd->hgd", weights, v).reshape(q.shape)
