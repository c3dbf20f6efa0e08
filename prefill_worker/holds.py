"""Computed blocks that are kept, or still read, for a hand-off.

A hold needs two keys before its blocks are free: its owner let go, and the transport reads no more. Until then the
blocks must not be reused. Lives on the step thread; moves no bytes.
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
    """table: None while the sequence that is being computed owns the blocks."""

    request_id: str
    table: BlockTable | None = None
    state: HoldState = HoldState.READ

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

    def _turn(self, ticket_id: bytes, event: HoldEvent) -> None:
        hold = self._holds[ticket_id]
        hold.advance(event)
        if hold.state is HoldState.FREE:
            del self._holds[ticket_id]
        if hold.table is None:
            return
        if hold.state is HoldState.FREE:
            self._pool.release(hold.table)
        elif hold.state is HoldState.LET_GO:
            hold.table = self._pool.quarantine(hold.table)
