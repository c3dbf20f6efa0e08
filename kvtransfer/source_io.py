"""What a sending end does on its I/O thread: links, outgoing transfers, and the memory that is being read.

Driven by `TransferSource`, one call at a time. Does what the state machines return; decides nothing about a
transfer itself. Time is an argument, except when a read ends: that instant comes from the clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtransfer import events, wire
from kvtransfer.actions import Cut, Drop, Emit, Send, SourceAction
from kvtransfer.counters import COMMITTED_OVER, Counters
from kvtransfer.errors import IllegalTransition, Reason
from kvtransfer.greeting import BlockShape, hello
from kvtransfer.identity import Identity
from kvtransfer.link import Failure, Link, Phase
from kvtransfer.outgoing import OutgoingTransfer
from kvtransfer.refusals import Refusals
from kvtransfer.ticket import Ticket
from kvtransfer.transport import SourceTransport


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLimits:
    """connect_ms: for one endpoint to answer the greeting. tick_ms: between two looks at the timers.
    malformed_max: messages that are none, after which a target is given up. run_bytes_max: block bytes of one
    message, unless one block is larger."""

    transfers_max: int = 1024
    connect_ms: int = 1000
    tick_ms: int = 20
    malformed_max: int = 8
    run_bytes_max: int = wire.RUN_BYTES_MAX


@dataclass(slots=True)
class _Live:
    transfer: OutgoingTransfer
    link: Link
    blocks: dict[int, memoryview] = field(default_factory=dict)


class SourceIO:
    def __init__(
        self,
        *,
        identity: Identity,
        shape: BlockShape,
        transport: SourceTransport,
        tell: Callable[[events.SourceEvent], None],
        clock: Callable[[], float],
        limits: SourceLimits,
        counters: Counters,
        refusals: Refusals,
    ) -> None:
        self._identity = identity
        self._shape = shape
        self._transport = transport
        self._tell = tell
        self._clock = clock
        self._limits = limits
        self._counters = counters
        self._refusals = refusals
        self._live: dict[bytes, _Live] = {}
        self._links: dict[tuple[Identity, tuple[str, ...]], Link] = {}
        self._ticked = clock()

    def open(self, sealed: bytes, ticket: Ticket, endpoints: tuple[str, ...], now: float) -> None:
        key = (ticket.target(), endpoints)
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = self._new_link(ticket.target(), endpoints, now)
        block_bytes = self._shape.block_bytes
        run_blocks_max = wire.run_blocks_max(block_bytes, self._limits.run_bytes_max)
        transfer = OutgoingTransfer(ticket, sealed, block_bytes, run_blocks_max, now)
        live = self._live[ticket.ticket_id] = _Live(transfer, link)
        self._perform(live, transfer.start(now), now)

    def push(
        self, ticket_id: bytes, first_index: int, blocks: list[memoryview], digests: list[bytes], now: float
    ) -> None:
        live = self._going_on(ticket_id)
        if live is not None:
            live.blocks.update(enumerate(blocks, first_index))
            self._perform(live, live.transfer.push(first_index, digests, now), now)

    def finish(self, ticket_id: bytes, first_tokens: events.FirstTokens, now: float) -> None:
        live = self._going_on(ticket_id)
        if live is not None:
            self._perform(live, live.transfer.finish(first_tokens, now), now)

    def cancel(self, ticket_id: bytes, now: float) -> None:
        live = self._going_on(ticket_id)
        if live is not None:
            self._perform(live, live.transfer.cancel(now), now)

    def turn(self, now: float) -> None:
        """Take what arrived, look at the timers, send what can be sent."""
        for link in list(self._links.values()):
            for envelope in link.receive(now):
                self._on_message(link, envelope, now)
        self._tick(now)
        self._bury_dead_links(now)
        for link in self._links.values():
            link.flush()

    def patience_s(self) -> float:
        """How long the next wait may be."""
        # That a read ended is not an event one can wait for: look often while somebody waits for Closed.
        if any(live.transfer.over() for live in self._live.values()):
            return 0.001
        settled = all(link.phase is Phase.READY for link in self._links.values())
        return 1.0 if settled and not self._live else self._limits.tick_ms / 1000

    def close(self) -> None:
        """Drop everything without a word. When it returns, nothing reads any block."""
        self._transport.close()
        self._live.clear()
        self._links.clear()

    def _going_on(self, ticket_id: bytes) -> _Live | None:
        live = self._live.get(ticket_id)
        return None if live is None or live.transfer.over() else live

    def _new_link(self, target: Identity, endpoints: tuple[str, ...], now: float) -> Link:
        return Link(
            transport=self._transport,
            source=self._identity,
            target=target,
            hello=hello(self._shape, self._identity, target),
            endpoints=endpoints,
            connect_s=self._limits.connect_ms / 1000,
            malformed_max=self._limits.malformed_max,
            counters=self._counters,
            refusals=self._refusals,
            now=now,
        )

    def _on_message(self, link: Link, envelope: wire.Envelope, now: float) -> None:
        live = self._live.get(envelope.ticket_id)
        if live is None or live.link is not link:
            self._counters.add("unknown_ticket")
            return
        if not wire.is_for(live.transfer.ticket, envelope):
            self._counters.add("fenced")
            return
        try:
            actions = _feed(live.transfer, envelope.message, now)
        except IllegalTransition:
            self._counters.add(f"unexpected_{type(envelope.message).__name__.lower()}")
            return
        if isinstance(envelope.message, wire.Committed):
            self._counters.add(f"{COMMITTED_OVER}{link.way}")
        self._perform(live, actions, now)
        if isinstance(envelope.message, wire.Refused) and envelope.message.reason is Reason.NOT_GREETED:
            link.fail(Failure(reason=Reason.PEER_LOST, detail="the target has forgotten the greeting"))

    def _perform(self, live: _Live, actions: Sequence[SourceAction], now: float) -> None:
        for action in actions:
            match action:
                case Send():
                    self._send(live, action)
                case Drop():
                    for _ in range(live.link.drop(live.transfer.ticket.ticket_id)):
                        self._perform(live, live.transfer.read_done(now), now)
                case Cut():
                    live.link.fail(Failure(reason=Reason.PEER_LOST, detail="the target does not read"))
                case Emit():
                    if isinstance(action.event, events.Closed):
                        del self._live[action.event.ticket_id]
                    self._tell(action.event)

    def _send(self, live: _Live, action: Send) -> None:
        ticket = live.transfer.ticket
        header = wire.encode(wire.for_ticket(ticket, action.message))
        payloads = tuple([live.blocks[index] for index in action.payload_indices])
        if payloads:
            self._counters.add("blocks_sent", len(payloads))
        live.link.send(ticket.ticket_id, header, payloads, partial(self._read_done, live))

    def _read_done(self, live: _Live) -> None:
        now = self._clock()
        self._perform(live, live.transfer.read_done(now), now)

    def _tick(self, now: float) -> None:
        if now - self._ticked < self._limits.tick_ms / 1000:
            return
        self._ticked = now
        for live in list(self._live.values()):
            self._perform(live, live.transfer.tick(now), now)

    def _bury_dead_links(self, now: float) -> None:
        for key, link in list(self._links.items()):
            if link.phase is not Phase.DEAD:
                continue
            del self._links[key]
            failure = link.failure
            for live in [each for each in self._live.values() if each.link is link]:
                if not live.transfer.over():
                    self._perform(live, live.transfer.lost(failure.reason, failure.detail, now), now)


def _feed(transfer: OutgoingTransfer, message: wire.Message, now: float) -> list[SourceAction]:
    match message:
        case wire.Grant():
            return transfer.granted(message.total_bytes, now)
        case wire.Resend():
            return transfer.resend(message.indices, now)
        case wire.Committed():
            return transfer.committed(now)
        case wire.Refused():
            return transfer.refused(message.reason, message.detail, now)
        case _:
            raise IllegalTransition(f"{type(message).__name__} goes to the target")
