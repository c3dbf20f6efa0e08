"""What can go wrong when blocks change hands. Mistakes of our own are assertions.

TransferError
├── TicketRefused      a ticket is forged, unknown, spent, or meant for somebody else; `reason` says which
├── WireError          bytes that are not a message of ours
│   └── UnknownVersion a message of another protocol version
├── HandshakeRefused   the two ends differ; `fields` names in what
├── BindRefused        an address that may not or cannot be bound
├── KeysRefused        a key folder that cannot be used
├── Overloaded         more transfers than the limit; try later
└── IllegalTransition  an event that the current state does not allow; nothing has changed
"""

from enum import IntEnum


class Reason(IntEnum):
    """Why a ticket, a transfer or a peer was refused. The numbers are on the wire: never reuse one."""

    BAD_SEAL = 1
    UNKNOWN_TICKET = 2
    SPENT = 3
    WRONG_SOURCE = 4
    WRONG_TARGET = 5
    WRONG_EPOCH = 6
    WRONG_ATTEMPT = 7
    WRONG_LAYOUT = 8
    WRONG_RANGE = 9
    NOT_GREETED = 10
    WITHDRAWN = 11
    CANCELLED = 12
    DAMAGED = 13
    INCOMPLETE = 14
    MANIFEST_DIFFERS = 15
    LEASE_OVER = 16
    STALLED = 17
    PEER_LOST = 18
    UNREACHABLE = 19
    HANDSHAKE_REFUSED = 20
    INTERNAL = 21


class TransferError(Exception):
    """Root of what kvtransfer raises."""


class TicketRefused(TransferError):
    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"ticket refused: {reason.name}" + (f" ({detail})" if detail else ""))
        self.reason = reason
        self.detail = detail


class WireError(TransferError):
    """Bytes that are not a message. The text names the field and the rule, never the contents."""


class UnknownVersion(WireError):
    """A message of another protocol version."""


class HandshakeRefused(TransferError):
    """fields: names of what differs, in order."""

    def __init__(self, fields: tuple[str, ...]) -> None:
        super().__init__(f"the two ends differ in {', '.join(fields)}")
        self.fields = fields


class BindRefused(TransferError):
    """An address that may not or cannot be bound. One line, for the operator."""


class KeysRefused(TransferError):
    """A key folder that cannot be used. One line, for the operator."""


class Overloaded(TransferError):
    """More transfers than the limit, or the endpoint is closed."""


class IllegalTransition(TransferError):
    """An event that the current state does not allow. Raised before anything has changed."""
