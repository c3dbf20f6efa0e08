"""The Backend of one worker on an NVIDIA GPU.

Owns nothing but its choices: which tile, and whether a product is split over more programs; neither changes a bit.
Called by the model on the step thread; one caller at a time, on the current stream. Never waits for the GPU, and never
looks at the contents of a tensor.
"""

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
import triton

from engine.collective import ALONE, Collective
from engine.kernels.backend import (
    CODE_MAX,
    AttentionMeta,
    Decoder,
    DecoderWeights,
    LayerWeights,
    Numerics,
    PackedLinear,
    QuantizedWeight,
    dtype_name,
)
from engine.kernels.composed import Angles, ComposedDecoder
from engine.kernels.triton import heads, rows
from engine.kernels.triton.attention import attention
from engine.kernels.triton.launch import interpreted
from engine.kernels.triton.linear import CHUNK, PackedFloats, float_linear
from engine.kernels.triton.quantized import PackedIntegers, pack_integers, quantized_linear
from engine.kernels.triton.tiles import SPLIT_BYTES_MAX, LinearTile, linear_tile, quantized_tile


class TritonBackend:
    """Row-invariant over any batch and chunking: every sum has one order, in tiles of one shape.

    float32: products are IEEE, without TensorFloat-32. bfloat16: products round both factors to bfloat16 and sum in
    float32. Attention over a cache of bytes takes these in bfloat16, and multiplies with their scales afterwards.
    A quantized weight is used as it is, with its input rounded to `dtype` rather than to bytes. Within one
    sequence, keys or values that are not finite may spoil rows before them that share a tile.
    """

    name = "triton"
    kv_dtypes = frozenset({torch.float32, torch.bfloat16, *CODE_MAX})

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        assert dtype in {torch.float32, torch.bfloat16}, dtype
        assert interpreted() == (device.type == "cpu"), f"kernels cannot run on {device}"
        self.dtype = dtype
        self.device = device
        where, self._programs = _describe(device)
        self.numerics: Numerics = (
            ("kernels", f"triton={triton.__version__}"),
            ("processor", where),
            ("weights", dtype_name(dtype)),
        )

    def borrowed_s(self) -> float:
        return 0.0

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        return PackedFloats(
            weight=weight.to(self.device, self.dtype, copy=True).contiguous(),
            bias=None if bias is None else bias.to(self.device, torch.float32, copy=True),
        )

    def pack_quantized(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> PackedLinear:
        return pack_integers(weight, bias, self.device)

    def decoder(self, weights: DecoderWeights, collective: Collective = ALONE) -> Decoder:
        layers = tuple(_moved(layer, self.device) for layer in weights.layers)
        return ComposedDecoder(replace(_moved(weights, self.device), layers=layers), self, collective)

    def linear(self, x: torch.Tensor, linear: PackedLinear) -> torch.Tensor:
        if isinstance(linear, PackedIntegers):
            tile = quantized_tile(self.dtype)
            return quantized_linear(x, linear, tile, self.dtype, split=self._split(x, linear, tile))
        assert isinstance(linear, PackedFloats), linear
        tile = linear_tile(self.dtype)
        return float_linear(x, linear, tile, split=self._split(x, linear, tile))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rows.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return rows.add_rms_norm(x, residual, weight, eps)

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
        heads.rotate_and_write(q, k, v, angles, kv, layer, slots)

    def attention(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
        meta: AttentionMeta,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        return attention(q, kv, layer, meta, scale, window)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return rows.silu_mul(gate_up)

    def _split(self, x: torch.Tensor, packed: PackedLinear, tile: LinearTile) -> bool:
        """Whether one program per tile would leave much of the GPU idle."""
        rows, columns = x.shape[0], packed.out_features
        chunks: int = triton.cdiv(packed.in_features, CHUNK)
        tiles: int = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
        return chunks > 1 and tiles < self._programs and 4 * chunks * rows * columns <= SPLIT_BYTES_MAX


Weights = TypeVar("Weights", DecoderWeights, LayerWeights)


def _moved(weights: Weights, device: torch.device) -> Weights:
    """The same with its own tensors on the device; what was packed is there."""
    values = {field.name: getattr(weights, field.name) for field in fields(weights)}
    tensors: dict[str, Any] = {
        name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)
    }
    return replace(weights, **tensors)


def _describe(device: torch.device) -> tuple[str, int]:
    """(what decides the last bits, programs that run side by side)."""
    if device.type == "cpu":
        return "interpreter", 1
    properties = torch.cuda.get_device_properties(device)
    return f"sm_{properties.major}{properties.minor}", properties.multi_processor_count
