"""Which prefixes a worker has cached, as it tells its gateways, and the translation to and from the wire.

Hashes only: what they are of is the business of those who make them. `from_wire` trusts no peer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crossdock.worker.v1 import worker_pb2 as pb
from service.reports import BadReport

HASH_BYTES = 16
HASHES_PER_MESSAGE_MAX = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEvents:
    """One message of a stream. sequence: its number. snapshot: what was said before is void. Hashes that went, and
    hashes that came; none is in both."""

    sequence: int
    snapshot: bool
    removed: tuple[bytes, ...]
    added: tuple[bytes, ...]


def to_wire(
    first_sequence: int, *, snapshot: bool, removed: Sequence[bytes], added: Sequence[bytes]
) -> Iterator[pb.CacheEvents]:
    """At least one message, and as many as it takes; removals first, so that whoever follows never holds more than
    there is. first_sequence: number of the first of them."""
    step, gone = HASHES_PER_MESSAGE_MAX, len(removed)
    for number, start in enumerate(range(0, max(1, gone + len(added)), step)):
        yield pb.CacheEvents(
            sequence=first_sequence + number,
            snapshot=snapshot and number == 0,
            removed=b"".join(removed[start : start + step]),
            added=b"".join(added[max(0, start - gone) : max(0, start + step - gone)]),
        )


def from_wire(events: pb.CacheEvents) -> CacheEvents:
    """Raises BadReport."""
    return CacheEvents(
        sequence=events.sequence,
        snapshot=events.snapshot,
        removed=_hashes("removed", events.removed),
        added=_hashes("added", events.added),
    )


def _hashes(field: str, octets: bytes) -> tuple[bytes, ...]:
    if len(octets) % HASH_BYTES or len(octets) > HASHES_PER_MESSAGE_MAX * HASH_BYTES:
        raise BadReport(f"{field}: up to {HASHES_PER_MESSAGE_MAX} hashes of {HASH_BYTES} bytes")
    return tuple(octets[start : start + HASH_BYTES] for start in range(0, len(octets), HASH_BYTES))
