"""The compiled kernels one at a time.

Called where a step is shared by several ranks, and by tests and benchmarks; a rank that has the whole model takes it in
one native call. All but products and attention run on the caller's thread.
"""

from collections.abc import Callable
from ctypes import POINTER, byref, c_float, c_int64, c_void_p
from functools import cached_property

import torch

from engine.collective import ALONE, Collective
from engine.kernels.backend import AttentionMeta, Decoder, DecoderWeights, PackedLinear, scale_elements
from engine.kernels.composed import Angles, ComposedDecoder
from engine.kernels.cpu.backend import CpuBackend
from engine.kernels.cpu.library import SUFFIXES, PackedWeight, check
from engine.kernels.cpu.structures import Cache, Linear, Queries

_CACHES = SUFFIXES | {torch.int8: "int8"}
_WRITE_KV = (POINTER(Cache), c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64)
_ATTENTION = (c_void_p, POINTER(Cache), POINTER(Queries))
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "linear": (c_void_p, POINTER(Linear), c_void_p, c_int64, c_void_p),
    "rms_norm": (c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p),
    "add_rms_norm": (c_void_p, c_void_p, c_void_p, c_float, c_int64, c_int64),
    "rotary": (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p),
    "silu_mul": (c_void_p, c_int64, c_int64),
    **{f"write_kv_{suffix}": _WRITE_KV for suffix in _CACHES.values()},
    **{f"attention_{suffix}": _ATTENTION for suffix in _CACHES.values()},
}


class CpuOperations(CpuBackend):
    """See kernels.composed.Operations."""

    @cached_property
    def _kernels(self) -> dict[str, Callable[..., None]]:
        return {name: self._library.single(name, arguments) for name, arguments in _SIGNATURES.items()}

    def decoder(self, weights: DecoderWeights, collective: Collective = ALONE) -> Decoder:
        if collective.share.size == 1:
            return super().decoder(weights)
        return ComposedDecoder(weights, self, collective)

    def linear(self, x: torch.Tensor, linear: PackedLinear) -> torch.Tensor:
        assert isinstance(linear, PackedWeight), linear
        check(x, torch.float32, 2)
        rows, columns = x.shape
        assert columns == linear.in_features, (columns, linear.in_features)
        out = torch.empty(rows, linear.out_features)
        self._kernels["linear"](
            self._crew.handle, byref(linear.structure), x.data_ptr(), rows, out.data_ptr()
        )
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        check(weight, torch.float32, 1)
        check(rows, torch.float32, 2)
        assert weight.shape == rows.shape[1:], (weight.shape, rows.shape)
        out = torch.empty(x.shape)
        self._kernels["rms_norm"](rows.data_ptr(), weight.data_ptr(), eps, *rows.shape, out.data_ptr())
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        for tensor in (x, residual):
            check(tensor, torch.float32, 2)
        check(weight, torch.float32, 1)
        assert residual.shape == x.shape and weight.shape == x.shape[1:], (x.shape, weight.shape)
        out = x.clone()
        self._kernels["add_rms_norm"](out.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, *x.shape)
        return out

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

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        check(positions, torch.int32, 1)
        for x in (q, k):
            rows, heads, dim = x.shape
            assert positions.shape == (rows,), (positions.shape, rows)
            for table in (cos, sin):
                check(table, torch.float32, 2)
                assert table.shape == (cos.shape[0], dim // 2) and dim % 2 == 0, (table.shape, dim)
            angles = (positions.data_ptr(), cos.data_ptr(), sin.data_ptr())
            self._kernels["rotary"](x.data_ptr(), _row_stride(x), rows, heads, dim // 2, *angles)

    def write_kv(
        self, kv: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        cache = _cache(kv, layer)
        rows, heads, dim = k.shape
        check(slots, torch.int64, 1)
        assert v.shape == k.shape and (heads, dim) == (cache.kv_heads, cache.dim), (k.shape, kv.shape)
        assert slots.shape == (rows,), (slots.shape, rows)
        values = (k.data_ptr(), _row_stride(k), v.data_ptr(), _row_stride(v))
        self._kernels[f"write_kv_{_CACHES[kv.dtype]}"](byref(cache), *values, slots.data_ptr(), rows)

    def attention(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
        meta: AttentionMeta,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        cache = _cache(kv, layer)
        rows, heads, dim = q.shape
        assert dim == cache.dim and heads % cache.kv_heads == 0, (q.shape, kv.shape)
        assert window is None or window >= 1, window
        for tensor, dimensions in ((meta.positions, 1), (meta.query_starts, 1), (meta.block_tables, 2)):
            check(tensor, torch.int32, dimensions)
        sequences, table_stride = meta.block_tables.shape
        assert meta.positions.shape == (rows,), (meta.positions.shape, rows)
        assert meta.query_starts.shape == (sequences + 1,), (meta.query_starts.shape, sequences)
        out = torch.empty(q.shape)
        queries = Queries(
            q=q.data_ptr(),
            q_stride=_row_stride(q),
            heads=heads,
            positions=meta.positions.data_ptr(),
            query_starts=meta.query_starts.data_ptr(),
            block_tables=meta.block_tables.data_ptr(),
            sequences=sequences,
            table_stride=table_stride,
            scale=scale,
            window=window or 0,
            out=out.data_ptr(),
        )
        self._kernels[f"attention_{_CACHES[kv.dtype]}"](self._crew.handle, byref(cache), byref(queries))
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        check(gate_up, torch.float32, 2)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        assert gate_up.shape[1] == 2 * width, gate_up.shape
        both = gate_up.clone()
        self._kernels["silu_mul"](both.data_ptr(), rows, width)
        return both[:, :width].contiguous()


def _row_stride(x: torch.Tensor) -> int:
    """Elements between the rows of float32 [T, heads, d] whose rows are contiguous."""
    assert x.dtype == torch.float32 and x.is_cpu, (x.dtype, x.device)
    row, head, element = x.stride()
    assert element == 1 and head == x.shape[2], x.stride()
    return row


def _cache(kv: torch.Tensor, layer: int) -> Cache:
    """The layer's part of a cache [blocks, layers, 2, block_size, kv_heads, head_dim + scale_elements], or of a view
    of some of its heads."""
    assert kv.dim() == 6 and kv.is_cpu, (kv.shape, kv.device)
    _, layers, two, block_size, kv_heads, row = kv.shape
    block_stride, layer_stride, half, token_stride, head_stride, element = kv.stride()
    assert two == 2 and 0 <= layer < layers, (kv.shape, layer)
    assert element == 1 and head_stride == row and half == block_size * token_stride, kv.stride()
    return Cache(
        keys=kv.data_ptr() + layer * layer_stride * kv.element_size(),
        block_stride=block_stride,
        half=half,
        block_size=block_size,
        kv_heads=kv_heads,
        dim=row - scale_elements(kv.dtype),
        token_stride=token_stride,
    )
