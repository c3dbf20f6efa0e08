"""A way to move messages between two processes: what the endpoints need of it.

A transport knows frames and blocks of bytes, not tickets. Each side is used by one thread, except `wake`.
Nothing here waits but `wait`. Delivery is not promised: what matters is asked for again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from kvtransfer.identity import Identity


class LinkStatus(Enum):
    """FAILING: still dialling, but a try has failed already. REFUSED: as FAILING, and somebody was there who would not
    have this connection, or broke off while it was made: most likely the keys do not fit."""

    DIALLING = auto()
    FAILING = auto()
    REFUSED = auto()
    UP = auto()
    LOST = auto()


class Delivery(Enum):
    """FULL: the peer does not read; nothing was queued. GONE: there is no such peer any more."""

    QUEUED = auto()
    FULL = auto()
    GONE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Frames from a peer. peer: the connection's name, fresh for every connection. payloads: valid until the
    next `receive`, and the peer may still be changing them: what is verified is a copy. proven: the name of
    the key that the peer has, None where the transport proves none."""

    peer: bytes
    header: bytes
    payloads: tuple[memoryview, ...] = ()
    proven: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGone:
    """The peer's connection is gone, for good."""

    peer: bytes


class NoKey(ValueError):
    """There is no public key of the target here, and without one nothing may be said to it."""


def unread() -> None:
    """For messages without payloads."""


class Connection(Protocol):
    """One connection of a source to one endpoint of a target."""

    def status(self) -> LinkStatus: ...

    def send(
        self, header: bytes, payloads: Sequence[memoryview] = (), on_read: Callable[[], None] = unread
    ) -> bool:
        """Queue one message; False where it cannot be queued now.

        Where there are payloads, on_read is called once, in the transport's `wait`, when their memory is no
        longer read: sent, or dropped. That says nothing about whether they arrived.
        """
        ...

    def receive(self) -> bytes | None:
        """The next header from the target, None where none arrived before the last `wait` ended."""
        ...

    def close(self) -> None:
        """Drop what is queued. Reads that are under way end soon, and `on_read` is still called for each."""
        ...


class SourceTransport(Protocol):
    def dial(self, endpoint: str, source: Identity, target: Identity) -> Connection:
        """Begin to connect, as source, to where target should be. Raises ValueError for an endpoint that can
        never be reached from here, NoKey where that is for want of a key."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when something may have arrived, can be sent again, or was woken; at the latest after
        timeout_s. Calls what `send` was given as on_read."""
        ...

    def wake(self) -> None:
        """End the current or next wait. From any thread, at any time."""
        ...

    def close(self) -> None:
        """Close every connection. When it returns, nothing reads any payload and nothing is called any
        more."""
        ...


class TargetTransport(Protocol):
    def endpoints(self) -> tuple[str, ...]:
        """The bound addresses as a source dials them, best first."""
        ...

    def receive(self) -> Arrival | PeerGone | None:
        """What arrived before the last `wait` ended; None where nothing more did. May know of later ones."""
        ...

    def send(self, peer: bytes, header: bytes) -> Delivery: ...

    def wait(self, timeout_s: float) -> None:
        """Return when something may have arrived or was woken; at the latest after timeout_s."""
        ...

    def wake(self) -> None:
        """End the current or next wait. From any thread, at any time."""
        ...

    def close(self) -> None: ...
