"""Strict msgpack arrays: what every field may be, checked on the way out and on the way in.

Owns the limits of the decoder and the checks of single values. Called by the ticket and by the codec. Never
guesses: a value of another type, length or range raises WireError, and a bool is not an int.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NoReturn, TypeAlias, TypeVar

import msgpack

from kvtransfer.errors import WireError

Check: TypeAlias = Callable[[object], Any]
"""Returns the value as it is used inside, or raises WireError."""

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
ITEMS_MAX = 4096

E = TypeVar("E", bound=IntEnum)


def integer(low: int, high: int) -> Check:
    """An int in [low, high]."""

    def check(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise WireError(f"not an integer in [{low}, {high}]")
        return value

    return check


def octets(low: int, high: int) -> Check:
    """Bytes, low to high of them."""

    def check(value: object) -> bytes:
        if type(value) is not bytes or not low <= len(value) <= high:
            raise WireError(f"not {low} to {high} bytes")
        return value

    return check


def pieces(piece_bytes: int, count_max: int) -> Check:
    """Bytes: 1 to count_max pieces of piece_bytes each, joined."""
    checked = octets(piece_bytes, piece_bytes * count_max)

    def check(value: object) -> bytes:
        joined: bytes = checked(value)
        if len(joined) % piece_bytes:
            raise WireError(f"not whole pieces of {piece_bytes} bytes")
        return joined

    return check


def text(low: int, high: int) -> Check:
    """A string of low to high UTF-8 bytes."""

    def check(value: object) -> str:
        if type(value) is not str or not low <= len(value.encode("utf-8", "surrogatepass")) <= high:
            raise WireError(f"not a string of {low} to {high} bytes")
        return value

    return check


def member(kind: type[E]) -> Check:
    """The number of a member of an enum."""

    def check(value: object) -> E:
        if not isinstance(value, int) or type(value) not in (int, kind):
            raise WireError(f"not a {kind.__name__}")
        try:
            return kind(value)
        except ValueError:
            raise WireError(f"not a {kind.__name__}") from None

    return check


def array(item: Check, count_max: int) -> Check:
    """A tuple of at most count_max items."""

    def check(value: object) -> tuple[Any, ...]:
        if type(value) is not tuple or len(value) > count_max:
            raise WireError(f"not an array of at most {count_max}")
        return tuple(item(each) for each in value)

    return check


def record(*checks: Check) -> Check:
    """A tuple with one value for each check."""

    def check(value: object) -> tuple[Any, ...]:
        if type(value) is not tuple or len(value) != len(checks):
            raise WireError(f"not a record of {len(checks)} fields")
        # A list first: every message costs two of these, and a generator would take twice as long.
        checked = [each(part) for each, part in zip(checks, value, strict=True)]
        return tuple(checked)

    return check


def pack(values: Sequence[object]) -> bytes:
    """A msgpack array of values that were checked."""
    # The default buffer is 256 KiB, taken anew for each of our few dozen bytes.
    packed = msgpack.packb(values, use_bin_type=True, buf_size=1024)
    assert isinstance(packed, bytes)
    return packed


def unpack(encoded: bytes | memoryview, bytes_max: int) -> tuple[object, ...]:
    """The array in `encoded`. Raises WireError for anything else, whatever the bytes are.

    The limits keep hostile input from growing in memory: they are checked before anything is allocated.
    """
    if len(encoded) > bytes_max:
        raise WireError(f"longer than {bytes_max} bytes")
    try:
        values = msgpack.unpackb(
            encoded,
            raw=False,
            strict_map_key=True,
            use_list=False,
            ext_hook=_refuse_extension,
            max_array_len=ITEMS_MAX,
            max_map_len=0,
            max_str_len=1024,
            max_bin_len=4096,
            max_ext_len=0,
        )
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise WireError("not msgpack within the limits") from error
    if type(values) is not tuple:
        raise WireError("not an array")
    return values


def _refuse_extension(code: int, content: bytes) -> NoReturn:
    raise WireError("an extension type")
