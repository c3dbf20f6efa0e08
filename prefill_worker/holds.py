"""Computed blocks that are kept, or still read, for a hand-off.

A hold needs its keys before its blocks are free: its owner let go, the transport reads no more, and nothing of it is
being copied. Until then the blocks must not be reused. Lives on the step thread; moves no bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from engine.cache.block_pool import BlockPool
from engine.cache.block_table import BlockTable, Owner, OwnerKind
from engine.errors import IllegalTransition


class HoldState(Enum):
    READ = auto()
    """The owner keeps it and the transport may read it."""
    UNREAD = auto()
    """The owner keeps it; the transport reads no more."""
    LET_GO = auto()
    """The owner let go; the transport may still read."""
    FREE = auto()


class HoldEvent(Enum):
    LET_GO = auto()
    CLOSED = auto()


HOLD_TRANSITIONS: Mapping[tuple[HoldState, HoldEvent], HoldState] = {
    (HoldState.READ, HoldEvent.LET_GO): HoldState.LET_GO,
    (HoldState.READ, HoldEvent.CLOSED): HoldState.UNREAD,
    (HoldState.UNREAD, HoldEvent.LET_GO): HoldState.FREE,
    (HoldState.LET_GO, HoldEvent.CLOSED): HoldState.FREE,
}


@dataclass(slots=True, kw_only=True)
class Hold:
    """table: None while the sequence that is being computed owns the blocks. copies: under way."""

    request_id: str
    table: BlockTable | None = None
    state: HoldState = HoldState.READ
    copies: int = 0

    def advance(self, event: HoldEvent) -> None:
        """Take one legal transition. Raises IllegalTransition, and changes nothing, for any other."""
        target = HOLD_TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalTransition(f"hold of {self.request_id}: {event.name} in state {self.state.name}")
        self.state = target


class Holds:
    """All holds of a worker, by ticket."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._holds: dict[bytes, Hold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def __contains__(self, ticket_id: bytes) -> bool:
        return ticket_id in self._holds

    def open(self, ticket_id: bytes, request_id: str) -> None:
        """The transport may read this attempt's blocks from now on."""
        assert ticket_id not in self._holds
        self._holds[ticket_id] = Hold(request_id=request_id)

    def keep(self, ticket_id: bytes, table: BlockTable) -> None:
        """Take the blocks over from the sequence that computed them."""
        hold = self._holds[ticket_id]
        assert hold.table is None
        hold.table = self._pool.transfer(table, Owner(OwnerKind.HOLD, hold.request_id))

    def let_go(self, ticket_id: bytes) -> None:
        """First key: the owner needs the blocks no more."""
        self._turn(ticket_id, HoldEvent.LET_GO)

    def closed(self, ticket_id: bytes) -> None:
        """Second key: nobody reads the blocks any more."""
        self._turn(ticket_id, HoldEvent.CLOSED)

    def copying(self, ticket_id: bytes) -> None:
        """Some of the blocks are being copied from now on."""
        self._holds[ticket_id].copies += 1

    def copied(self, ticket_id: bytes) -> None:
        """A key for each copy: it is done."""
        hold = self._holds[ticket_id]
        assert hold.copies > 0, f"hold of {hold.request_id}: a copy ended that never began"
        hold.copies -= 1
        self._swept(ticket_id, hold)

    def _turn(self, ticket_id: bytes, event: HoldEvent) -> None:
        hold = self._holds[ticket_id]
        hold.advance(event)
        if not self._swept(ticket_id, hold) and event is HoldEvent.LET_GO and hold.table is not None:
            hold.table = self._pool.quarantine(hold.table)

    def _swept(self, ticket_id: bytes, hold: Hold) -> bool:
        """Whether all keys were there."""
        if hold.state is not HoldState.FREE or hold.copies:
            return False
        del self._holds[ticket_id]
        if hold.table is not None:
            self._pool.release(hold.table)
        return True
