"""Reads the key-value header of a GGUF file, strictly and fast (49k-entry arrays in tens of milliseconds).

The vocabulary loader calls `read_metadata`. It reads no tensors, maps no weights, and believes no length that
the file cannot hold. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from service.model_source import ModelFilesError

Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = Scalar | list[Scalar]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_KEYS_MAX = 65_536
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U64 = struct.Struct("<Q")


def read_metadata(path: Path) -> Mapping[str, Value]:
    """All keys of the header. Raises ModelFilesError for anything that is not a whole, known GGUF header."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Header(content).read()
    except OSError as error:
        raise ModelFilesError(f"{path.name}: {error.strerror or 'cannot be read'}") from None
    except (struct.error, ValueError) as error:
        raise ModelFilesError(f"{path.name}: not a usable GGUF file: {error}") from None


class _Header:
    """A cursor over the header; each read moves it. Raises ValueError or struct.error."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = 0

    def read(self) -> dict[str, Value]:
        if self._bytes(4) != _MAGIC:
            raise ValueError("wrong magic")
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}, known are 2 and 3")
        self._at += 8  # the count of tensors
        count = self._number("Q")
        if count > _KEYS_MAX:
            raise ValueError(f"{count} keys, at most {_KEYS_MAX}")
        return {self._string(): self._value(int(self._number("I"))) for _ in range(int(count))}

    def _value(self, kind: int) -> Value:
        if kind == _ARRAY:
            return self._array(int(self._number("I")), int(self._number("Q")))
        return self._scalar(kind)

    def _scalar(self, kind: int) -> Scalar:
        if kind == _STRING:
            return self._string()
        return self._number(_number_code(kind))

    def _array(self, kind: int, count: int) -> list[Scalar]:
        if kind == _STRING:
            if count > len(self._content):
                raise ValueError("an array is longer than the file")
            return [self._string() for _ in range(count)]
        layout = f"<{count}{_number_code(kind)}"
        return list(struct.unpack(layout, self._bytes(struct.calcsize(layout))))

    def _number(self, code: str) -> int | float | bool:
        layout = struct.Struct("<" + code)
        (value,) = layout.unpack_from(self._content, self._at)
        self._at += layout.size
        assert isinstance(value, int | float)
        return value

    def _string(self) -> str:
        (size,) = _U64.unpack_from(self._content, self._at)
        self._at += 8
        return self._bytes(size).decode("utf-8")

    def _bytes(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._content):
            raise ValueError("the header is cut short")
        taken = self._content[self._at : end]
        self._at = end
        return taken


def _number_code(kind: int) -> str:
    code = _NUMBERS.get(kind)
    if code is None:
        raise ValueError(f"unknown value type {kind}")
    return code
