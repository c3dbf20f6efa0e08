"""What a transfer's state machine wants done. Endpoints do it, in order; the machines do nothing
themselves."""

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from kvtransfer.events import SourceEvent, TargetEvent
from kvtransfer.wire import Message

E_co = TypeVar("E_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send to the other end. payload_indices: the blocks whose bytes go along; where there are any, they count
    as being read from now until `read_done` is called."""

    message: Message
    payload_indices: range = range(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Whatever of this transfer's blocks has not left yet must not be sent; report each message of them with
    `read_done`. Comes after all that must be said or told first, since the last read closes the transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The other end does not take what was sent: give the connection up, so that reading ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Copy each payload into the bound block of its index, which nobody reads yet, and answer at once with
    `placed`. digests: what the source says they have."""

    indices: tuple[int, ...]
    digests: tuple[bytes, ...]
    payloads: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Something was dropped, or is worth counting."""

    name: str
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit(Generic[E_co]):
    """Tell the owner."""

    event: E_co


SourceAction: TypeAlias = Send | Drop | Cut | Emit[SourceEvent]
TargetAction: TypeAlias = Send | Place | Count | Emit[TargetEvent]
