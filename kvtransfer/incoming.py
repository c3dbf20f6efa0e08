"""One transfer as its target sees it: a state machine without I/O.

Owns which blocks are verified, how much the source may send, and when nobody writes into the bound blocks
any more. The target endpoint feeds it and does what it returns; time is an argument, in seconds of one
monotonic clock. Never touches a byte itself. A block is verified where it lies, after the last write into it:
whoever sends may be able to change what was sent while it is copied."""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto

from kvtransfer import events, wire
from kvtransfer.actions import Count, Emit, Place, Send, TargetAction
from kvtransfer.digest import manifest_digest, split
from kvtransfer.errors import Reason
from kvtransfer.ticket import Ticket
from kvtransfer.transition import next_state

LEASES_TO_OPEN = 4
"""The source opens when it takes the attempt up; that may be a few leases after the target had room for it."""
GRANTS_PER_WINDOW = 4
"""A grant is announced when a quarter of the window is new, when it is the last, or with the next tick."""


class State(Enum):
    EXPECTED = auto()
    OPENED = auto()
    FILLING = auto()
    VERIFIED = auto()
    COMMITTED = auto()
    ENDED = auto()


class Event(Enum):
    OPEN = auto()
    BIND = auto()
    BLOCKS = auto()
    PLACED = auto()
    MANIFEST = auto()
    VERIFY = auto()
    COMMIT = auto()
    WITHDRAW = auto()
    ABORT = auto()
    LOSE = auto()
    REFUSE = auto()


TRANSITIONS: Mapping[tuple[State, Event], State] = {
    (State.EXPECTED, Event.OPEN): State.OPENED,
    (State.EXPECTED, Event.WITHDRAW): State.ENDED,
    (State.EXPECTED, Event.REFUSE): State.ENDED,
    (State.OPENED, Event.OPEN): State.OPENED,
    (State.OPENED, Event.MANIFEST): State.OPENED,
    (State.OPENED, Event.BIND): State.FILLING,
    (State.OPENED, Event.WITHDRAW): State.ENDED,
    (State.OPENED, Event.ABORT): State.ENDED,
    (State.OPENED, Event.LOSE): State.ENDED,
    (State.OPENED, Event.REFUSE): State.ENDED,
    (State.FILLING, Event.OPEN): State.FILLING,
    (State.FILLING, Event.BLOCKS): State.FILLING,
    (State.FILLING, Event.PLACED): State.FILLING,
    (State.FILLING, Event.MANIFEST): State.FILLING,
    (State.FILLING, Event.VERIFY): State.VERIFIED,
    (State.FILLING, Event.WITHDRAW): State.ENDED,
    (State.FILLING, Event.ABORT): State.ENDED,
    (State.FILLING, Event.LOSE): State.ENDED,
    (State.FILLING, Event.REFUSE): State.ENDED,
    (State.VERIFIED, Event.OPEN): State.VERIFIED,
    (State.VERIFIED, Event.BLOCKS): State.VERIFIED,
    (State.VERIFIED, Event.MANIFEST): State.VERIFIED,
    (State.VERIFIED, Event.ABORT): State.VERIFIED,
    (State.VERIFIED, Event.LOSE): State.VERIFIED,
    (State.VERIFIED, Event.COMMIT): State.COMMITTED,
    (State.VERIFIED, Event.WITHDRAW): State.ENDED,
}
"""What may happen to an incoming transfer; everything else raises IllegalTransition and changes nothing.

VERIFIED outlives the source: all is here, so the owner's commit or withdrawal alone decides. LOSE: the
source is gone. REFUSE: what came, or did not come, is not acceptable."""


class IncomingTransfer:
    """block_bytes: bytes of one block. window_bytes: block bytes that may be on their way at once, at least
    one block. Every method that may act returns its actions, to be done in order."""

    def __init__(self, ticket: Ticket, block_bytes: int, window_bytes: int, now: float) -> None:
        self.ticket = ticket
        self._indices = ticket.blocks_to_send()
        self._block_bytes = block_bytes
        self._window_bytes = max(window_bytes, block_bytes)
        self._state = State.EXPECTED
        self._peer: bytes | None = None
        self._digests: dict[int, bytes] = {}
        self._asked_again: set[int] = set()
        self._manifest: wire.Manifest | None = None
        self._announced_bytes = 0
        self._last_word: wire.Committed | wire.Refused = wire.Refused(reason=Reason.SPENT)
        self._heard = self._progressed = now

    @property
    def state(self) -> State:
        return self._state

    @property
    def peer(self) -> bytes | None:
        """Transport's name of the connection that opened, None before."""
        return self._peer

    def over(self) -> bool:
        return self._state in (State.COMMITTED, State.ENDED)

    def opened(self, peer: bytes, now: float) -> list[TargetAction]:
        """A valid ticket was presented, for the first time or again. The caller has checked the ticket."""
        assert self._peer in (None, peer), "opened by a second connection"
        first = self._peer is None
        self._advance(Event.OPEN)
        self._peer, self._heard = peer, now
        actions: list[TargetAction] = [self._grant()]
        if first:
            actions.append(Emit(event=events.Opened(ticket_id=self.ticket.ticket_id)))
        return actions

    def bind(self, now: float) -> list[TargetAction]:
        """There is a place for every block now."""
        self._advance(Event.BIND)
        return [self._grant(), *self._settle(now)]

    def blocks(self, run: wire.BlockRun, payloads: Sequence[memoryview], now: float) -> list[TargetAction]:
        """Blocks, one payload each: to be placed; those that do not fit are counted and have no effect."""
        self._advance(Event.BLOCKS)
        self._heard = now
        refused: list[TargetAction] = []
        fitting: list[tuple[int, bytes, memoryview]] = []
        for index, (digest, payload) in enumerate(
            zip(split(run.digests), payloads, strict=True), run.first_index
        ):
            if index not in self._indices:
                refused.append(Count(name="index_out_of_range"))
            elif payload.nbytes != self._block_bytes:
                refused.append(Count(name="wrong_size"))
            elif index in self._digests:
                refused.append(Count(name="duplicate_block"))
            else:
                fitting.append((index, digest, payload))
        if not fitting:
            return refused
        indices, digests, placing = zip(*fitting, strict=True)
        return [*refused, Place(indices=indices, digests=digests, payloads=placing)]

    def placed(self, place: Place, digests: Sequence[bytes], now: float) -> list[TargetAction]:
        """The blocks were written. digests: of the bytes as they lie in their places, where no other end can
        change them. From now on they are verified and never written again, or damaged and asked for again."""
        self._advance(Event.PLACED)
        damaged: list[int] = []
        for index, said, digest in zip(place.indices, place.digests, digests, strict=True):
            assert index not in self._digests, "a verified block was overwritten"
            if digest != said:
                damaged.append(index)
                continue
            self._digests[index] = digest
            self._progressed = now
        verified = len(place.indices) - len(damaged)
        actions: list[TargetAction] = [Count(name="blocks_placed", count=verified)] if verified else []
        if damaged:
            return [*actions, Count(name="damaged_block", count=len(damaged)), *self._damaged(damaged)]
        grants = [self._grant()] if self._grant_is_due() else []
        return [*actions, *grants, *self._settle(now)]

    def manifest(self, manifest: wire.Manifest, now: float) -> list[TargetAction]:
        """The source has sent everything, says so for the first time or again."""
        self._advance(Event.MANIFEST)
        self._heard = now
        if self._manifest is None:
            self._manifest, self._progressed = manifest, now
            if manifest.num_tokens != self.ticket.num_tokens:
                return self._refuse(Reason.MANIFEST_DIFFERS, "num_tokens")
        elif manifest != self._manifest:
            return [Count(name="manifest_changed")]
        if self._state is State.FILLING:
            return self._settle(now) or self._ask_again(self._missing())
        return [self._grant()]

    def commit(self, now: float) -> list[TargetAction]:
        """The owner has adopted the sequence."""
        self._advance(Event.COMMIT)
        self._last_word = wire.Committed()
        return [Send(message=self._last_word), self._closed()]

    def withdraw(self, reason: Reason, now: float) -> list[TargetAction]:
        """The owner wants no more of it."""
        self._advance(Event.WITHDRAW)
        self._last_word = wire.Refused(reason=reason)
        return [*self._farewell(), self._closed()]

    def aborted(self, reason: Reason, now: float) -> list[TargetAction]:
        """The source gave up. Too late, once everything is verified."""
        self._advance(Event.ABORT)
        return self._failed(reason, "the source gave up") if self.over() else []

    def lost(self, now: float) -> list[TargetAction]:
        """The source's connection is gone. Without effect once everything is verified."""
        self._advance(Event.LOSE)
        return self._failed(Reason.PEER_LOST, "the source's connection is gone") if self.over() else []

    def tick(self, now: float) -> list[TargetAction]:
        """Time passed: expire, or announce what was granted meanwhile."""
        if self._state is State.EXPECTED and now - self._heard >= LEASES_TO_OPEN * self.ticket.lease_s():
            return self._refuse(Reason.LEASE_OVER, "no source came")
        if self._state not in (State.OPENED, State.FILLING):
            return []
        if now - self._heard >= self.ticket.lease_s():
            return self._refuse(Reason.LEASE_OVER, "nothing heard from the source")
        if self._state is not State.FILLING:
            return []
        if self._manifest is not None and now - self._progressed >= self.ticket.lease_s():
            return self._refuse(Reason.INCOMPLETE, "blocks are missing")
        return [self._grant()] if self._allowed_bytes() > self._announced_bytes else []

    def answer(self) -> wire.Committed | wire.Refused:
        """What to tell a source that asks again after the end."""
        assert self.over()
        return self._last_word

    def _advance(self, event: Event) -> None:
        self._state = next_state(TRANSITIONS, self._state, event)

    def _allowed_bytes(self) -> int:
        """All that may have been sent: what was taken in, a window more, and one more time what is asked
        again."""
        if self._state in (State.EXPECTED, State.OPENED):
            return 0
        blocks = len(self._indices) * self._block_bytes
        first_time = min(blocks, len(self._digests) * self._block_bytes + self._window_bytes)
        return max(first_time + len(self._asked_again) * self._block_bytes, self._announced_bytes)

    def _grant_is_due(self) -> bool:
        fresh_bytes = self._allowed_bytes() - self._announced_bytes
        missing = len(self._indices) - len(self._digests)
        # The last grant is seldom a whole quarter; a source that has to wait for a tick stands still.
        last = missing * self._block_bytes <= self._window_bytes
        return fresh_bytes * GRANTS_PER_WINDOW >= self._window_bytes or (last and fresh_bytes > 0)

    def _grant(self) -> Send:
        self._announced_bytes = self._allowed_bytes()
        return Send(message=wire.Grant(total_bytes=self._announced_bytes))

    def _damaged(self, indices: Sequence[int]) -> list[TargetAction]:
        if not self._asked_again.isdisjoint(indices):
            return self._refuse(Reason.DAMAGED, "a block came damaged twice")
        return self._ask_again(indices)

    def _missing(self) -> list[int]:
        missing = (index for index in self._indices if index not in self._digests)
        return [index for index, _ in zip(missing, range(wire.RESEND_INDICES_MAX), strict=False)]

    def _ask_again(self, indices: Iterable[int]) -> list[TargetAction]:
        wanted = tuple(indices)
        self._asked_again.update(wanted)
        return [self._grant(), Send(message=wire.Resend(indices=wanted))]

    def _settle(self, now: float) -> list[TargetAction]:
        """Compare with the manifest, once it and all blocks are here."""
        if self._manifest is None or len(self._digests) < len(self._indices):
            return []
        first_token = self._manifest.first_token
        ours = manifest_digest(self.ticket, first_token, (self._digests[index] for index in self._indices))
        if ours != self._manifest.digest:
            return self._refuse(Reason.MANIFEST_DIFFERS, "digest")
        self._advance(Event.VERIFY)
        received = events.Received(
            ticket_id=self.ticket.ticket_id, num_tokens=self.ticket.num_tokens, first_token=first_token
        )
        return [Emit(event=received)]

    def _refuse(self, reason: Reason, detail: str) -> list[TargetAction]:
        self._advance(Event.REFUSE)
        self._last_word = wire.Refused(reason=reason, detail=detail)
        return [*self._farewell(), *self._failed(reason, detail)]

    def _farewell(self) -> list[TargetAction]:
        return [] if self._peer is None else [Send(message=self._last_word)]

    def _failed(self, reason: Reason, detail: str) -> list[TargetAction]:
        failed = events.Failed(ticket_id=self.ticket.ticket_id, reason=reason, detail=detail)
        return [Emit(event=failed), self._closed()]

    def _closed(self) -> Emit[events.TargetEvent]:
        return Emit(event=events.Closed(ticket_id=self.ticket.ticket_id))
