"""Names for token prefixes: a chain of keyed hashes, one link for each full block.

A link's hash covers everything before it, so that equal hashes mean equal KV. The chain starts from a scope: whoever
does not know the scope can name none of its prefixes. Pure arithmetic; knows no block and no cache.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

HASH_BYTES = 16
SCOPE_KEY_BYTES_MIN = 16


class PrefixLink(NamedTuple):
    """One full block of a prefix. hash: of all tokens up to its end; parent: the hash before it; tokens: its own, as
    32-bit integers, so that two prefixes of one hash can be told apart."""

    hash: bytes
    parent: bytes
    tokens: bytes


def prefix_scope(key: bytes, *, model: str, tenant: str, salt: str) -> bytes:
    """Where a chain starts: requests share cached prefixes when all three are equal. key: at least 16 secret bytes."""
    assert len(key) >= SCOPE_KEY_BYTES_MIN, "the key is too short"
    return _digest(b"crossdock scope", [model.encode(), tenant.encode(), salt.encode()], key)


class PrefixChain:
    """The links of one growing run of tokens. scope: from `prefix_scope`; empty for a run that is never cached, which
    has no links. Computes each link once."""

    __slots__ = ("_block_size", "_links", "_scope")

    def __init__(self, scope: bytes = b"", block_size: int = 1) -> None:
        self._scope = scope
        self._block_size = block_size
        self._links: list[PrefixLink] = []

    def fork(self) -> "PrefixChain":
        """For another run that begins with what this one has named so far."""
        twin = PrefixChain(self._scope, self._block_size)
        twin._links = list(self._links)
        return twin

    def full_blocks(self, tokens: int) -> int:
        return tokens // self._block_size

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def tokens_in(self, blocks: int) -> int:
        return blocks * self._block_size

    def links(self, tokens: Sequence[int], first: int, end: int) -> list[PrefixLink]:
        """Links of blocks first .. end - 1. tokens: the run, which only grows between two calls."""
        if not self._scope:
            return []
        size = self._block_size
        assert end * size <= len(tokens), f"{end} blocks of {len(tokens)} tokens"
        for index in range(len(self._links), end):
            parent = self._links[-1].hash if self._links else self._scope
            own = array("I", tokens[index * size : (index + 1) * size]).tobytes()
            self._links.append(PrefixLink(_digest(b"crossdock block", [parent, own]), parent, own))
        return self._links[first:end]


def _digest(kind: bytes, fields: Sequence[bytes], key: bytes = b"") -> bytes:
    """BLAKE2b (RFC 7693), keyed for a scope and personalised by kind, over length-prefixed fields."""
    prefixed = b"".join([part for field in fields for part in (len(field).to_bytes(4, "big"), field)])
    return blake2b(prefixed, digest_size=HASH_BYTES, key=key[:64], person=kind).digest()
