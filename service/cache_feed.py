"""Tells every gateway of a worker which prefixes are cached there, as long as its stream keeps up.

A stream begins with a snapshot; then come the changes, numbered. A stream on which too much waits gets none of them,
and a new snapshot once there is room: a gateway that reads slowly costs itself, not the worker. Lives on the event
loop. Knows no block; makes nothing of the hashes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from crossdock.worker.v1 import worker_pb2 as pb
from service.cache_events import to_wire
from service.outbox import Outbox

WAITING_MESSAGES_MAX = 64

Message = TypeVar("Message")


class CacheChanges(Protocol):
    """Hashes that can be found since the last look, and those that no longer can; none is in both."""

    @property
    def added(self) -> Sequence[bytes]: ...
    @property
    def removed(self) -> Sequence[bytes]: ...


@dataclass(frozen=True, slots=True)
class _Unchanged:
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


UNCHANGED = _Unchanged()


@dataclass(slots=True)
class _Listener(Generic[Message]):
    """sequence: of the last message, told or dropped. behind: since then only a snapshot helps."""

    outbox: Outbox[Message]
    sequence: int = 0
    behind: bool = True


class CacheFeed(Generic[Message]):
    """wrap: makes a message of a stream. waiting_messages_max: on a stream, above which it is told no more."""

    def __init__(
        self, wrap: Callable[[pb.CacheEvents], Message], waiting_messages_max: int = WAITING_MESSAGES_MAX
    ) -> None:
        self._wrap = wrap
        self._waiting_messages_max = waiting_messages_max
        self._hashes: set[bytes] = set()
        self._listeners: dict[str, _Listener[Message]] = {}

    def open(self, gateway: str, outbox: Outbox[Message]) -> None:
        """Begin with a snapshot, whatever waits already."""
        listener = self._listeners[gateway] = _Listener(outbox)
        self._snapshot(listener)

    def close(self, gateway: str) -> None:
        del self._listeners[gateway]

    def change(self, changes: CacheChanges) -> None:
        """Take what changed on the worker, and pass it on."""
        if not changes.added and not changes.removed:
            return
        self._hashes.difference_update(changes.removed)
        self._hashes.update(changes.added)
        for listener in self._listeners.values():
            if not self._has_room(listener):
                listener.behind = True
            if listener.behind:
                listener.sequence += 1
            else:
                self._tell(listener, changes.removed, changes.added, snapshot=False)

    def catch_up(self) -> None:
        """Send a snapshot to those who have missed something and have room again."""
        for listener in self._listeners.values():
            if listener.behind and self._has_room(listener):
                self._snapshot(listener)

    def _snapshot(self, listener: _Listener[Message]) -> None:
        self._tell(listener, (), tuple(self._hashes), snapshot=True)
        listener.behind = False

    def _tell(
        self,
        listener: _Listener[Message],
        removed: Sequence[bytes],
        added: Sequence[bytes],
        *,
        snapshot: bool,
    ) -> None:
        for events in to_wire(listener.sequence + 1, snapshot=snapshot, removed=removed, added=added):
            listener.sequence = events.sequence
            listener.outbox.put(self._wrap(events))

    def _has_room(self, listener: _Listener[Message]) -> bool:
        return len(listener.outbox) < self._waiting_messages_max
