"""The compiled kernels as Python functions over tensors.

Owns the C signatures that a worker needs, and the checks in front of packing. Called by the CPU backend alone.
Allocates no result and keeps no tensor. The calls release the GIL while they run.
"""

from collections.abc import Callable, Sequence
from ctypes import CDLL, POINTER, byref, c_char_p, c_int, c_int64, c_void_p
from dataclasses import dataclass
from os import fsencode
from pathlib import Path
from typing import NamedTuple

import torch

from engine.errors import CapacityError
from engine.kernels.backend import GROUP, QuantizedWeight
from engine.kernels.core_share import CoreShare
from engine.kernels.cpu.structures import Batch, Decoder, Format, Linear

SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""What the name of a kernel ends in, where there is one for each dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight [out_features, in_features] in tiles of output columns; `bias` is padded to whole tiles.

    structure: the same for C; it points into the two tensors.
    """

    out_features: int
    in_features: int
    tiles: torch.Tensor
    bias: torch.Tensor | None
    structure: Linear


class RowsOfLogits(NamedTuple):
    """Address of float32 [rows, vocab] with `stride` floats between rows."""

    address: int
    stride: int
    rows: int
    vocab: int


class Library:
    """One loaded shared library. Raises OSError when it cannot be loaded.

    `thread_pool` is what `start_thread_pool` returned. Tensors are contiguous.
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
        self._declare("quantized_bytes", (c_int64, c_int64, POINTER(Format)), c_int64)
        for suffix in SUFFIXES.values():
            self._declare(f"pack_{suffix}", (c_void_p, c_int64, c_int64, c_void_p), None)
        quantized = (c_void_p, c_void_p, c_void_p, c_int64, c_int64, POINTER(Format), c_void_p)
        self._declare("quantized_pack", quantized, None)
        self._declare("decoder_floats", (POINTER(Decoder), c_int64), c_int64)
        self._declare("decoder_forward", (c_void_p, POINTER(Decoder), POINTER(Batch)), c_int)
        rows = (c_void_p, c_void_p, c_int64, c_int64, c_int64)
        self._declare("draw", (*rows, c_char_p, c_void_p, c_void_p), None)
        self._declare("describe", (*rows, c_void_p, c_int64, c_void_p, c_void_p), None)
        self._tile_columns: int = self._library.crossdock_tile_columns()
        self._quantized_columns: int = self._library.crossdock_quantized_columns()

    def has_bf16(self) -> bool:
        """Whether the processor multiplies bfloat16 by an instruction of its own."""
        return bool(self._library.crossdock_has_bf16())

    def rounds_attention(self) -> bool:
        """Whether attention over a cache in bfloat16 or int8 rounds what it multiplies to bfloat16."""
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
        check(weight, weight.dtype, 2)
        rows, columns = weight.shape
        padded = -(-rows // self._tile_columns) * self._tile_columns
        tiles = torch.empty(padded * (columns + columns % 2), dtype=weight.dtype)
        pack = getattr(self._library, f"crossdock_pack_{SUFFIXES[weight.dtype]}")
        pack(weight.data_ptr(), rows, columns, tiles.data_ptr())
        form = Format(bits=8 * weight.itemsize, offsets=0, zero=0)
        return _packed(rows, columns, tiles, _padded(bias, rows, self._tile_columns), form)

    def pack_quantized(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> PackedWeight:
        """bias float32 [out]."""
        check(weight.codes, torch.uint8, 2)
        rows, columns = weight.codes.shape
        assert columns % GROUP == 0 and weight.bits in (4, 8), (columns, weight.bits)
        kind, offsets = _offsets(weight)
        for beside in (weight.scales, *(() if offsets is None else (offsets,))):
            check(beside, beside.dtype, 2)
            assert beside.shape == (rows, columns // GROUP), (beside.shape, rows, columns)
        assert weight.scales.dtype == torch.float16, weight.scales.dtype
        form = Format(bits=weight.bits, offsets=kind, zero=weight.zero)
        size = self._library.crossdock_quantized_bytes(rows, columns, byref(form))
        tiles = torch.empty(size, dtype=torch.uint8)
        places = None if offsets is None else offsets.data_ptr()
        sources = (weight.codes.data_ptr(), weight.scales.data_ptr(), places)
        self._library.crossdock_quantized_pack(*sources, rows, columns, byref(form), tiles.data_ptr())
        return _packed(rows, columns, tiles, _padded(bias, rows, self._quantized_columns), form)

    def decoder_floats(self, decoder: Decoder, rows: int) -> int:
        """Floats that a step of so many rows needs between its kernels."""
        return int(self._library.crossdock_decoder_floats(byref(decoder), rows))

    def decoder_forward(self, thread_pool: int, decoder: Decoder, batch: Batch) -> None:
        """One whole step. Tokens and chosen rows are looked at before anything is written."""
        done = self._library.crossdock_decoder_forward(thread_pool, byref(decoder), byref(batch))
        assert done, "a token id or a chosen row is out of range"

    def draw(self, thread_pool: int, rows: RowsOfLogits, draws: bytes, positions: int, tokens: int) -> None:
        """draws: `SamplingParams.packed` of each row. positions, tokens: addresses of uint64 and int64 [rows]."""
        self._library.crossdock_draw(thread_pool, *rows, draws, positions, tokens)

    def describe(
        self, thread_pool: int, rows: RowsOfLogits, counts: int, most: int, totals: int, ids: int
    ) -> None:
        """counts, totals: addresses of int64 [rows]; ids: of int64 [rows, most]."""
        self._library.crossdock_describe(thread_pool, *rows, counts, most, totals, ids)

    def single(self, name: str, arguments: Sequence[type]) -> Callable[..., None]:
        """The kernel of this name, which returns nothing."""
        self._declare(name, arguments, None)
        function: Callable[..., None] = getattr(self._library, f"crossdock_{name}")
        return function

    def _declare(self, name: str, arguments: Sequence[type], result: type | None) -> None:
        function = getattr(self._library, f"crossdock_{name}")
        function.argtypes = arguments
        function.restype = result


def check(tensor: torch.Tensor, dtype: torch.dtype, dimensions: int) -> None:
    """That C may read or write it by its address."""
    assert tensor.dtype == dtype and tensor.dim() == dimensions, (
        tensor.dtype,
        tensor.shape,
        dtype,
        dimensions,
    )
    assert tensor.is_contiguous() and tensor.is_cpu, (tensor.stride(), tensor.device)


def _offsets(weight: QuantizedWeight) -> tuple[int, torch.Tensor | None]:
    """(as linear.h numbers them, two bytes for each output and group)."""
    if weight.zeros is not None:
        return 2, weight.zeros.to(torch.int16)
    if weight.least is not None:
        assert weight.least.dtype == torch.float16, weight.least.dtype
        return 1, weight.least
    return 0, None


def _padded(bias: torch.Tensor | None, rows: int, columns: int) -> torch.Tensor | None:
    """The bias of `rows` outputs, zero up to whole tiles of `columns`."""
    if bias is None:
        return None
    check(bias, torch.float32, 1)
    assert bias.shape == (rows,), (bias.shape, rows)
    return torch.nn.functional.pad(bias, (0, -rows % columns))


def _packed(
    rows: int, columns: int, tiles: torch.Tensor, bias: torch.Tensor | None, form: Format
) -> PackedWeight:
    structure = Linear(
        in_features=columns,
        out_features=rows,
        packed=tiles.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        format=form,
    )
    return PackedWeight(out_features=rows, in_features=columns, tiles=tiles, bias=bias, structure=structure)
