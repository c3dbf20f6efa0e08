"""What two ends of a torch.distributed pair say to each other beside the messages of transfers.

Owns these few signals and their bytes; they travel as headers of the carrying transport. Never carries a
shape or a dtype: sizes in a signal are only compared with the receiver's own.

A signal is MARK and one msgpack array [code, *fields]. MARK begins no msgpack value, so that no message of
a transfer looks like a signal, and an end that knows no signals counts one as malformed."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias

from kvtransfer import schema
from kvtransfer.errors import WireError
from kvtransfer.schema import U32_MAX, U64_MAX, Check
from kvtransfer.wire import RUN_BLOCKS_MAX

MARK = b"\xc1"
ENTRY_BYTES_MAX = 4096
READY_HEADER_BYTES_MAX = 4096
SIGNAL_BYTES_MAX = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Source: let us make a group. block_bytes: of each payload to come."""

    backend: str
    block_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Both: what torch set in the rendezvous of the group."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Target: the group is there; payloads may come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Source: `count` payloads from `number` on (0, 1, 2, ...), each of payload_bytes, are being sent. header:
    the message they belong to."""

    number: int
    count: int
    payload_bytes: int
    header: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Target: the group is over, or is not wanted."""


Signal: TypeAlias = Join | Entry | Joined | Ready | Leave


def is_signal(header: bytes) -> bool:
    return header.startswith(MARK)


def encode(signal: Signal) -> bytes:
    kind = type(signal)
    values = tuple(getattr(signal, field.name) for field in fields(kind))
    return MARK + schema.pack((_CODES[kind], *_SCHEMAS[kind](values)))


def decode(header: bytes) -> Signal:
    """Raises WireError for bytes that are no signal."""
    if not is_signal(header):
        raise WireError("not a signal")
    code, *values = schema.unpack(memoryview(header)[len(MARK) :], SIGNAL_BYTES_MAX) or (None,)
    kind = _KINDS.get(code) if type(code) is int else None
    if kind is None:
        raise WireError("unknown signal")
    checked = _SCHEMAS[kind](tuple(values))
    names = (field.name for field in fields(kind))
    return kind(**dict(zip(names, checked, strict=True)))


_KINDS: Mapping[int, type[Signal]] = {1: Join, 2: Entry, 3: Joined, 4: Ready, 5: Leave}
_CODES = {kind: code for code, kind in _KINDS.items()}
_SCHEMAS: Mapping[type[Signal], Check] = {
    Join: schema.record(schema.text(1, 16), schema.integer(1, U32_MAX)),
    Entry: schema.record(schema.text(1, 256), schema.octets(1, ENTRY_BYTES_MAX)),
    Joined: schema.record(),
    Ready: schema.record(
        schema.integer(0, U64_MAX),
        schema.integer(1, RUN_BLOCKS_MAX),
        schema.integer(1, U32_MAX),
        schema.octets(1, READY_HEADER_BYTES_MAX),
    ),
    Leave: schema.record(),
}
