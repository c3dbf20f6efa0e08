"""A worker's receiving end: all transfers that come to it, served by one I/O thread.

Owns the thread and the calls waiting for it. The worker calls expect, bind, commit and withdraw from any
thread; they never wait. Results come through `emit`, on the I/O thread. Never reserves, adopts or frees a
block: Closed says that nobody writes into the bound memory any more, and freeing is the worker's part."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from engine.cache.layout import KVLayout
from kvtransfer import events
from kvtransfer.counters import Counters
from kvtransfer.errors import Overloaded, Reason, TicketRefused
from kvtransfer.greeting import BlockShape
from kvtransfer.identity import Identity
from kvtransfer.target_io import TargetIO, TargetLimits
from kvtransfer.ticket import Ticket
from kvtransfer.transport import TargetTransport

ARRIVALS_PER_TURN = 64


@dataclass(slots=True)
class _Entry:
    """What callers may still do with a ticket. Guarded by the endpoint's lock."""

    ticket: Ticket
    opened: bool = False
    bound: bool = False
    received: bool = False
    settled: bool = False


class TransferTarget:
    """Serves from `start` on; without it, whoever calls `turn` serves (a simulation).

    key: opens tickets. emit: called on the I/O thread, must not wait. Each expected ticket brings Opened
    when its source comes, then Received or Failed, and at the end exactly one Closed; after the worker's
    own withdraw or close there is only Closed. At most 4 * transfers_max calls wait for the thread."""

    def __init__(
        self,
        *,
        identity: Identity,
        layout: KVLayout,
        key: bytes,
        transport: TargetTransport,
        emit: Callable[[events.TargetEvent], None],
        clock: Callable[[], float],
        limits: TargetLimits | None = None,
    ) -> None:
        self._identity = identity
        self._layout = layout
        self._transport = transport
        self._emit = emit
        self._clock = clock
        self._limits = limits or TargetLimits()
        self._counters = Counters()
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._inbox: deque[Callable[[float], None]] = deque()
        self._closing = False
        self._io = TargetIO(
            identity=identity,
            shape=BlockShape(
                layout=layout.fields(), fingerprint=layout.fingerprint(), block_bytes=layout.block_bytes()
            ),
            key=key,
            transport=transport,
            tell=self._tell,
            clock=clock,
            limits=self._limits,
            counters=self._counters,
        )
        self._thread = threading.Thread(
            target=self._serve, name=f"kv-target-{identity.worker_id}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def endpoints(self) -> tuple[str, ...]:
        """The bound addresses as a source dials them, best first."""
        return self._transport.endpoints()

    def expect(self, ticket: Ticket) -> None:
        """A reservation exists: from now on, and not before, the ticket can be opened.

        Raises TicketRefused when it is not for this process or layout, or is expected already, and
        Overloaded at transfers_max or after close. Then no event comes.
        """
        self._require_ours(ticket)
        with self._lock:
            if self._closing or len(self._entries) >= self._limits.transfers_max:
                raise Overloaded("no room for another incoming transfer")
            if ticket.ticket_id in self._entries:
                raise TicketRefused(Reason.SPENT, "expected already")
            self._entries[ticket.ticket_id] = _Entry(ticket)
        self._put(partial(self._io.expect, ticket))

    def bind(self, ticket_id: bytes, blocks: Sequence[memoryview]) -> None:
        """Answer to Opened: where blocks first_block .. num_blocks - 1 go, one writable view each. Ignored
        once the ticket is closed."""
        with self._lock:
            entry = self._entries.get(ticket_id)
            if entry is None or entry.settled:
                return
            assert entry.opened and not entry.bound, "bind answers Opened, once"
            assert len(blocks) == len(entry.ticket.blocks_to_send()), "not one place for each block to come"
            block_bytes = self._layout.block_bytes()
            assert all(
                block.nbytes == block_bytes and block.c_contiguous and not block.readonly for block in blocks
            ), "not whole writable blocks"
            entry.bound = True
        self._put(partial(self._io.bind, ticket_id, list(blocks)))

    def commit(self, ticket_id: bytes) -> None:
        """Answer to Received: the sequence is adopted, it is this worker's now. The source is told."""
        with self._lock:
            entry = self._entries.get(ticket_id)
            if entry is None:
                return
            assert entry.received and not entry.settled, "commit answers Received, once"
            entry.settled = True
        self._put(partial(self._io.commit, ticket_id))

    def withdraw(self, ticket_id: bytes, reason: Reason = Reason.WITHDRAWN) -> None:
        """Want no more of it; Closed follows, and the source is told. Idempotent; ignored after commit and
        once the ticket is closed."""
        with self._lock:
            entry = self._entries.get(ticket_id)
            if entry is None or entry.settled:
                return
            entry.settled = True
        self._put(partial(self._io.withdraw, ticket_id, reason))

    def counters(self) -> dict[str, int]:
        """Blocks placed, and what was refused or dropped, by reason."""
        return self._counters.read()

    def close(self) -> None:
        """End everything; returns when Closed was emitted for every expected ticket. The one call that
        waits."""
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
        for _ in range(ARRIVALS_PER_TURN):
            arrival = self._io.receive()
            # Calls before the arrival, and looked for after it: what was expected before a source was told
            # is known when it opens.
            now = self._clock()
            while self._inbox:
                self._inbox.popleft()(now)
            if arrival is None:
                break
            self._io.take(arrival, now)
        self._io.tick(self._clock())

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
        """The thread's last act. Whatever happened, every expected ticket is told that its memory is free."""
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

    def _tell(self, event: events.TargetEvent) -> None:
        with self._lock:
            entry = self._entries[event.ticket_id]
            match event:
                case events.Opened():
                    entry.opened = True
                case events.Received():
                    entry.received = True
                case events.Closed():
                    del self._entries[event.ticket_id]
        self._emit(event)

    def _require_ours(self, ticket: Ticket) -> None:
        if ticket.target_id != self._identity.worker_id:
            raise TicketRefused(Reason.WRONG_TARGET)
        if ticket.target_epoch != self._identity.epoch:
            raise TicketRefused(Reason.WRONG_EPOCH, "target_epoch")
        if ticket.layout_fingerprint != self._layout.fingerprint():
            raise TicketRefused(Reason.WRONG_LAYOUT)
        if ticket.num_blocks != self._layout.blocks_for(ticket.num_tokens):
            raise TicketRefused(Reason.WRONG_RANGE)

    def _put(self, call: Callable[[float], None]) -> None:
        self._inbox.append(call)
        self._transport.wake()
