"""Rights to blocks of this worker, from the asking to the adoption.

A reservation is first a place in the queue, then a credit, then blocks that are filled but must not be read, then a
sequence or nothing. Lives on the step thread. Grants what a policy chose; decides nothing, moves no bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from engine.cache.block_pool import BlockPool, Credit
from engine.cache.block_table import BlockTable, Owner, OwnerKind
from engine.errors import IllegalTransition
from kvtransfer.ticket import Ticket
from service.orders import SequenceOrder


class ReservationState(Enum):
    ASKING = auto()
    """In the queue: nothing is promised."""
    GRANTED = auto()
    """Blocks are promised; the source may begin."""
    BOUND = auto()
    """Blocks are bound and the transport writes into them."""
    WITHDRAWN = auto()
    """Let go, but the transport may still write."""
    ADOPTED = auto()
    """The blocks belong to a running sequence; the transport has written its last."""
    GONE = auto()


class ReservationEvent(Enum):
    GRANT = auto()
    BIND = auto()
    ADOPT = auto()
    WITHDRAW = auto()
    CLOSED = auto()


RESERVATION_TRANSITIONS: Mapping[tuple[ReservationState, ReservationEvent], ReservationState] = {
    (ReservationState.ASKING, ReservationEvent.GRANT): ReservationState.GRANTED,
    (ReservationState.ASKING, ReservationEvent.WITHDRAW): ReservationState.GONE,
    (ReservationState.GRANTED, ReservationEvent.BIND): ReservationState.BOUND,
    (ReservationState.GRANTED, ReservationEvent.WITHDRAW): ReservationState.WITHDRAWN,
    (ReservationState.BOUND, ReservationEvent.ADOPT): ReservationState.ADOPTED,
    (ReservationState.BOUND, ReservationEvent.WITHDRAW): ReservationState.WITHDRAWN,
    (ReservationState.WITHDRAWN, ReservationEvent.CLOSED): ReservationState.GONE,
    (ReservationState.ADOPTED, ReservationEvent.CLOSED): ReservationState.GONE,
}


@dataclass(slots=True, kw_only=True)
class Reservation:
    """blocks_max: blocks the sequence can ever need here. asked: seconds on the worker's clock."""

    gateway: str
    order: SequenceOrder
    ticket: Ticket
    blocks_max: int
    asked: float
    state: ReservationState = ReservationState.ASKING
    credit: Credit | None = None
    table: BlockTable | None = None

    def advance(self, event: ReservationEvent) -> None:
        """Take one legal transition. Raises IllegalTransition, and changes nothing, for any other."""
        target = RESERVATION_TRANSITIONS.get((self.state, event))
        if target is None:
            name = f"reservation of {self.order.key.request_id}"
            raise IllegalTransition(f"{name}: {event.name} in state {self.state.name}")
        self.state = target

    def owner(self) -> Owner:
        return Owner(OwnerKind.RESERVATION, self.order.key.request_id)


class Reservations:
    """All reservations of a worker, by ticket, in order of asking."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._reservations: dict[bytes, Reservation] = {}

    def __len__(self) -> int:
        return len(self._reservations)

    def find(self, ticket_id: bytes) -> Reservation | None:
        return self._reservations.get(ticket_id)

    def asking(self) -> list[Reservation]:
        """The queue."""
        return [each for each in self._reservations.values() if each.state is ReservationState.ASKING]

    def seats(self) -> int:
        """Reservations that will become sequences, as far as anybody knows."""
        pending = (ReservationState.GRANTED, ReservationState.BOUND)
        return sum(each.state in pending for each in self._reservations.values())

    def ask(self, reservation: Reservation) -> None:
        assert reservation.ticket.ticket_id not in self._reservations
        self._reservations[reservation.ticket.ticket_id] = reservation

    def grant(self, ticket_id: bytes) -> Reservation:
        """Promise the blocks. The caller has checked that they are available."""
        reservation = self._reservations[ticket_id]
        reservation.advance(ReservationEvent.GRANT)
        reservation.credit = self._pool.grant(reservation.owner(), reservation.blocks_max)
        return reservation

    def bind(self, ticket_id: bytes) -> BlockTable:
        """Turn the part of the promise that the hand-off fills into blocks."""
        reservation = self._reservations[ticket_id]
        reservation.advance(ReservationEvent.BIND)
        assert reservation.credit is not None
        blocks = reservation.ticket.num_blocks
        reservation.table = self._pool.allocate(reservation.owner(), blocks, reservation.credit)
        return reservation.table

    def adopt(self, ticket_id: bytes) -> tuple[BlockTable, Credit]:
        """Everything has arrived: blocks and the rest of the promise go to the sequence."""
        reservation = self._reservations[ticket_id]
        reservation.advance(ReservationEvent.ADOPT)
        assert reservation.table is not None and reservation.credit is not None
        table = self._pool.transfer(
            reservation.table, Owner(OwnerKind.SEQUENCE, reservation.order.key.request_id)
        )
        credit, reservation.credit, reservation.table = reservation.credit, None, None
        return table, credit

    def withdraw(self, ticket_id: bytes) -> ReservationState:
        """Let go. Blocks that the transport may write into stay reserved until it is closed."""
        reservation = self._reservations[ticket_id]
        before = reservation.state
        reservation.advance(ReservationEvent.WITHDRAW)
        if reservation.credit is not None:
            self._pool.waive(reservation.credit)
            reservation.credit = None
        self._sweep(reservation)
        return before

    def closed(self, ticket_id: bytes) -> None:
        """Nobody writes any more."""
        reservation = self._reservations[ticket_id]
        reservation.advance(ReservationEvent.CLOSED)
        self._sweep(reservation)

    def _sweep(self, reservation: Reservation) -> None:
        if reservation.state is ReservationState.GONE:
            del self._reservations[reservation.ticket.ticket_id]
            if reservation.table is not None:
                self._pool.release(reservation.table)
