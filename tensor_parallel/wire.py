"""What ranks say to each other, and its bytes.

A message is one msgpack array [kind, *fields]; an array of numbers is the bytes of its elements, little-endian. Of the
block tables of a batch it holds those blocks that runs need, one run after the other. What a
message says is checked before it is used: kind, number of fields, their types, how arrays fit together, and that every
number is one of this engine's. Never opens a socket.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgpack
import numpy as np
from numpy.typing import NDArray

from engine.batch import Batch, BlockCopy
from engine.ranks import FromHost, ToHost

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
BLOCKS_MAX = 2**31 - 1
TEXT_BYTES_MAX = 4096
THREADS_MAX = 1024


class MalformedMessage(ValueError):
    """A message that no rank of ours sends. One line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """From a rank that follows: its share of the model is in place. free_bytes: on its device, None on a processor."""

    free_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """From a rank that follows: it cannot start. text: one line for the operator."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """To a rank that follows: the cache has so many blocks; join the group."""

    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """From a rank that follows: it waits for work. threads: kernel ids of those that compute."""

    threads: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """From a rank that follows: blocks have been copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """To a rank that follows: there will be no more work."""


Message: TypeAlias = Loaded | Refused | Open | Ready | Done | Stop | Batch | ToHost | FromHost


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of the numbers in a Batch: token ids, positions and block ids are below these."""

    vocab_size: int
    positions: int
    num_blocks: int
    block_size: int


def batch_bytes_max(*, runs: int, tokens: int, blocks: int) -> int:
    """Of a message with a Batch of so many runs, of `blocks` blocks each at most, with `tokens` tokens together."""
    of_token = 8 + 4 + 8 + 8  # id, position, slot, row
    of_run = 4 + 4 + 4 * blocks + 16  # start, context, table, a copy
    return 256 + tokens * of_token + runs * of_run


def encode(message: Message, block_size: int | None = None) -> bytes:
    """message: of ours; what is in it is not looked at. block_size: of the cache, for a Batch."""
    match message:
        case Batch():
            assert block_size is not None, "work before there is a cache"
            fields = _batch_fields(message, block_size)
        case ToHost(blocks=blocks) | FromHost(blocks=blocks):
            fields = [_bytes(np.array(blocks, np.int64))]
        case Loaded(free_bytes=number):
            fields = [number]
        case Open(num_blocks=number):
            fields = [number]
        case Refused(text=text):
            fields = [text.encode()[:TEXT_BYTES_MAX].decode("utf-8", "ignore")]
        case Ready(threads=threads):
            fields = [list(threads)]
        case Done() | Stop():
            fields = []
    encoded: bytes = msgpack.packb([type(message).__name__, *fields], use_bin_type=True)
    return encoded


def decode(encoded: bytes, bounds: Bounds | None = None) -> Message:
    """bounds: None as long as there is no cache, and then there is no work. Raises MalformedMessage."""
    kind, *fields = _unpacked(encoded)
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise MalformedMessage("a message of no known kind")
    count, read = reader
    if len(fields) != count:
        raise MalformedMessage(f"{kind} of {len(fields)} fields rather than {count}")
    return read(fields, bounds)


def _batch_fields(batch: Batch, block_size: int) -> list[object]:
    copies = np.array([(copy.source, copy.target) for copy in batch.copies], np.int64)
    arrays = (
        batch.token_ids,
        batch.positions,
        batch.slots,
        batch.query_starts,
        batch.context_lengths,
        batch.block_tables[_needed(batch.context_lengths, block_size, batch.block_tables.shape[1])],
        batch.rows,
        copies,
    )
    return [_bytes(array) for array in arrays]


def _needed(contexts: NDArray[np.int32], block_size: int, width: int) -> NDArray[np.bool_]:
    """Of tables [runs, width]: whether a place has one of the blocks that tokens up to the run's last one are in."""
    return np.arange(width) < -(-contexts // np.int32(block_size))[:, None]


def _bytes(array: NDArray[Any]) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _unpacked(encoded: bytes) -> list[Any]:
    if len(encoded) > MESSAGE_BYTES_MAX:
        raise MalformedMessage(f"longer than {MESSAGE_BYTES_MAX} bytes")
    try:
        values = msgpack.unpackb(
            encoded,
            raw=False,
            strict_map_key=True,
            max_array_len=THREADS_MAX,
            max_map_len=0,
            max_str_len=TEXT_BYTES_MAX,
            max_bin_len=MESSAGE_BYTES_MAX,
            max_ext_len=0,
        )
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise MalformedMessage("not msgpack within the limits") from error
    if type(values) is not list or not values:
        raise MalformedMessage("not an array with a kind")
    return values


def _read_batch(fields: Sequence[object], bounds: Bounds | None) -> Batch:
    if bounds is None:
        raise MalformedMessage("work before there is a cache")
    token_ids = _numbers(fields[0], np.int64, "token_ids", bounds.vocab_size)
    rows_count = len(token_ids)
    starts = _numbers(fields[3], np.int32, "query_starts", rows_count + 1)
    runs = len(starts) - 1
    if (
        rows_count < 1
        or runs < 1
        or starts[0] != 0
        or starts[-1] != rows_count
        or (np.diff(starts) < 1).any()
    ):
        raise MalformedMessage("query_starts do not cut the tokens into runs")
    positions = _numbers(fields[1], np.int32, "positions", bounds.positions, count=rows_count)
    contexts = _numbers(fields[4], np.int32, "context_lengths", bounds.positions + 1, count=runs)
    if (contexts != positions[starts[1:] - 1] + 1).any():
        raise MalformedMessage("context_lengths are not those of the runs")
    tables = _read_tables(fields[5], contexts, bounds)
    rows = _numbers(fields[6], np.int64, "rows", rows_count)
    copies = _numbers(fields[7], np.int64, "copies", bounds.num_blocks)
    if len(copies) % 2 or len(rows) > rows_count:
        raise MalformedMessage("copies or rows of another number")
    slots = _numbers(fields[2], np.int64, "slots", bounds.num_blocks * bounds.block_size, count=rows_count)
    pairs = copies.reshape(-1, 2).tolist()
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        query_starts=starts,
        context_lengths=contexts,
        block_tables=tables,
        rows=rows,
        copies=tuple(BlockCopy(source=source, target=target) for source, target in pairs),
    )


def _read_tables(field: object, contexts: NDArray[np.int32], bounds: Bounds) -> NDArray[np.int32]:
    needed = _needed(contexts, bounds.block_size, -(-int(contexts.max()) // bounds.block_size))
    tables = np.full(needed.shape, -1, np.int32)
    tables[needed] = _numbers(field, np.int32, "block_tables", bounds.num_blocks, count=int(needed.sum()))
    return tables


def _numbers(
    field: object,
    dtype: type[np.signedinteger[Any]],
    name: str,
    end: int,
    *,
    count: int | None = None,
) -> NDArray[Any]:
    """Of a field that is the bytes of an array: elements in [0, end), `count` of them if that is known."""
    if type(field) is not bytes or len(field) % np.dtype(dtype).itemsize:
        raise MalformedMessage(f"{name} are no array of {np.dtype(dtype)}")
    # A copy: torch wants memory that may be written.
    array = np.frombuffer(field, np.dtype(dtype).newbyteorder("<")).astype(dtype)
    if count is not None and len(array) != count:
        raise MalformedMessage(f"{len(array)} {name} rather than {count}")
    if len(array) and not (array.min() >= 0 and array.max() < end):
        raise MalformedMessage(f"{name} outside [0, {end})")
    return array


def _blocks(field: object, bounds: Bounds | None) -> tuple[int, ...]:
    if bounds is None:
        raise MalformedMessage("work before there is a cache")
    return tuple(_numbers(field, np.int64, "blocks", bounds.num_blocks).tolist())


def _integer(value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise MalformedMessage(f"not an integer in [{low}, {high}]")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise MalformedMessage("not a text")
    return value


def _threads(value: object) -> tuple[int, ...]:
    if type(value) is not list:
        raise MalformedMessage("not a list of threads")
    return tuple(_integer(each, 1, 2**31 - 1) for each in value)


_Reader: TypeAlias = Callable[[Sequence[Any], Bounds | None], Message]

_READERS: dict[str, tuple[int, _Reader]] = {
    "Batch": (8, _read_batch),
    "ToHost": (1, lambda fields, bounds: ToHost(blocks=_blocks(fields[0], bounds))),
    "FromHost": (1, lambda fields, bounds: FromHost(blocks=_blocks(fields[0], bounds))),
    "Loaded": (
        1,
        lambda fields, _: Loaded(free_bytes=None if fields[0] is None else _integer(fields[0], 0, 2**63 - 1)),
    ),
    "Refused": (1, lambda fields, _: Refused(text=_text(fields[0]))),
    "Open": (1, lambda fields, _: Open(num_blocks=_integer(fields[0], 1, BLOCKS_MAX))),
    "Ready": (1, lambda fields, _: Ready(threads=_threads(fields[0]))),
    "Done": (0, lambda fields, _: Done()),
    "Stop": (0, lambda fields, _: Stop()),
}
"""By kind: how many fields, and what makes a message of them."""
