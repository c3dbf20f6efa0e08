"""Rights to blocks of this worker, from the asking to the adoption.

A reservation is first a place in the queue, then what is cached of it and a credit for the rest, then blocks that are
filled but must not be read, then a sequence or nothing. One without a ticket, whose prompt is computed here, is a
sequence as soon as it has its place. Lives on the step thread. Grants what a policy chose; decides nothing, moves no
bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TypeAlias

from engine.cache.block_pool import BlockPool, Credit
from engine.cache.block_table import BlockTable, Owner, OwnerKind
from engine.cache.coming import Coming
from engine.cache.prefix_chain import PrefixChain, PrefixLink
from engine.constraint import Constraint
from engine.errors import IllegalTransition
from engine.policy import SequenceView
from engine.scheduling.admission import blocks_at_start
from engine.sequence import SequenceId
from kvtransfer.ticket import Ticket
from service.orders import AttemptKey, SequenceOrder

Name: TypeAlias = bytes | AttemptKey
"""Of a reservation: its ticket's, which outlives the attempt as long as the transport may write; else the attempt."""


class ReservationState(Enum):
    ASKING = auto()
    """In the queue: nothing is promised."""
    GRANTED = auto()
    """What is cached is kept, other blocks are promised; the source may begin."""
    BOUND = auto()
    """Blocks are bound and the transport writes into them."""
    COMPUTING = auto()
    """A sequence has it all, and computes the prompt."""
    WITHDRAWN = auto()
    """Let go, but the transport may still write."""
    ADOPTED = auto()
    """The blocks belong to a running sequence; the transport has written its last."""
    GONE = auto()


class ReservationEvent(Enum):
    GRANT = auto()
    BIND = auto()
    COMPUTE = auto()
    ADOPT = auto()
    WITHDRAW = auto()
    CLOSED = auto()


RESERVATION_TRANSITIONS: Mapping[tuple[ReservationState, ReservationEvent], ReservationState] = {
    (ReservationState.ASKING, ReservationEvent.GRANT): ReservationState.GRANTED,
    (ReservationState.ASKING, ReservationEvent.WITHDRAW): ReservationState.GONE,
    (ReservationState.ASKING, ReservationEvent.COMPUTE): ReservationState.COMPUTING,
    (ReservationState.COMPUTING, ReservationEvent.ADOPT): ReservationState.GONE,
    (ReservationState.COMPUTING, ReservationEvent.WITHDRAW): ReservationState.GONE,
    (ReservationState.GRANTED, ReservationEvent.BIND): ReservationState.BOUND,
    (ReservationState.GRANTED, ReservationEvent.WITHDRAW): ReservationState.WITHDRAWN,
    (ReservationState.BOUND, ReservationEvent.ADOPT): ReservationState.ADOPTED,
    (ReservationState.BOUND, ReservationEvent.WITHDRAW): ReservationState.WITHDRAWN,
    (ReservationState.WITHDRAWN, ReservationEvent.CLOSED): ReservationState.GONE,
    (ReservationState.ADOPTED, ReservationEvent.CLOSED): ReservationState.GONE,
}
SEATED = frozenset({ReservationState.GRANTED, ReservationState.BOUND, ReservationState.COMPUTING})


@dataclass(slots=True, kw_only=True)
class Reservation:
    """blocks_max: blocks that all its sequences can ever need here. chain: names its prefixes. arrived: seconds on the
    worker's clock, in the past for what has waited elsewhere. ticket: as the gateway minted it, from the grant on
    without the blocks that are here already; None for a prompt that is computed here. unwanted: choices that nobody
    reads any more. constraint: of the order's guide, at its tokens; each sequence gets a fork. copying: whether what
    has arrived is being copied to where it is computed with; until that is done the blocks stay where they are."""

    gateway: str
    order: SequenceOrder
    ticket: Ticket | None
    blocks_max: int
    chain: PrefixChain
    arrived: float
    state: ReservationState = ReservationState.ASKING
    credit: Credit | None = None
    table: BlockTable | None = None
    unwanted: set[int] = field(default_factory=set)
    constraint: Constraint | None = None
    copying: bool = False

    def advance(self, event: ReservationEvent) -> None:
        """Take one legal transition. Raises IllegalTransition, and changes nothing, for any other."""
        target = RESERVATION_TRANSITIONS.get((self.state, event))
        if target is None:
            name = f"reservation of {self.order.key.request_id}"
            raise IllegalTransition(f"{name}: {event.name} in state {self.state.name}")
        self.state = target

    def id(self) -> SequenceId:
        return (self.order.key.request_id, self.order.key.attempt, self.order.choices[0].index)

    def name(self) -> Name:
        return self.ticket.ticket_id if self.ticket is not None else self.order.key

    def links(self) -> list[PrefixLink]:
        """Of all full blocks that the hand-off would fill; where there is none, without the last token, which is
        sampled from, and of nothing that is to be scored."""
        tokens = self.order.token_ids
        if self.ticket is None and self.order.prompt_logprobs is not None:
            return []
        return self.chain.links(tokens, 0, self.chain.full_blocks(len(tokens) - (self.ticket is None)))

    def blocks_to_start(self) -> int:
        """Blocks that it must have or be promised before anything is computed for it: all, for several sequences, which
        then are never given up."""
        if self.order.branches() > 1:
            return self.blocks_max
        known = self.chain.blocks_for(len(self.order.token_ids))
        return blocks_at_start(known, self.blocks_max, self.order.preemptions)

    def filled(self) -> tuple[int, ...]:
        """Of one that is bound: the blocks that the hand-off fills."""
        assert self.ticket is not None and self.table is not None
        return self.table.ids(self.ticket.first_block)

    def owner(self) -> Owner:
        return Owner(OwnerKind.RESERVATION, self.order.key.request_id)


class Reservations:
    """All reservations of a worker, by name, in order of asking."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._reservations: dict[Name, Reservation] = {}
        self._coming = Coming()

    def __len__(self) -> int:
        return len(self._reservations)

    def find(self, name: Name) -> Reservation | None:
        return self._reservations.get(name)

    def gateway_of(self, name: Name) -> str:
        """Who asked."""
        return self._reservations[name].gateway

    def end_choice(self, name: Name, choice: int) -> None:
        """Nobody reads this choice any more, if there is such."""
        reservation = self._reservations[name]
        if choice in {each.index for each in reservation.order.choices}:
            reservation.unwanted.add(choice)

    def asking(self) -> list[Reservation]:
        """The queue."""
        return [each for each in self._reservations.values() if each.state is ReservationState.ASKING]

    def seats(self) -> int:
        """For all that reservations will become, as far as anybody knows."""
        return sum(each.order.branches() for each in self._reservations.values() if each.state in SEATED)

    def growing_blocks(self) -> int:
        """Blocks that those with a seat may come to need and that nobody promised them."""
        pending = (ReservationState.GRANTED, ReservationState.BOUND)
        return sum(
            each.blocks_max - each.blocks_to_start()
            for each in self._reservations.values()
            if each.state in pending
        )

    def ask(self, reservation: Reservation) -> None:
        assert reservation.name() not in self._reservations
        self._reservations[reservation.name()] = reservation

    def view(self, reservation: Reservation) -> SequenceView:
        """One that asks, as a policy sees it."""
        links, known = reservation.links(), len(reservation.order.token_ids)
        match = self._pool.match(links)
        return SequenceView(
            id=reservation.id(),
            uncomputed=known - reservation.chain.tokens_in(match.blocks),
            blocks_to_start=reservation.blocks_to_start() - match.owned,
            blocks_to_end=reservation.blocks_max - reservation.blocks_to_start(),
            arrived=reservation.arrived,
            coming=reservation.chain.tokens_in(self._coming.count(links[match.blocks :])),
            seats=reservation.order.branches(),
        )

    def fitted(self, ticket_id: bytes) -> Ticket:
        """The ticket of one that asks, without the blocks that are here now."""
        reservation, ticket = self._ticketed(ticket_id)
        return replace(ticket, first_block=self._pool.match(reservation.links()).blocks)

    def grant(self, ticket_id: bytes) -> Reservation:
        """Keep what is cached, and promise the other blocks that it needs to start. The caller has checked that they
        are available."""
        reservation, ticket = self._ticketed(ticket_id)
        reservation.advance(ReservationEvent.GRANT)
        links = reservation.links()
        reservation.table = self._pool.share(reservation.owner(), links)
        held = len(reservation.table)
        reservation.credit = self._pool.grant(reservation.owner(), reservation.blocks_to_start() - held)
        reservation.ticket = replace(ticket, first_block=held)
        self._coming.announce(ticket_id, links[held:])
        return reservation

    def compute(self, name: Name) -> tuple[BlockTable, Credit]:
        """The prompt is computed here: what is cached, and the promise of what else it needs to start, for its
        sequence. The caller has checked that there is room."""
        reservation = self._reservations[name]
        reservation.advance(ReservationEvent.COMPUTE)
        owner, links = Owner(OwnerKind.SEQUENCE, reservation.order.key.request_id), reservation.links()
        table = self._pool.share(owner, links)
        self._coming.announce(name, links[len(table) :])
        return table, self._pool.grant(owner, reservation.blocks_to_start() - len(table))

    def computed(self, name: Name) -> None:
        """The prompt is there, and what goes on from it has all that was promised."""
        reservation = self._reservations[name]
        reservation.advance(ReservationEvent.ADOPT)
        self._coming.drop(name)
        self._sweep(reservation)

    def bind(self, ticket_id: bytes) -> tuple[int, ...]:
        """Turn the part of the promise that the hand-off fills into blocks. Returns those."""
        reservation, ticket = self._ticketed(ticket_id)
        reservation.advance(ReservationEvent.BIND)
        assert reservation.credit is not None and reservation.table is not None
        blocks = len(ticket.blocks_to_send())
        self._pool.extend(reservation.table, blocks, reservation.credit)
        return reservation.filled()

    def copying(self, ticket_id: bytes) -> tuple[int, ...]:
        """Everything has arrived, and is being copied from now on. Returns the blocks."""
        reservation = self._reservations[ticket_id]
        assert reservation.state is ReservationState.BOUND and not reservation.copying, reservation.state
        reservation.copying = True
        return reservation.filled()

    def copied(self, ticket_id: bytes) -> None:
        """That is done."""
        reservation = self._reservations[ticket_id]
        assert reservation.copying, "a copy ended that never began"
        reservation.copying = False
        self._sweep(reservation)

    def adopt(self, ticket_id: bytes) -> tuple[BlockTable, Credit]:
        """Everything is there: blocks and the rest of the promise go to the sequence, or to what forks from it."""
        reservation = self._reservations[ticket_id]
        assert not reservation.copying, "adopted while it is copied"
        reservation.advance(ReservationEvent.ADOPT)
        assert reservation.table is not None and reservation.credit is not None
        table = self._pool.transfer(
            reservation.table, Owner(OwnerKind.SEQUENCE, reservation.order.key.request_id)
        )
        credit, reservation.credit, reservation.table = reservation.credit, None, None
        self._coming.drop(ticket_id)
        return table, credit

    def withdraw(self, name: Name) -> ReservationState:
        """Let go. Blocks that the transport may write into stay reserved until it is closed, and those that are copied
        until that is done. Returns how far it was."""
        reservation = self._reservations[name]
        before = reservation.state
        reservation.advance(ReservationEvent.WITHDRAW)
        if reservation.credit is not None:
            self._pool.waive(reservation.credit)
            reservation.credit = None
        if reservation.table is not None:
            reservation.table = self._pool.quarantine(reservation.table)
        self._coming.drop(name)
        self._sweep(reservation)
        return before

    def closed(self, ticket_id: bytes) -> None:
        """Nobody writes any more."""
        reservation = self._reservations[ticket_id]
        reservation.advance(ReservationEvent.CLOSED)
        self._sweep(reservation)

    def _ticketed(self, ticket_id: bytes) -> tuple[Reservation, Ticket]:
        reservation = self._reservations[ticket_id]
        assert reservation.ticket is not None
        return reservation, reservation.ticket

    def _sweep(self, reservation: Reservation) -> None:
        if reservation.state is ReservationState.GONE and not reservation.copying:
            del self._reservations[reservation.name()]
            if reservation.table is not None:
                self._pool.release(reservation.table)
