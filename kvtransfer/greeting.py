"""What two ends must agree on before any block travels, and in what they differ."""

from collections.abc import Mapping

from kvtransfer.errors import HandshakeRefused
from kvtransfer.identity import Identity
from kvtransfer.wire import WIRE_VERSION, Hello

WIRE_VERSION_FIELD = "wire_version"


def hello(layout: Mapping[str, str], fingerprint: bytes, source: Identity, target: Identity) -> Hello:
    """The greeting of a source that means `target`. layout: name to value, as `KVLayout.fields`."""
    agreed = {**layout, WIRE_VERSION_FIELD: str(WIRE_VERSION)}
    return Hello(
        layout=tuple(sorted(agreed.items())),
        fingerprint=fingerprint,
        source_id=source.worker_id,
        target_id=target.worker_id,
    )


def require_agreement(ours: Hello, theirs: Hello) -> None:
    """Raises HandshakeRefused with the names of all that differ. ours: what the target would have said."""
    mine, yours = dict(ours.layout), dict(theirs.layout)
    differing = sorted(name for name in mine.keys() | yours.keys() if mine.get(name) != yours.get(name))
    if ours.target_id != theirs.target_id:
        differing.append("target_id")
    if ours.fingerprint != theirs.fingerprint and not differing:
        differing.append("fingerprint")
    if differing:
        raise HandshakeRefused(tuple(differing))
