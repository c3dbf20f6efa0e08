"""Digests of what is handed over: of one block, and of the whole run bound to its meaning.

xxh3-128 finds damage and mix-ups; it is no proof against somebody who can write on the wire.
"""

from collections.abc import Iterable

import xxhash

from kvtransfer.ticket import Ticket

DIGEST_BYTES = 16


def block_digest(block: memoryview | bytes) -> bytes:
    """16 bytes over the block's contents."""
    digest: bytes = xxhash.xxh3_128_digest(block)
    return digest


def split(joined: bytes) -> list[bytes]:
    """The digests that were joined."""
    return [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]


def manifest_digest(ticket: Ticket, first_token: int, digests: Iterable[bytes]) -> bytes:
    """16 bytes over ticket, layout, token range, first token and the digests of all blocks sent, in order."""
    state = xxhash.xxh3_128()
    state.update(ticket.ticket_id + ticket.layout_fingerprint)
    for number in (ticket.attempt, ticket.num_tokens, ticket.first_block, ticket.num_blocks, first_token):
        state.update(number.to_bytes(8, "big"))
    for digest in digests:
        assert len(digest) == DIGEST_BYTES, len(digest)
        state.update(digest)
    total: bytes = state.digest()
    return total
