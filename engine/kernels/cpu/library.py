"""The compiled kernels as Python functions over tensors.

Owns the C signatures and the checks in front of them: behind these asserts no call can fail. Called by the
CPU backend alone. Allocates no result and keeps no tensor. The calls release the GIL while they run.
"""

from collections.abc import Callable, Sequence
from ctypes import CDLL, POINTER, Structure, byref, c_char_p, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from os import fsencode
from pathlib import Path

import torch

from engine.errors import CapacityError
from engine.kernels.backend import GROUP, AttentionMeta, QuantizedWeight
from engine.kernels.core_share import CoreShare

_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight [out_features, in_features] in tiles of output columns; `bias` is padded to whole tiles."""

    out_features: int
    in_features: int
    tiles: torch.Tensor
    bias: torch.Tensor | None


class _Format(Structure):
    _fields_ = (("bits", c_int), ("has_least", c_int), ("zero", c_int))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedQuantized:
    """A quantized weight in tiles of output columns; `bias` is padded to whole tiles."""

    out_features: int
    in_features: int
    tiles: torch.Tensor
    bias: torch.Tensor | None
    format: _Format


class _Cache(Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("block_stride", c_int64),
        ("half", c_int64),
        ("block_size", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
    )


class _Queries(Structure):
    _fields_ = (
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("heads", c_int64),
        ("positions", c_void_p),
        ("query_starts", c_void_p),
        ("block_tables", c_void_p),
        ("sequences", c_int64),
        ("table_stride", c_int64),
        ("scale", c_float),
        ("window", c_int),
        ("out", c_void_p),
    )


_WRITE_KV = (
    c_void_p,
    c_int64,
    c_int64,
    c_int64,
    c_void_p,
    c_int64,
    c_void_p,
    c_int64,
    c_void_p,
    c_int64,
    c_int64,
)
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "pack": (c_void_p, c_int64, c_int64, c_void_p),
    "linear": (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p),
    "write_kv": (c_void_p, *_WRITE_KV),
    "attention": (c_void_p, POINTER(_Cache), POINTER(_Queries)),
    "rms_norm": (c_void_p, c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p),
    "add_rms_norm": (c_void_p, c_void_p, c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p),
    "rotary": (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p),
    "silu_mul": (c_void_p, c_void_p, c_int64, c_int64, c_void_p),
    "quantized_pack": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, POINTER(_Format), c_void_p),
    "quantized_linear": (
        c_void_p,
        c_void_p,
        c_int64,
        c_int64,
        c_void_p,
        POINTER(_Format),
        c_int64,
        c_void_p,
        c_void_p,
    ),
}
_BY_DTYPE = frozenset({"pack", "linear", "write_kv", "attention"})


class Library:
    """One loaded shared library. Raises OSError when it cannot be loaded.

    `thread_pool` is what `start_thread_pool` returned. Tensors are float32 and contiguous unless said
    otherwise; "row-strided" ones may have any distance between rows.
    """

    def __init__(self, path: Path) -> None:
        self._library = CDLL(str(path))
        self._declare("thread_pool_start", (c_int, POINTER(c_int), c_int, c_char_p, c_int), c_void_p)
        self._declare("thread_pool_stop", (c_void_p,), None)
        self._declare("thread_pool_borrowed_ns", (c_void_p,), c_int64)
        self._declare("tile_columns", (), c_int64)
        self._declare("has_bf16", (), c_int)
        self._declare("lanes", (), c_int)
        self._declare("rounds_attention", (), c_int)
        self._declare("quantized_columns", (), c_int64)
        self._declare("quantized_bytes", (c_int64, c_int64, POINTER(_Format)), c_int64)
        for name, arguments in _SIGNATURES.items():
            suffixes = [f"_{suffix}" for suffix in _SUFFIXES.values()] if name in _BY_DTYPE else [""]
            for suffix in suffixes:
                self._declare(name + suffix, arguments, None)
        self._tile_columns: int = self._library.crossdock_tile_columns()
        self._quantized_columns: int = self._library.crossdock_quantized_columns()

    def has_bf16(self) -> bool:
        """Whether the processor multiplies bfloat16 by an instruction of its own."""
        return bool(self._library.crossdock_has_bf16())

    def rounds_attention(self) -> bool:
        """Whether attention over a cache in bfloat16 rounds queries and weights to bfloat16."""
        return bool(self._library.crossdock_rounds_attention())

    def lanes(self) -> int:
        """Floats per vector of the processor."""
        return int(self._library.crossdock_lanes())

    def start_thread_pool(self, threads: int, cores: CoreShare) -> int:
        """Handle of a new pool; the caller's thread is one of `threads`. Ended by `stop_thread_pool`.

        Raises CapacityError when the system refuses a thread or the board of cores.
        """
        assert threads >= 1, threads
        own = (c_int * len(cores.own))(*cores.own)
        board = None if cores.board is None else fsencode(cores.board)
        thread_pool: int | None = self._library.crossdock_thread_pool_start(
            threads, own, len(own), board, cores.seat
        )
        if thread_pool is None:
            raise CapacityError(f"the system refuses to start {threads} kernel threads on {cores}")
        return thread_pool

    def borrowed_s(self, thread_pool: int) -> float:
        """Seconds that borrowed cores have computed for this pool."""
        return float(self._library.crossdock_thread_pool_borrowed_ns(thread_pool)) / 1e9

    def stop_thread_pool(self, thread_pool: int) -> None:
        """End its threads. The handle is spent."""
        self._library.crossdock_thread_pool_stop(thread_pool)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        """weight float32 or bfloat16 [out, in] keeps its dtype; bias float32 [out]."""
        _check(weight, weight.dtype, 2)
        rows, columns = weight.shape
        padded = -(-rows // self._tile_columns) * self._tile_columns
        tiles = torch.empty(padded * (columns + columns % 2), dtype=weight.dtype)
        self._function("pack", weight.dtype)(weight.data_ptr(), rows, columns, tiles.data_ptr())
        if bias is not None:
            bias = _padded(bias, rows, self._tile_columns)
        return PackedWeight(out_features=rows, in_features=columns, tiles=tiles, bias=bias)

    def pack_quantized(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> PackedQuantized:
        """bias float32 [out]."""
        _check(weight.codes, torch.uint8, 2)
        rows, columns = weight.codes.shape
        assert columns % GROUP == 0 and weight.bits in (4, 8), (columns, weight.bits)
        for halves in (weight.scales, *(() if weight.least is None else (weight.least,))):
            _check(halves, torch.float16, 2)
            assert halves.shape == (rows, columns // GROUP), (halves.shape, rows, columns)
        form = _Format(bits=weight.bits, has_least=weight.least is not None, zero=weight.zero)
        size = self._library.crossdock_quantized_bytes(rows, columns, byref(form))
        tiles = torch.empty(size, dtype=torch.uint8)
        least = None if weight.least is None else weight.least.data_ptr()
        sources = (weight.codes.data_ptr(), weight.scales.data_ptr(), least)
        self._library.crossdock_quantized_pack(*sources, rows, columns, byref(form), tiles.data_ptr())
        if bias is not None:
            bias = _padded(bias, rows, self._quantized_columns)
        return PackedQuantized(out_features=rows, in_features=columns, tiles=tiles, bias=bias, format=form)

    def quantized_linear(
        self, thread_pool: int, x: torch.Tensor, weight: PackedQuantized, out: torch.Tensor
    ) -> None:
        _check(x, torch.float32, 2)
        _check(out, torch.float32, 2)
        rows, columns = x.shape
        assert columns == weight.in_features, (columns, weight.in_features)
        assert out.shape == (rows, weight.out_features), (out.shape, rows, weight.out_features)
        bias = None if weight.bias is None else weight.bias.data_ptr()
        packed = (weight.tiles.data_ptr(), byref(weight.format), weight.out_features)
        self._library.crossdock_quantized_linear(
            thread_pool, x.data_ptr(), rows, columns, *packed, bias, out.data_ptr()
        )

    def linear(self, thread_pool: int, x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> None:
        _check(x, torch.float32, 2)
        _check(out, torch.float32, 2)
        rows, columns = x.shape
        assert columns == weight.in_features, (columns, weight.in_features)
        assert out.shape == (rows, weight.out_features), (out.shape, rows, weight.out_features)
        bias = None if weight.bias is None else weight.bias.data_ptr()
        self._function("linear", weight.tiles.dtype)(
            thread_pool,
            x.data_ptr(),
            rows,
            columns,
            weight.tiles.data_ptr(),
            weight.out_features,
            bias,
            out.data_ptr(),
        )

    def rms_norm(
        self, thread_pool: int, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        for tensor in (x, out):
            _check(tensor, torch.float32, 2)
        _check(weight, torch.float32, 1)
        rows, columns = x.shape
        assert out.shape == x.shape and weight.shape == (columns,), (out.shape, x.shape, weight.shape)
        self._library.crossdock_rms_norm(
            thread_pool, x.data_ptr(), weight.data_ptr(), eps, rows, columns, out.data_ptr()
        )

    def add_rms_norm(
        self,
        thread_pool: int,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        for tensor in (x, residual, out):
            _check(tensor, torch.float32, 2)
        _check(weight, torch.float32, 1)
        rows, columns = x.shape
        assert residual.shape == out.shape == x.shape, (residual.shape, out.shape, x.shape)
        assert weight.shape == (columns,), (weight.shape, columns)
        pointers = (x.data_ptr(), residual.data_ptr(), weight.data_ptr())
        self._library.crossdock_add_rms_norm(thread_pool, *pointers, eps, rows, columns, out.data_ptr())

    def rotary(
        self, thread_pool: int, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        """x [T, heads, d] row-strided, in place; positions int32 [T], below the length of cos and sin."""
        stride = _row_stride(x)
        rows, heads, dim = x.shape
        _check(positions, torch.int32, 1)
        assert positions.shape == (rows,), (positions.shape, rows)
        for table in (cos, sin):
            _check(table, torch.float32, 2)
            assert table.shape == (cos.shape[0], dim // 2) and dim % 2 == 0, (table.shape, dim)
        pointers = (positions.data_ptr(), cos.data_ptr(), sin.data_ptr())
        self._library.crossdock_rotary(thread_pool, x.data_ptr(), stride, rows, heads, dim // 2, *pointers)

    def silu_mul(self, thread_pool: int, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        _check(gate_up, torch.float32, 2)
        _check(out, torch.float32, 2)
        rows, columns = out.shape
        assert gate_up.shape == (rows, 2 * columns), (gate_up.shape, out.shape)
        self._library.crossdock_silu_mul(thread_pool, gate_up.data_ptr(), rows, columns, out.data_ptr())

    def write_kv(
        self,
        thread_pool: int,
        kv: torch.Tensor,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """k, v [T, kv_heads, d] row-strided; slots int64 [T], inside the cache."""
        cache = _cache(kv, layer)
        rows, heads, dim = k.shape
        _check(slots, torch.int64, 1)
        assert v.shape == k.shape and (heads, dim) == (cache.kv_heads, cache.dim), (
            k.shape,
            v.shape,
            kv.shape,
        )
        assert slots.shape == (rows,), (slots.shape, rows)
        place = (cache.keys, cache.block_stride, cache.half, cache.block_size)
        values = (k.data_ptr(), _row_stride(k), v.data_ptr(), _row_stride(v))
        self._function("write_kv", kv.dtype)(
            thread_pool, *place, *values, slots.data_ptr(), rows, heads * dim
        )

    def attention(
        self,
        thread_pool: int,
        q: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
        meta: AttentionMeta,
        scale: float,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        """q [T, heads, d] row-strided, out [T, heads, d]. Positions ascend by one within a sequence."""
        cache = _cache(kv, layer)
        _check(out, torch.float32, 3)
        rows, heads, dim = q.shape
        assert out.shape == q.shape and dim == cache.dim and heads % cache.kv_heads == 0, (q.shape, kv.shape)
        assert window is None or window >= 1, window
        for tensor, dimensions in ((meta.positions, 1), (meta.query_starts, 1), (meta.block_tables, 2)):
            _check(tensor, torch.int32, dimensions)
        sequences, table_stride = meta.block_tables.shape
        assert meta.positions.shape == (rows,), (meta.positions.shape, rows)
        assert meta.query_starts.shape == (sequences + 1,), (meta.query_starts.shape, sequences)
        queries = _Queries(
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
        self._function("attention", kv.dtype)(thread_pool, byref(cache), byref(queries))

    def _declare(self, name: str, arguments: Sequence[type], result: type | None) -> None:
        function = getattr(self._library, f"crossdock_{name}")
        function.argtypes = arguments
        function.restype = result

    def _function(self, name: str, dtype: torch.dtype) -> Callable[..., None]:
        function: Callable[..., None] = getattr(self._library, f"crossdock_{name}_{_SUFFIXES[dtype]}")
        return function


def _check(tensor: torch.Tensor, dtype: torch.dtype, dimensions: int) -> None:
    assert tensor.dtype == dtype and tensor.dim() == dimensions, (
        tensor.dtype,
        tensor.shape,
        dtype,
        dimensions,
    )
    assert tensor.is_contiguous() and tensor.is_cpu, (tensor.stride(), tensor.device)


def _padded(bias: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The bias of `rows` outputs, zero up to whole tiles of `columns`."""
    _check(bias, torch.float32, 1)
    assert bias.shape == (rows,), (bias.shape, rows)
    return torch.nn.functional.pad(bias, (0, -rows % columns))


def _row_stride(x: torch.Tensor) -> int:
    """Elements between the rows of float32 [T, heads, d] whose rows are contiguous."""
    assert x.dtype == torch.float32 and x.is_cpu, (x.dtype, x.device)
    row, head, element = x.stride()
    assert element == 1 and head == x.shape[2], x.stride()
    return row


def _cache(kv: torch.Tensor, layer: int) -> _Cache:
    """The layer's part of a cache [blocks, layers, 2, block_size, kv_heads, head_dim]."""
    _check(kv, kv.dtype, 6)
    _, layers, two, block_size, kv_heads, dim = kv.shape
    assert two == 2 and 0 <= layer < layers, (kv.shape, layer)
    half = block_size * kv_heads * dim
    return _Cache(
        keys=kv.data_ptr() + layer * 2 * half * kv.element_size(),
        block_stride=layers * 2 * half,
        half=half,
        block_size=block_size,
        kv_heads=kv_heads,
        dim=dim,
    )
