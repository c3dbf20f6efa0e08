"""A ticket: the signed right to hand one attempt's KV from one source to one target, spent once.

Minted and sealed by whoever schedules both ends, opened by the two ends. Knows neither torch nor the network.
Never says how to reach anybody, and holds no time of any clock: a lease is a duration.

A sealed ticket is a msgpack array followed by its HMAC-SHA256 (RFC 2104) over a domain prefix and the array.
"""

import hmac
from collections.abc import Callable
from dataclasses import dataclass, fields

from kvtransfer import schema
from kvtransfer.errors import Reason, TicketRefused, WireError
from kvtransfer.identity import EPOCH, WORKER_ID, Identity

TICKET_VERSION = 2
TICKET_ID_BYTES = 16
FINGERPRINT_BYTES = 32
KEY_BYTES_MIN = 16
SEALED_BYTES_MAX = 1024
LEASE_MS_MAX = 3_600_000

TICKET_ID = schema.octets(TICKET_ID_BYTES, TICKET_ID_BYTES)
ATTEMPT = schema.integer(0, schema.U32_MAX)

_DOMAIN = b"crossdock ticket\x00"
_CHECK_DOMAIN = b"crossdock ticket key check\x00"
_MAC_BYTES = 32
_COUNT = schema.integer(1, schema.U32_MAX)
_SCHEMA = schema.record(
    TICKET_ID,
    schema.text(1, 256),
    ATTEMPT,
    WORKER_ID,
    EPOCH,
    WORKER_ID,
    EPOCH,
    schema.octets(FINGERPRINT_BYTES, FINGERPRINT_BYTES),
    _COUNT,
    schema.integer(0, schema.U32_MAX),
    _COUNT,
    schema.integer(1, LEASE_MS_MAX),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """ticket_id: 16 random bytes, not all zero. request_id: 1 to 256 bytes. layout_fingerprint: 32 bytes.

    num_tokens: tokens whose KV is handed over. num_blocks: all blocks of that token run. first_block: the
    first that is sent, in [0, num_blocks]; the target holds those before it. lease_ms: how long either end
    waits for a sign of life from the other, in [1, 3,600,000].

    Raises WireError for a value outside its limits.
    """

    ticket_id: bytes
    request_id: str
    attempt: int
    source_id: str
    source_epoch: int
    target_id: str
    target_epoch: int
    layout_fingerprint: bytes
    num_tokens: int
    first_block: int
    num_blocks: int
    lease_ms: int

    def __post_init__(self) -> None:
        _SCHEMA(_values(self))
        if self.ticket_id == bytes(TICKET_ID_BYTES):
            raise WireError("ticket_id is all zero")
        if not self.first_block <= self.num_blocks <= self.num_tokens:
            raise WireError("not first_block <= num_blocks <= num_tokens")

    def source(self) -> Identity:
        return Identity(worker_id=self.source_id, epoch=self.source_epoch)

    def target(self) -> Identity:
        return Identity(worker_id=self.target_id, epoch=self.target_epoch)

    def lease_s(self) -> float:
        return self.lease_ms / 1000

    def blocks_to_send(self) -> range:
        """Indices of the blocks that travel."""
        return range(self.first_block, self.num_blocks)


def mint(
    randomness: Callable[[int], bytes],
    *,
    request_id: str,
    attempt: int,
    source: Identity,
    target: Identity,
    layout_fingerprint: bytes,
    num_tokens: int,
    first_block: int,
    num_blocks: int,
    lease_ms: int,
) -> Ticket:
    """A new ticket. randomness(count) returns that many unpredictable bytes."""
    return Ticket(
        ticket_id=randomness(TICKET_ID_BYTES),
        request_id=request_id,
        attempt=attempt,
        source_id=source.worker_id,
        source_epoch=source.epoch,
        target_id=target.worker_id,
        target_epoch=target.epoch,
        layout_fingerprint=layout_fingerprint,
        num_tokens=num_tokens,
        first_block=first_block,
        num_blocks=num_blocks,
        lease_ms=lease_ms,
    )


def seal(ticket: Ticket, key: bytes) -> bytes:
    """The ticket with its signature. key: at least 16 secret bytes, shared by who mints and both ends."""
    body = schema.pack((TICKET_VERSION, *_values(ticket)))
    return body + _mac(body, key)


def key_check(key: bytes) -> bytes:
    """8 bytes by which two processes see whether they have one key, and from which nobody learns it."""
    return hmac.digest(key, _CHECK_DOMAIN, "sha256")[:8]


def open_sealed(sealed: bytes, key: bytes) -> Ticket:
    """The ticket inside. Raises TicketRefused (BAD_SEAL): one reason for every way to be wrong."""
    body, mac = sealed[:-_MAC_BYTES], sealed[-_MAC_BYTES:]
    if len(sealed) > SEALED_BYTES_MAX or not hmac.compare_digest(mac, _mac(body, key)):
        raise TicketRefused(Reason.BAD_SEAL)
    try:
        version, *values = schema.unpack(body, SEALED_BYTES_MAX)
        if type(version) is not int or version != TICKET_VERSION:
            raise WireError("unknown ticket version")
        return Ticket(**dict(zip(_NAMES, _SCHEMA(tuple(values)), strict=True)))
    except (WireError, ValueError) as error:
        raise TicketRefused(Reason.BAD_SEAL) from error


_NAMES = tuple(field.name for field in fields(Ticket))


def _values(ticket: Ticket) -> tuple[object, ...]:
    return tuple(getattr(ticket, name) for name in _NAMES)


def _mac(body: bytes, key: bytes) -> bytes:
    assert len(key) >= KEY_BYTES_MIN, "the ticket key is too short"
    return hmac.digest(key, _DOMAIN + body, "sha256")
