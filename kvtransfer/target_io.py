"""What a receiving end does on its I/O thread: peers, incoming transfers, and the copy into a block.

Driven by `TransferTarget`, one call at a time. Decides who may speak: an unknown peer, ticket, epoch or
attempt is counted and has no effect. A byte is copied only when its transfer's state machine says Place, and
verified where it lies then.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtransfer import events, wire
from kvtransfer.actions import Count, Emit, Place, Send, TargetAction
from kvtransfer.counters import Counters
from kvtransfer.digest import block_digest
from kvtransfer.errors import (
    HandshakeRefused,
    IllegalTransition,
    Reason,
    TicketRefused,
    UnknownVersion,
    WireError,
)
from kvtransfer.greeting import WIRE_VERSION_FIELD, BlockShape, require_agreement
from kvtransfer.identity import Identity
from kvtransfer.incoming import IncomingTransfer
from kvtransfer.keys import serves
from kvtransfer.ticket import Ticket, open_sealed
from kvtransfer.transport import Arrival, Delivery, PeerGone, TargetTransport


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLimits:
    """window_bytes: block bytes of one transfer that may be on their way. malformed_max: messages that are
    none, after which a peer is ignored. peers_max: greetings remembered. spent_max: ended tickets that
    still get an answer. tick_ms: between two looks at the timers."""

    transfers_max: int = 1024
    window_bytes: int = 64 * 1024 * 1024
    malformed_max: int = 8
    peers_max: int = 1024
    spent_max: int = 4096
    tick_ms: int = 20


@dataclass(slots=True)
class _Peer:
    source: Identity | None = None
    strikes: int = 0


@dataclass(slots=True)
class _Live:
    transfer: IncomingTransfer
    places: list[memoryview] = field(default_factory=list)


class TargetIO:
    def __init__(
        self,
        *,
        identity: Identity,
        shape: BlockShape,
        key: bytes,
        transport: TargetTransport,
        tell: Callable[[events.TargetEvent], None],
        clock: Callable[[], float],
        limits: TargetLimits,
        counters: Counters,
    ) -> None:
        self._identity = identity
        self._shape = shape
        self._key = key
        self._transport = transport
        self._tell = tell
        self._limits = limits
        self._counters = counters
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()
        self._gone: set[bytes] = set()
        self._live: dict[bytes, _Live] = {}
        self._spent: OrderedDict[bytes, IncomingTransfer] = OrderedDict()
        self._ticked = clock()

    def expect(self, ticket: Ticket, now: float) -> None:
        transfer = IncomingTransfer(ticket, self._shape.block_bytes, self._limits.window_bytes, now)
        self._live[ticket.ticket_id] = _Live(transfer)

    def bind(self, ticket_id: bytes, places: list[memoryview], now: float) -> None:
        live = self._live.get(ticket_id)
        if live is not None:
            live.places = places
            self._perform(live, live.transfer.bind(now), now)

    def commit(self, ticket_id: bytes, now: float) -> None:
        live = self._live.get(ticket_id)
        if live is not None:
            self._perform(live, live.transfer.commit(now), now)

    def withdraw(self, ticket_id: bytes, reason: Reason, now: float) -> None:
        live = self._live.get(ticket_id)
        if live is not None:
            self._perform(live, live.transfer.withdraw(reason, now), now)

    def receive(self) -> Arrival | PeerGone | None:
        """What to `take` next."""
        return self._transport.receive()

    def take(self, arrival: Arrival | PeerGone, now: float) -> None:
        match arrival:
            case PeerGone():
                self._gone.add(arrival.peer)
            case Arrival():
                self._on_arrival(arrival, now)
        self._forget_the_gone(now)

    def tick(self, now: float) -> None:
        if now - self._ticked < self._limits.tick_ms / 1000:
            return
        self._ticked = now
        for live in list(self._live.values()):
            self._perform(live, live.transfer.tick(now), now)
        self._forget_the_gone(now)

    def patience_s(self) -> float:
        """How long the next wait may be."""
        return self._limits.tick_ms / 1000 if self._live else 1.0

    def close(self) -> None:
        """Drop everything without a word. When it returns, nothing writes into any block."""
        self._transport.close()
        self._live.clear()

    def _on_arrival(self, arrival: Arrival, now: float) -> None:
        peer = self._peers.get(arrival.peer) or self._meet(arrival.peer)
        if peer.strikes >= self._limits.malformed_max:
            self._counters.add("ignored_peer")
            return
        try:
            envelope = wire.decode(arrival.header)
            if len(arrival.payloads) != wire.payloads_of(envelope.message):
                raise WireError("blocks come with one payload each, everything else without")
            self._on_message(arrival, peer, envelope, now)
        except UnknownVersion:
            self._strike(peer)
            refusal = wire.HelloRefused(fields=(WIRE_VERSION_FIELD,))
            self._reply(arrival.peer, self._for_connection(0, refusal))
        except WireError:
            self._strike(peer)

    def _on_message(self, arrival: Arrival, peer: _Peer, envelope: wire.Envelope, now: float) -> None:
        message = envelope.message
        match message:
            case wire.Hello():
                self._on_hello(arrival, peer, envelope, message)
            case wire.Open():
                self._on_open(arrival.peer, peer, envelope, message, now)
            case wire.BlockRun() | wire.Manifest() | wire.Abort():
                self._on_transfer_message(arrival, envelope, now)
            case _:
                raise WireError(f"{type(message).__name__} goes to the source")

    def _on_hello(self, arrival: Arrival, peer: _Peer, envelope: wire.Envelope, message: wire.Hello) -> None:
        answer: wire.Message
        try:
            if arrival.proven is not None and not serves(arrival.proven, message.source_id):
                raise HandshakeRefused(("source_id",))
            source = require_agreement(envelope, message, self._shape, self._identity)
        except HandshakeRefused as refusal:
            self._counters.add("refused_handshake")
            answer = wire.HelloRefused(fields=refusal.fields)
        else:
            if peer.source not in (None, source):
                raise WireError("a second greeting with another name")
            peer.source = source
            answer = wire.HelloAccepted(target_id=self._identity.worker_id)
        self._reply(arrival.peer, self._for_connection(envelope.source_epoch, answer))

    def _on_open(
        self, name: bytes, peer: _Peer, envelope: wire.Envelope, message: wire.Open, now: float
    ) -> None:
        try:
            ticket = self._require_valid(peer, envelope, message)
            live = self._live.get(ticket.ticket_id)
            if live is None:
                self._answer_spent(name, ticket)
                return
            if live.transfer.ticket != ticket:
                raise TicketRefused(Reason.UNKNOWN_TICKET, "not the expected one")
            if live.transfer.peer not in (None, name):
                raise TicketRefused(Reason.SPENT, "opened by another connection")
        except TicketRefused as refused:
            self._counters.add(f"refused_{refused.reason.name.lower()}")
            answer = wire.Refused(reason=refused.reason, detail=refused.detail)
            self._reply(name, _replace_message(envelope, self._identity.epoch, answer))
            return
        self._perform(live, live.transfer.opened(name, now), now)

    def _require_valid(self, peer: _Peer, envelope: wire.Envelope, message: wire.Open) -> Ticket:
        ticket = open_sealed(message.sealed, self._key)
        if peer.source is None:
            raise TicketRefused(Reason.NOT_GREETED)
        if ticket.source_id != peer.source.worker_id:
            raise TicketRefused(Reason.WRONG_SOURCE)
        if ticket.target_id != self._identity.worker_id:
            raise TicketRefused(Reason.WRONG_TARGET)
        if not ticket.source_epoch == peer.source.epoch == envelope.source_epoch:
            raise TicketRefused(Reason.WRONG_EPOCH, "source_epoch")
        if not ticket.target_epoch == self._identity.epoch == envelope.target_epoch:
            raise TicketRefused(Reason.WRONG_EPOCH, "target_epoch")
        if ticket.attempt != envelope.attempt:
            raise TicketRefused(Reason.WRONG_ATTEMPT)
        if ticket.ticket_id != envelope.ticket_id:
            raise TicketRefused(Reason.UNKNOWN_TICKET, "not the one in the header")
        return ticket

    def _answer_spent(self, name: bytes, ticket: Ticket) -> None:
        """The ticket's transfer is over: whoever opened it hears the outcome again."""
        transfer = self._spent.get(ticket.ticket_id)
        if transfer is None:
            raise TicketRefused(Reason.UNKNOWN_TICKET)
        if transfer.peer not in (None, name) or transfer.ticket != ticket:
            raise TicketRefused(Reason.SPENT)
        self._reply(name, wire.for_ticket(ticket, transfer.answer()))

    def _on_transfer_message(self, arrival: Arrival, envelope: wire.Envelope, now: float) -> None:
        live = self._live.get(envelope.ticket_id)
        transfer = self._spent.get(envelope.ticket_id) if live is None else live.transfer
        if transfer is None:
            self._counters.add("unknown_ticket")
        elif transfer.peer != arrival.peer:
            self._counters.add("wrong_peer")
        elif not wire.is_for(transfer.ticket, envelope):
            self._counters.add("fenced")
        elif live is None:
            self._counters.add("late")
            if isinstance(envelope.message, wire.Manifest):
                self._reply(arrival.peer, wire.for_ticket(transfer.ticket, transfer.answer()))
        else:
            self._feed(live, envelope.message, arrival.payloads, now)

    def _feed(self, live: _Live, message: wire.Message, payloads: Sequence[memoryview], now: float) -> None:
        try:
            match message:
                case wire.BlockRun():
                    actions = live.transfer.blocks(message, payloads, now)
                case wire.Manifest():
                    actions = live.transfer.manifest(message, now)
                case wire.Abort():
                    actions = live.transfer.aborted(message.reason, now)
                case _:
                    raise AssertionError(message)
        except IllegalTransition:
            self._counters.add(f"unexpected_{type(message).__name__.lower()}")
            return
        self._perform(live, actions, now)

    def _perform(self, live: _Live, actions: Sequence[TargetAction], now: float) -> None:
        transfer = live.transfer
        for action in actions:
            match action:
                case Send():
                    assert transfer.peer is not None
                    self._reply(transfer.peer, wire.for_ticket(transfer.ticket, action.message))
                case Place():
                    self._perform(live, transfer.placed(action, _place(live, action), now), now)
                case Count():
                    self._counters.add(action.name, action.count)
                case Emit():
                    if isinstance(action.event, events.Closed):
                        self._retire(transfer)
                    self._tell(action.event)

    def _retire(self, transfer: IncomingTransfer) -> None:
        del self._live[transfer.ticket.ticket_id]
        self._spent[transfer.ticket.ticket_id] = transfer
        while len(self._spent) > self._limits.spent_max:
            self._spent.popitem(last=False)

    def _reply(self, peer: bytes, envelope: wire.Envelope) -> None:
        delivery = self._transport.send(peer, wire.encode(envelope))
        if delivery is Delivery.GONE:
            self._gone.add(peer)
        elif delivery is Delivery.FULL:
            # The source asks again: every answer of ours can be repeated.
            self._counters.add("reply_dropped")

    def _for_connection(self, source_epoch: int, message: wire.Message) -> wire.Envelope:
        return wire.Envelope(
            source_epoch=source_epoch,
            target_epoch=self._identity.epoch,
            attempt=0,
            ticket_id=wire.NO_TICKET,
            message=message,
        )

    def _strike(self, peer: _Peer) -> None:
        peer.strikes += 1
        self._counters.add("malformed")

    def _meet(self, name: bytes) -> _Peer:
        if len(self._peers) >= self._limits.peers_max:
            busy = {live.transfer.peer for live in self._live.values()}
            idle = next((known for known in self._peers if known not in busy), None)
            if idle is not None:
                del self._peers[idle]
        peer = self._peers[name] = _Peer()
        return peer

    def _forget_the_gone(self, now: float) -> None:
        while self._gone:
            name = self._gone.pop()
            self._peers.pop(name, None)
            for live in [each for each in self._live.values() if each.transfer.peer == name]:
                self._perform(live, live.transfer.lost(now), now)


def _place(live: _Live, action: Place) -> list[bytes]:
    """Copies; returns the digests of what lies in the places then."""
    digests: list[bytes] = []
    for index, payload in zip(action.indices, action.payloads, strict=True):
        place = live.places[index - live.transfer.ticket.first_block]
        # numpy lets other threads run while it copies; a memoryview assignment does not.
        np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(payload, np.uint8))
        digests.append(block_digest(place))
    return digests


def _replace_message(envelope: wire.Envelope, target_epoch: int, message: wire.Message) -> wire.Envelope:
    return wire.Envelope(
        source_epoch=envelope.source_epoch,
        target_epoch=target_epoch,
        attempt=envelope.attempt,
        ticket_id=envelope.ticket_id,
        message=message,
    )
