"""A worker's sending end: all transfers that leave it, served by one I/O thread.

Owns the links and the outgoing transfers. The worker calls open, push, finish and cancel from any thread; they
never wait. Results come through `emit`, on the I/O thread. Never computes, never frees a block: Closed says that
nobody reads the pushed memory any more, and freeing is the worker's part.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.cache.layout import KVLayout
from kvtransfer import events, wire
from kvtransfer.actions import Count, Cut, Drop, Emit, Send, SourceAction
from kvtransfer.counters import Counters
from kvtransfer.digest import block_digest
from kvtransfer.errors import IllegalTransition, Overloaded, Reason, TicketRefused
from kvtransfer.greeting import hello
from kvtransfer.identity import Identity
from kvtransfer.link import Failure, Link, Phase
from kvtransfer.outgoing import OutgoingTransfer
from kvtransfer.ticket import Ticket
from kvtransfer.transport import SourceTransport


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLimits:
    """connect_ms: for one endpoint to answer the greeting. tick_ms: between two looks at the timers."""

    transfers_max: int = 1024
    connect_ms: int = 1000
    tick_ms: int = 20
    malformed_max: int = 8


@dataclass(slots=True)
class _Entry:
    """What callers know of a live transfer. Guarded by the endpoint's lock."""

    ticket: Ticket
    next_index: int
    finished: bool = False
    cancelled: bool = False


@dataclass(slots=True)
class _Live:
    """What the I/O thread knows of it."""

    transfer: OutgoingTransfer
    link: Link
    blocks: dict[int, memoryview] = field(default_factory=dict)


class TransferSource:
    """Serves after `start`; without it, whoever calls `turn` serves (a simulation).

    The inbox holds at most transfers_max * (blocks of a ticket + 3) calls: each block is pushed once, and open,
    finish and cancel are taken once.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        layout: KVLayout,
        transport: SourceTransport,
        emit: Callable[[events.SourceEvent], None],
        clock: Callable[[], float],
        limits: SourceLimits | None = None,
    ) -> None:
        self._identity = identity
        self._layout = layout
        self._transport = transport
        self._emit = emit
        self._clock = clock
        self._limits = limits or SourceLimits()
        self._counters = Counters()
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._inbox: deque[Callable[[float], None]] = deque()
        self._live: dict[bytes, _Live] = {}
        self._links: dict[tuple[Identity, tuple[str, ...]], Link] = {}
        self._ticked = clock()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=f"kv-source-{identity.worker_id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def open(self, sealed: bytes, ticket: Ticket, endpoints: tuple[str, ...]) -> None:
        """Begin a transfer. endpoints: where the target receives, best first, at least one.

        Raises TicketRefused when the ticket is not for this process or layout, or is open already, and
        Overloaded at transfers_max or after close. Then nothing has begun and no event comes.
        """
        self._require_ours(ticket)
        with self._lock:
            if self._closing or len(self._entries) >= self._limits.transfers_max:
                raise Overloaded("no room for another outgoing transfer")
            if ticket.ticket_id in self._entries:
                raise TicketRefused(Reason.SPENT, "open already")
            self._entries[ticket.ticket_id] = _Entry(ticket, ticket.first_block)
        self._put(partial(self._do_open, sealed, ticket, endpoints))

    def push(self, ticket_id: bytes, first_index: int, blocks: Sequence[memoryview]) -> None:
        """Blocks are computed and will not change until Closed. In order, each once, from the ticket's first_block.

        Takes the digests here, on the caller's thread: 17 us per MiB. Ignored once the ticket is closed.
        """
        with self._lock:
            entry = self._entries.get(ticket_id)
            if entry is None or entry.cancelled:
                return
            assert first_index == entry.next_index, f"pushed {first_index}, expected {entry.next_index}"
            assert first_index + len(blocks) <= entry.ticket.num_blocks, "more blocks than the ticket has"
            entry.next_index += len(blocks)
        views = [block.cast("B") if block.format != "B" or block.ndim != 1 else block for block in blocks]
        assert all(view.nbytes == self._layout.block_bytes() for view in views), "not whole blocks"
        digests = [block_digest(view) for view in views]
        self._put(partial(self._do_push, ticket_id, first_index, views, digests))

    def finish(self, ticket_id: bytes, num_tokens: int, first_token: int) -> None:
        """All blocks were pushed. first_token: sampled after the run. Ignored once the ticket is closed."""
        with self._lock:
            entry = self._entries.get(ticket_id)
            if entry is None or entry.cancelled:
                return
            assert not entry.finished, "finished twice"
            assert entry.next_index == entry.ticket.num_blocks, "finished before all blocks were pushed"
            assert num_tokens == entry.ticket.num_tokens, "another number of tokens than the ticket has"
            entry.finished = True
        self._put(partial(self._do_finish, ticket_id, first_token))

    def cancel(self, ticket_id: bytes) -> None:
        """Want no more of it; Closed follows. Idempotent; ignored once the ticket is closed."""
        with self._lock:
            entry = self._entries.get(ticket_id)
            if entry is None or entry.cancelled:
                return
            entry.cancelled = True
        self._put(partial(self._do_cancel, ticket_id))

    def counters(self) -> dict[str, int]:
        """What was dropped, by reason, and blocks and bytes sent."""
        return self._counters.read()

    def close(self) -> None:
        """End everything; returns when Closed was emitted for every open ticket. The one call that waits."""
        with self._lock:
            self._closing = True
        self._transport.wake()
        if self._thread.ident is None:
            self._end()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def turn(self, timeout_s: float) -> None:
        """One round of the I/O thread: calls, messages, timers. For the thread, or for a simulation."""
        self._transport.wait(timeout_s)
        now = self._clock()
        while self._inbox:
            self._inbox.popleft()(now)
        for link in list(self._links.values()):
            for envelope in link.turn(now):
                self._on_message(link, envelope, now)
        self._tick(now)
        self._bury_dead_links(now)
        for link in self._links.values():
            link.turn_out()

    def _serve(self) -> None:
        try:
            while not self._closing:
                self.turn(self._patience_s())
        finally:
            self._end()

    def _patience_s(self) -> float:
        # A finished read is not an event one can wait for: look often while somebody waits for Closed.
        if any(live.transfer.over() for live in self._live.values()):
            return 0.001
        settled = all(link.phase is Phase.READY for link in self._links.values())
        return 1.0 if settled and not self._live else self._limits.tick_ms / 1000

    def _end(self) -> None:
        with self._lock:
            self._closing = True
        self._transport.close()
        self._live.clear()
        with self._lock:
            open_tickets = list(self._entries)
            self._entries.clear()
        for ticket_id in open_tickets:
            self._emit(events.Closed(ticket_id=ticket_id))

    def _require_ours(self, ticket: Ticket) -> None:
        if ticket.source_id != self._identity.worker_id:
            raise TicketRefused(Reason.WRONG_SOURCE)
        if ticket.source_epoch != self._identity.epoch:
            raise TicketRefused(Reason.WRONG_EPOCH, "source_epoch")
        if ticket.layout_fingerprint != self._layout.fingerprint():
            raise TicketRefused(Reason.WRONG_LAYOUT)
        if ticket.num_blocks != self._layout.blocks_for(ticket.num_tokens):
            raise TicketRefused(Reason.WRONG_RANGE)

    def _put(self, call: Callable[[float], None]) -> None:
        self._inbox.append(call)
        self._transport.wake()

    def _do_open(self, sealed: bytes, ticket: Ticket, endpoints: tuple[str, ...], now: float) -> None:
        key = (ticket.target(), endpoints)
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = self._new_link(ticket.target(), endpoints, now)
        transfer = OutgoingTransfer(ticket, sealed, self._layout.block_bytes(), now)
        live = self._live[ticket.ticket_id] = _Live(transfer, link)
        self._perform(live, transfer.start(now), now)

    def _do_push(
        self, ticket_id: bytes, first_index: int, views: list[memoryview], digests: list[bytes], now: float
    ) -> None:
        live = self._live.get(ticket_id)
        if live is not None and not live.transfer.over():
            live.blocks.update(enumerate(views, first_index))
            self._perform(live, live.transfer.push(first_index, digests, now), now)

    def _do_finish(self, ticket_id: bytes, first_token: int, now: float) -> None:
        live = self._live.get(ticket_id)
        if live is not None and not live.transfer.over():
            self._perform(live, live.transfer.finish(first_token, now), now)

    def _do_cancel(self, ticket_id: bytes, now: float) -> None:
        live = self._live.get(ticket_id)
        if live is not None and not live.transfer.over():
            self._perform(live, live.transfer.cancel(now), now)

    def _new_link(self, target: Identity, endpoints: tuple[str, ...], now: float) -> Link:
        greeting = hello(self._layout.fields(), self._layout.fingerprint(), self._identity, target)
        return Link(
            transport=self._transport,
            source=self._identity,
            target=target,
            hello=greeting,
            endpoints=endpoints,
            connect_s=self._limits.connect_ms / 1000,
            malformed_max=self._limits.malformed_max,
            counters=self._counters,
            now=now,
        )

    def _on_message(self, link: Link, envelope: wire.Envelope, now: float) -> None:
        live = self._live.get(envelope.ticket_id)
        if live is None or live.link is not link:
            self._counters.add("unknown_ticket")
            return
        ticket = live.transfer.ticket
        fences = (envelope.source_epoch, envelope.target_epoch, envelope.attempt)
        if fences != (ticket.source_epoch, ticket.target_epoch, ticket.attempt):
            self._counters.add("fenced")
            return
        try:
            actions = _feed(live.transfer, envelope.message, now)
        except IllegalTransition:
            self._counters.add(f"unexpected_{type(envelope.message).__name__.lower()}")
            return
        self._perform(live, actions, now)

    def _perform(self, live: _Live, actions: Sequence[SourceAction], now: float) -> None:
        ticket = live.transfer.ticket
        for action in actions:
            match action:
                case Send():
                    self._send(live, action)
                case Drop():
                    for _ in range(live.link.drop(ticket.ticket_id)):
                        self._perform(live, live.transfer.read_done(now), now)
                case Cut():
                    live.link.fail(Failure(reason=Reason.PEER_LOST, detail="the target does not read"))
                case Count():
                    self._counters.add(action.name)
                case Emit():
                    self._tell(action.event)

    def _send(self, live: _Live, action: Send) -> None:
        ticket, index = live.transfer.ticket, action.payload_index
        header = wire.encode(
            wire.Envelope(
                source_epoch=ticket.source_epoch,
                target_epoch=ticket.target_epoch,
                attempt=ticket.attempt,
                ticket_id=ticket.ticket_id,
                message=action.message,
            )
        )
        if index is None:
            live.link.send(ticket.ticket_id, header, None, None)
            return
        self._counters.add("blocks_sent")
        live.link.send(ticket.ticket_id, header, live.blocks[index], partial(self._read_done, live))

    def _read_done(self, live: _Live) -> None:
        now = self._clock()
        self._perform(live, live.transfer.read_done(now), now)

    def _tell(self, event: events.SourceEvent) -> None:
        if isinstance(event, events.Closed):
            del self._live[event.ticket_id]
            with self._lock:
                del self._entries[event.ticket_id]
        self._emit(event)

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
            for live in [each for each in self._live.values() if each.link is link]:
                if not live.transfer.over():
                    self._perform(live, live.transfer.lost(link.failure.reason, link.failure.detail, now), now)


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
