"""One GGUF file: its metadata, and its tensors dequantised one at a time.

Made by the GGUF readers. Knows the file format and no model. Every length is checked against the file before
it is believed. Arrays of the metadata (the vocabulary, above all) are stepped over, not decoded: nobody here
needs them, and the `gguf` package's own reader takes seconds for them. Type tables and dequantisation are
that package's. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGMLQuantizationType,
    GGUFValueType,
)
from gguf.quants import dequantize

from engine.errors import ModelError

VERSIONS = (2, 3)
DIMENSIONS_MAX = 4
STRING_BYTES_MAX = 2**24

SERVED_TYPES = tuple(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
)

_SCALARS = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
    GGUFValueType.BOOL: struct.Struct("<?"),
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

_WIDE_ROW = 4096
"""Elements. The package takes 16 rows at a time; rows this wide fit the cache and are worth a call."""


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array of the metadata that was stepped over. count: elements."""

    count: int


GgufValue: TypeAlias = int | float | str | GgufArray


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """shape: rows first. offset, byte_count: place in the file, checked."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    byte_count: int


class GgufFile:
    """A mapped file. fields: metadata by key. tensors: by name, in file order."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError for a file that is not a sound GGUF file, OSError for one that cannot be read."""
        with path.open("rb") as file:
            if path.stat().st_size < 4:
                raise ModelError("not a GGUF file: too short")
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._bytes)
        tensors, fields = _read_counts(cursor)
        self.fields: Mapping[str, GgufValue] = _read_fields(cursor, fields)
        self.tensors: Mapping[str, GgufTensor] = _read_tensors(cursor, tensors, self.fields)

    def raw(self, name: str) -> memoryview:
        """The tensor's bytes as stored, without a copy, read-only."""
        tensor = self.tensors[name]
        return memoryview(self._bytes)[tensor.offset : tensor.offset + tensor.byte_count]

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor's values, dequantised, in its shape. A fresh array."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self.raw(name), np.uint8)
        if tensor.type is GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(tensor.shape).copy()
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        columns = _WIDE_ROW if prod(tensor.shape) % _WIDE_ROW == 0 else tensor.shape[-1]
        rows = raw.reshape(-1, columns // block * block_bytes)
        values: npt.NDArray[np.float32] = dequantize(rows, tensor.type)
        return values.reshape(tensor.shape)


class _Cursor:
    """A place in the file that only moves forward and never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def take(self, layout: struct.Struct) -> int | float:
        at = self.position
        self.skip(layout.size)
        value: int | float = layout.unpack_from(self.data, at)[0]
        return value

    def count(self, layout: struct.Struct = _U64) -> int:
        return int(self.take(layout))

    def skip(self, size: int) -> None:
        if size > len(self.data) - self.position:
            raise ModelError(f"truncated: {size} bytes wanted at {self.position} of {len(self.data)}")
        self.position += size

    def text(self) -> str:
        size = self.count()
        if size > STRING_BYTES_MAX:
            raise ModelError(f"a text of {size} bytes at {self.position}, the limit is {STRING_BYTES_MAX}")
        at = self.position
        self.skip(size)
        try:
            return self.data[at : self.position].decode()
        except UnicodeDecodeError:
            raise ModelError(f"a text at {at} is not UTF-8") from None

    def skip_texts(self, count: int) -> None:
        """The hot part of a load: a vocabulary has tens of thousands of entries."""
        unpack, data, end, at = _U64.unpack_from, self.data, len(self.data), self.position
        for _ in range(count):
            if at > end - 8:
                raise ModelError(f"truncated: a text begins at {at} of {end}")
            at += 8 + unpack(data, at)[0]
        self.position = min(at, end)
        self.skip(at - self.position)


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """(tensors, fields)."""
    if cursor.count(_U32) != GGUF_MAGIC:
        raise ModelError("not a GGUF file")
    version = cursor.count(_U32)
    if version not in VERSIONS:
        raise ModelError(f"GGUF version {version} is not served; served are little-endian {VERSIONS}")
    return cursor.count(), cursor.count()


def _read_fields(cursor: _Cursor, count: int) -> dict[str, GgufValue]:
    fields: dict[str, GgufValue] = {}
    for _ in range(count):
        key = cursor.text()
        if key in fields:
            raise ModelError(f"metadata key {key[:60]!r} is there twice")
        fields[key] = _read_value(cursor, _value_type(cursor))
    return fields


def _value_type(cursor: _Cursor) -> GGUFValueType:
    number = cursor.count(_U32)
    try:
        return GGUFValueType(number)
    except ValueError:
        raise ModelError(f"unknown metadata type {number} at {cursor.position - 4}") from None


def _read_value(cursor: _Cursor, kind: GGUFValueType) -> GgufValue:
    if kind is GGUFValueType.STRING:
        return cursor.text()
    if kind is GGUFValueType.ARRAY:
        return _skip_array(cursor)
    return cursor.take(_SCALARS[kind])


def _skip_array(cursor: _Cursor) -> GgufArray:
    kind, count = _value_type(cursor), cursor.count()
    if kind is GGUFValueType.ARRAY:
        raise ModelError(f"nested metadata arrays are not served, at {cursor.position}")
    if kind is GGUFValueType.STRING:
        cursor.skip_texts(count)
    else:
        cursor.skip(count * _SCALARS[kind].size)
    return GgufArray(count)


def _read_tensors(cursor: _Cursor, count: int, fields: Mapping[str, GgufValue]) -> dict[str, GgufTensor]:
    alignment = fields.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise ModelError(f"general.alignment is {alignment}, wanted a power of two >= 8")
    tensors: dict[str, GgufTensor] = {}
    for _ in range(count):
        name = cursor.text()
        if name in tensors:
            raise ModelError(f"tensor {name[:60]!r} is there twice")
        tensors[name] = _read_tensor(cursor, name, alignment)
    base = -(-cursor.position // alignment) * alignment
    return {name: _placed(name, tensor, base, len(cursor.data)) for name, tensor in tensors.items()}


def _read_tensor(cursor: _Cursor, name: str, alignment: int) -> GgufTensor:
    """With an offset from the start of the data section."""
    dimensions = cursor.count(_U32)
    if not 1 <= dimensions <= DIMENSIONS_MAX:
        raise ModelError(f"tensor {name[:60]!r} has {dimensions} dimensions")
    shape = tuple(cursor.count() for _ in range(dimensions))[::-1]
    kind = _tensor_type(cursor, name)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % block:
        raise ModelError(f"tensor {name[:60]!r} of shape {shape} cannot be stored as {kind.name}")
    offset = cursor.count()
    if offset % alignment:
        raise ModelError(f"tensor {name[:60]!r} begins off the alignment of {alignment}")
    return GgufTensor(shape=shape, type=kind, offset=offset, byte_count=prod(shape) // block * block_bytes)


def _tensor_type(cursor: _Cursor, name: str) -> GGMLQuantizationType:
    number = cursor.count(_U32)
    for kind in SERVED_TYPES:
        if kind == number:
            return kind
    known = {int(kind): kind.name for kind in GGMLQuantizationType}
    served = ", ".join(kind.name for kind in SERVED_TYPES)
    raise ModelError(f"tensor {name[:60]!r} has type {known.get(number, number)}; served are {served}")


def _placed(name: str, tensor: GgufTensor, base: int, file_bytes: int) -> GgufTensor:
    offset = base + tensor.offset
    if offset + tensor.byte_count > file_bytes:
        raise ModelError(
            f"truncated: tensor {name[:60]!r} ends at {offset + tensor.byte_count} of {file_bytes} bytes"
        )
    return GgufTensor(shape=tensor.shape, type=tensor.type, offset=offset, byte_count=tensor.byte_count)
