"""A worker's sending end: all transfers that leave it, served by one I/O thread.

Owns the thread and the calls waiting for it. The worker calls open, push, finish and cancel from any
thread; they never wait. Results come through `emit`, on the I/O thread. Never computes and never frees a
block: Closed says that nobody reads the pushed memory any more, and freeing is the worker's part."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from engine.cache.layout import KVLayout
from kvtransfer import events
from kvtransfer.counters import Counters
from kvtransfer.digest import block_digest
from kvtransfer.errors import Overloaded, Reason, TicketRefused
from kvtransfer.greeting import BlockShape
from kvtransfer.identity import Identity
from kvtransfer.refusals import Refusals, unheard
from kvtransfer.source_io import SourceIO, SourceLimits
from kvtransfer.ticket import Ticket
from kvtransfer.transport import SourceTransport


@dataclass(slots=True)
class _Entry:
    """What callers may still do with a ticket. Guarded by the endpoint's lock."""

    ticket: Ticket
    next_index: int
    finished: bool = False
    cancelled: bool = False


class TransferSource:
    """Serves from `start` on; without it, whoever calls `turn` serves (a simulation).

    emit: called on the I/O thread, must not wait. Each ticket that open took brings Committed or Failed or,
    after the worker's own cancel or close, neither; and at the end exactly one Closed. At most
    transfers_max * (blocks of a ticket + 3) calls wait for the thread: blocks are pushed once, open, finish
    and cancel taken once. warn: takes one line for the operator, on the I/O thread."""

    def __init__(
        self,
        *,
        identity: Identity,
        layout: KVLayout,
        transport: SourceTransport,
        emit: Callable[[events.SourceEvent], None],
        clock: Callable[[], float],
        limits: SourceLimits | None = None,
        warn: Callable[[str], None] = unheard,
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
        self._closing = False
        self._io = SourceIO(
            identity=identity,
            shape=BlockShape(
                layout=layout.fields(), fingerprint=layout.fingerprint(), block_bytes=layout.block_bytes()
            ),
            transport=transport,
            tell=self._tell,
            clock=clock,
            limits=self._limits,
            counters=self._counters,
            refusals=Refusals(warn),
        )
        self._thread = threading.Thread(
            target=self._serve, name=f"kv-source-{identity.worker_id}", daemon=True
        )

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
        self._put(partial(self._io.open, sealed, ticket, endpoints))

    def push(self, ticket_id: bytes, first_index: int, blocks: Sequence[memoryview]) -> None:
        """Blocks are computed and will not change until Closed. In order, each once, from the ticket's
        first_block.

        Takes their digests here, on the caller's thread: about 17 us per MiB. Ignored once the ticket is
        closed.
        """
        with self._lock:
            entry = self._entries.get(ticket_id)
            if entry is None or entry.cancelled:
                return
            assert first_index == entry.next_index, f"pushed {first_index}, expected {entry.next_index}"
            assert first_index + len(blocks) <= entry.ticket.num_blocks, "more blocks than the ticket has"
            entry.next_index += len(blocks)
        block_bytes = self._layout.block_bytes()
        assert all(block.nbytes == block_bytes and block.c_contiguous for block in blocks), "not whole blocks"
        digests = [block_digest(block) for block in blocks]
        self._put(partial(self._io.push, ticket_id, first_index, list(blocks), digests))

    def finish(self, ticket_id: bytes, num_tokens: int, first_tokens: events.FirstTokens) -> None:
        """All blocks were pushed. first_tokens: sampled after the run, one for each choice that goes on. Ignored once
        the ticket is closed."""
        with self._lock:
            entry = self._entries.get(ticket_id)
            if entry is None or entry.cancelled:
                return
            assert not entry.finished, "finished twice"
            assert entry.next_index == entry.ticket.num_blocks, "finished before all blocks were pushed"
            assert num_tokens == entry.ticket.num_tokens, "another number of tokens than the ticket has"
            entry.finished = True
        self._put(partial(self._io.finish, ticket_id, first_tokens))

    def cancel(self, ticket_id: bytes) -> None:
        """Want no more of it; Closed follows. Idempotent; ignored once the ticket is closed."""
        with self._lock:
            entry = self._entries.get(ticket_id)
            if entry is None or entry.cancelled:
                return
            entry.cancelled = True
        self._put(partial(self._io.cancel, ticket_id))

    def counters(self) -> dict[str, int]:
        """Blocks sent, and what was dropped, by reason."""
        return self._counters.read()

    def close(self) -> None:
        """End everything; returns when Closed was emitted for every open ticket. The one call that waits."""
        with self._lock:
            self._closing = True
        self._transport.wake()
        if self._thread.ident is None:
            self._end(crashed=False)
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def turn(self, timeout_s: float) -> None:
        """One round of the I/O thread: calls, messages, timers. For the thread, or for a simulation."""
        self._transport.wait(timeout_s)
        now = self._clock()
        while self._inbox:
            self._inbox.popleft()(now)
        self._io.turn(now)

    def patience_s(self) -> float:
        """How long the next turn may wait."""
        return self._io.patience_s()

    def _serve(self) -> None:
        crashed = True
        try:
            while not self._closing:
                self.turn(self.patience_s())
            crashed = False
        finally:
            self._end(crashed=crashed)

    def _end(self, *, crashed: bool) -> None:
        """The thread's last act. Whatever happened, every open ticket is told that its memory is free."""
        with self._lock:
            self._closing = True
            left = list(self._entries)
            self._entries.clear()
        self._inbox.clear()
        self._io.close()
        for ticket_id in left:
            if crashed:
                self._emit(events.Failed(ticket_id=ticket_id, reason=Reason.INTERNAL))
            self._emit(events.Closed(ticket_id=ticket_id))

    def _tell(self, event: events.SourceEvent) -> None:
        if isinstance(event, events.Closed):
            with self._lock:
                del self._entries[event.ticket_id]
        self._emit(event)

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
