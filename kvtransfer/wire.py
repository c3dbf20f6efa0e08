"""The messages of the data channel, and their bytes.

Owns the message types and their limits; the state machines speak in these messages, the endpoints encode and
decode them. Reads no shape, dtype or size from a message: the handshake fixes them.

A message is one msgpack array [version, type, source_epoch, target_epoch, attempt, ticket_id, *fields]. The
raw bytes of blocks travel beside it, each block as a frame of its own, and are not seen here."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias

from kvtransfer import schema
from kvtransfer.digest import DIGEST_BYTES
from kvtransfer.errors import Reason, UnknownVersion, WireError
from kvtransfer.events import FirstTokens
from kvtransfer.identity import EPOCH, WORKER_ID
from kvtransfer.schema import U32_MAX, Check
from kvtransfer.ticket import ATTEMPT, FINGERPRINT_BYTES, SEALED_BYTES_MAX, TICKET_ID, TICKET_ID_BYTES, Ticket

WIRE_VERSION = 2
HEADER_BYTES_MAX = 64 * 1024
RUN_BYTES_MAX = 3 * 1024 * 1024
"""Block bytes of one message, unless one block is larger."""
RUN_BLOCKS_MAX = 64
RESEND_INDICES_MAX = 1024
DETAIL_BYTES_MAX = 512
FIRST_TOKENS_MAX = 64
NO_TICKET = bytes(TICKET_ID_BYTES)
"""In messages that belong to the connection and not to a transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Source: first on a connection. layout: (name, value) of everything that both ends must agree on."""

    layout: tuple[tuple[str, str], ...]
    fingerprint: bytes
    source_id: str
    target_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloAccepted:
    target_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloRefused:
    """fields: names of what differs."""

    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Source: a ticket is presented. Repeated as a sign of life; answered with Grant, Committed or
    Refused."""

    sealed: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Target: block bytes that the source may have sent in all, since the opening. Never shrinks; 0 while the
    target has no room yet. Cumulative, so that a lost or repeated one does no harm."""

    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """Source: blocks first_index, first_index + 1, ..., whose bytes are the next frames, one each. digests: of
    all of them, joined, taken when the blocks were computed."""

    first_index: int
    digests: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Resend:
    """Target: these blocks came damaged or not at all. Honoured once per block."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Source: all blocks were sent. digest: see `digest.manifest_digest`. first_tokens: (choice, token) of each
    sequence that goes on from these blocks, sampled by the source; none where the target samples it.
    Repeated until answered with Committed or Refused."""

    num_tokens: int
    digest: bytes
    first_tokens: FirstTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Target: the blocks are its own now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Target: the transfer is over. detail: names of fields, no contents."""

    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Source: the transfer is over."""

    reason: Reason


Message: TypeAlias = (
    Hello
    | HelloAccepted
    | HelloRefused
    | Open
    | Grant
    | BlockRun
    | Resend
    | Manifest
    | Committed
    | Refused
    | Abort
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A message with what fences it: the epochs of both ends, the attempt and the ticket."""

    source_epoch: int
    target_epoch: int
    attempt: int
    ticket_id: bytes
    message: Message


def for_ticket(ticket: Ticket, message: Message) -> Envelope:
    """The message, fenced as this ticket wants it."""
    return Envelope(
        source_epoch=ticket.source_epoch,
        target_epoch=ticket.target_epoch,
        attempt=ticket.attempt,
        ticket_id=ticket.ticket_id,
        message=message,
    )


def run_blocks_max(block_bytes: int, run_bytes_max: int = RUN_BYTES_MAX) -> int:
    """Blocks of this size in one message."""
    return min(max(1, run_bytes_max // block_bytes), RUN_BLOCKS_MAX)


def payloads_of(message: Message) -> int:
    """How many frames of blocks belong to the message."""
    return len(message.digests) // DIGEST_BYTES if isinstance(message, BlockRun) else 0


def is_for(ticket: Ticket, envelope: Envelope) -> bool:
    """Whether the message is fenced as this ticket wants it."""
    return (
        envelope.source_epoch == ticket.source_epoch
        and envelope.target_epoch == ticket.target_epoch
        and envelope.attempt == ticket.attempt
        and envelope.ticket_id == ticket.ticket_id
    )


def encode(envelope: Envelope) -> bytes:
    """The header frame. A message outside its limits is our own mistake: it raises WireError all the same."""
    message = envelope.message
    kind = type(message)
    given = [getattr(message, name) for name in _NAMES[kind]]
    values = _SCHEMAS[kind](tuple(given))
    fences = (envelope.source_epoch, envelope.target_epoch, envelope.attempt, envelope.ticket_id)
    return schema.pack((WIRE_VERSION, _CODES[kind], *_FENCES(fences), *values))


def decode(header: bytes | memoryview) -> Envelope:
    """The message in a header frame. Raises WireError for any other bytes."""
    values = schema.unpack(header, HEADER_BYTES_MAX)
    version, code = (*values[:2], None, None)[:2]
    if type(version) is not int:
        raise WireError("no version")
    if version != WIRE_VERSION:
        raise UnknownVersion(f"version is not {WIRE_VERSION}")
    kind = _KINDS.get(code) if type(code) is int else None
    if kind is None:
        raise WireError("unknown message type")
    source_epoch, target_epoch, attempt, ticket_id = _FENCES(values[2:6])
    checked = _SCHEMAS[kind](values[6:])
    return Envelope(
        source_epoch=source_epoch,
        target_epoch=target_epoch,
        attempt=attempt,
        ticket_id=ticket_id,
        message=kind(**dict(zip(_NAMES[kind], checked, strict=True))),
    )


_DIGEST = schema.octets(DIGEST_BYTES, DIGEST_BYTES)
_INDEX = schema.integer(0, U32_MAX)
_FIELD_NAME = schema.text(1, 64)
_FENCES = schema.record(EPOCH, EPOCH, ATTEMPT, TICKET_ID)

_KINDS: Mapping[int, type[Message]] = {
    1: Hello,
    2: HelloAccepted,
    3: HelloRefused,
    4: Open,
    5: Grant,
    6: BlockRun,
    7: Resend,
    8: Manifest,
    9: Committed,
    10: Refused,
    11: Abort,
}
_CODES = {kind: code for code, kind in _KINDS.items()}
_NAMES: Mapping[type[Message], tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind)) for kind in _KINDS.values()
}
_SCHEMAS: Mapping[type[Message], Check] = {
    Hello: schema.record(
        schema.array(schema.record(_FIELD_NAME, schema.text(0, 256)), 32),
        schema.octets(FINGERPRINT_BYTES, FINGERPRINT_BYTES),
        WORKER_ID,
        WORKER_ID,
    ),
    HelloAccepted: schema.record(WORKER_ID),
    HelloRefused: schema.record(schema.array(_FIELD_NAME, 64)),
    Open: schema.record(schema.octets(1, SEALED_BYTES_MAX)),
    Grant: schema.record(schema.integer(0, 2**63 - 1)),
    BlockRun: schema.record(_INDEX, schema.pieces(DIGEST_BYTES, RUN_BLOCKS_MAX)),
    Resend: schema.record(schema.array(_INDEX, RESEND_INDICES_MAX)),
    Manifest: schema.record(
        schema.integer(1, U32_MAX), _DIGEST, schema.array(schema.record(_INDEX, _INDEX), FIRST_TOKENS_MAX)
    ),
    Committed: schema.record(),
    Refused: schema.record(schema.member(Reason), schema.text(0, DETAIL_BYTES_MAX)),
    Abort: schema.record(schema.member(Reason)),
}
