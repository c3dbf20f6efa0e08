"""What two ends must agree on before any block travels, and in what they differ."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvtransfer.errors import HandshakeRefused
from kvtransfer.identity import Identity
from kvtransfer.wire import WIRE_VERSION, Envelope, Hello

WIRE_VERSION_FIELD = "wire_version"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """layout: name to value, what the handshake compares. fingerprint: 32 bytes over it. block_bytes: of
    one block."""

    layout: Mapping[str, str]
    fingerprint: bytes
    block_bytes: int


def hello(shape: BlockShape, source: Identity, target: Identity) -> Hello:
    """The greeting of a source that means `target`."""
    agreed = {**shape.layout, WIRE_VERSION_FIELD: str(WIRE_VERSION)}
    return Hello(
        layout=tuple(sorted(agreed.items())),
        fingerprint=shape.fingerprint,
        source_id=source.worker_id,
        target_id=target.worker_id,
    )


def require_agreement(envelope: Envelope, theirs: Hello, shape: BlockShape, target: Identity) -> Identity:
    """The source that greets `target`. Raises HandshakeRefused with the names of all that differ."""
    source = Identity(worker_id=theirs.source_id, epoch=envelope.source_epoch)
    ours = hello(shape, source, target)
    mine, yours = dict(ours.layout), dict(theirs.layout)
    differing = sorted(name for name in mine.keys() | yours.keys() if mine.get(name) != yours.get(name))
    if theirs.fingerprint != ours.fingerprint and not differing:
        differing.append("fingerprint")
    if theirs.target_id != ours.target_id:
        differing.append("target_id")
    if envelope.target_epoch != target.epoch:
        differing.append("target_epoch")
    if differing:
        raise HandshakeRefused(tuple(differing))
    return source
