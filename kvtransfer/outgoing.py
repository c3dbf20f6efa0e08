"""One transfer as its source sees it: a state machine without I/O.

Owns what was pushed, what may be sent within the target's grant, and when nobody reads the blocks any more.
The source endpoint feeds it and does what it returns; time is an argument, in seconds of one monotonic
clock. Never touches a block's bytes and never waits."""

from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum, auto

from kvtransfer import events, wire
from kvtransfer.actions import Cut, Drop, Emit, Send, SourceAction
from kvtransfer.digest import manifest_digest
from kvtransfer.errors import Reason
from kvtransfer.ticket import Ticket
from kvtransfer.transition import next_state

SIGNS_PER_LEASE = 4
"""Signs of life in one lease: a lost one or two must not end a transfer."""


class State(Enum):
    OPENING = auto()
    STREAMING = auto()
    SEALED = auto()
    COMMITTED = auto()
    ENDED = auto()
    CLOSED = auto()


class Event(Enum):
    PUSH = auto()
    FINISH = auto()
    GRANT = auto()
    RESEND = auto()
    SEAL = auto()
    COMMIT = auto()
    REFUSE = auto()
    CANCEL = auto()
    LOSE = auto()
    DRAIN = auto()


TRANSITIONS: Mapping[tuple[State, Event], State] = {
    (State.OPENING, Event.PUSH): State.OPENING,
    (State.OPENING, Event.FINISH): State.OPENING,
    (State.OPENING, Event.GRANT): State.STREAMING,
    (State.OPENING, Event.REFUSE): State.ENDED,
    (State.OPENING, Event.CANCEL): State.ENDED,
    (State.OPENING, Event.LOSE): State.ENDED,
    (State.STREAMING, Event.PUSH): State.STREAMING,
    (State.STREAMING, Event.FINISH): State.STREAMING,
    (State.STREAMING, Event.GRANT): State.STREAMING,
    (State.STREAMING, Event.RESEND): State.STREAMING,
    (State.STREAMING, Event.SEAL): State.SEALED,
    (State.STREAMING, Event.REFUSE): State.ENDED,
    (State.STREAMING, Event.CANCEL): State.ENDED,
    (State.STREAMING, Event.LOSE): State.ENDED,
    (State.SEALED, Event.GRANT): State.SEALED,
    (State.SEALED, Event.RESEND): State.SEALED,
    (State.SEALED, Event.COMMIT): State.COMMITTED,
    (State.SEALED, Event.REFUSE): State.ENDED,
    (State.SEALED, Event.CANCEL): State.ENDED,
    (State.SEALED, Event.LOSE): State.ENDED,
    (State.COMMITTED, Event.DRAIN): State.CLOSED,
    (State.ENDED, Event.DRAIN): State.CLOSED,
}
"""What may happen to an outgoing transfer. SEAL: the manifest goes out. LOSE: the target, the lease or the
link is gone. DRAIN: the last byte was read. Everything else raises IllegalTransition and changes
nothing."""


class OutgoingTransfer:
    """block_bytes: bytes of one block. run_blocks_max: blocks in one message. Every method that may act returns
    its actions, to be done in order."""

    def __init__(
        self, ticket: Ticket, sealed: bytes, block_bytes: int, run_blocks_max: int, now: float
    ) -> None:
        self.ticket = ticket
        self._sealed = sealed
        self._block_bytes = block_bytes
        self._run_blocks_max = run_blocks_max
        self._state = State.OPENING
        self._digests: dict[int, bytes] = {}
        self._unsent: deque[int] = deque()
        self._resent: set[int] = set()
        self._first_token: int | None = None
        self._granted_bytes = 0
        self._sent_bytes = 0
        self._reads = 0
        self._heard = self._said = self._credited = now
        self._ended = now
        self._cut = False

    @property
    def state(self) -> State:
        return self._state

    def over(self) -> bool:
        """Only the last reads, if any, are missing to be closed."""
        return self._state in (State.COMMITTED, State.ENDED, State.CLOSED)

    def start(self, now: float) -> list[SourceAction]:
        """Present the ticket."""
        return [self._say_open(now)]

    def push(self, first_index: int, digests: Sequence[bytes], now: float) -> list[SourceAction]:
        """Blocks first_index, first_index + 1, ... are computed; digests: 16 bytes each."""
        self._advance(Event.PUSH)
        for index, digest in enumerate(digests, first_index):
            assert index in self.ticket.blocks_to_send() and index not in self._digests, index
            self._digests[index] = digest
            self._unsent.append(index)
        return self._pump(now)

    def finish(self, first_token: int, now: float) -> list[SourceAction]:
        """Everything was pushed; first_token is the token after the run."""
        assert len(self._digests) == len(self.ticket.blocks_to_send()), (
            "finished before all blocks were pushed"
        )
        self._advance(Event.FINISH)
        self._first_token = first_token
        return self._pump(now)

    def granted(self, total_bytes: int, now: float) -> list[SourceAction]:
        self._advance(Event.GRANT)
        self._heard = now
        if total_bytes > self._granted_bytes:
            self._granted_bytes = total_bytes
            self._credited = now
        return self._pump(now)

    def resend(self, indices: Sequence[int], now: float) -> list[SourceAction]:
        """Send blocks once more; a second wish for the same block is a repeated message and changes
        nothing."""
        self._advance(Event.RESEND)
        self._heard = now
        for index in indices:
            if index in self._digests and index not in self._resent and index not in self._unsent:
                self._resent.add(index)
                self._unsent.append(index)
        return self._pump(now)

    def committed(self, now: float) -> list[SourceAction]:
        self._advance(Event.COMMIT)
        return self._end(now, Emit(event=events.Committed(ticket_id=self.ticket.ticket_id)))

    def refused(self, reason: Reason, detail: str, now: float) -> list[SourceAction]:
        """The target said no."""
        self._advance(Event.REFUSE)
        return self._end(now, self._failed(reason, detail))

    def lost(self, reason: Reason, detail: str, now: float) -> list[SourceAction]:
        """The target cannot be reached, or no longer."""
        self._advance(Event.LOSE)
        return self._end(now, self._failed(reason, detail))

    def cancel(self, now: float) -> list[SourceAction]:
        """The owner wants no more of it."""
        self._advance(Event.CANCEL)
        return self._end(now, Send(message=wire.Abort(reason=Reason.CANCELLED)))

    def read_done(self, now: float) -> list[SourceAction]:
        """The payloads of one message that was handed out are no longer being read."""
        assert self._reads > 0, "a read ended that never began"
        self._reads -= 1
        return self._drain() if self.over() else []

    def tick(self, now: float) -> list[SourceAction]:
        """Time passed: expire, or repeat the last word as a sign of life."""
        lease = self.ticket.lease_s()
        if self.over():
            if self._reads and not self._cut and now - self._ended >= lease:
                self._cut = True
                return [Cut()]
            return []
        if now - self._heard >= lease:
            return self._give_up(Reason.LEASE_OVER, "nothing heard from the target", now)
        if self._unsent and self._granted_bytes and now - self._credited >= lease:
            return self._give_up(Reason.STALLED, "the target grants nothing more", now)
        if now - self._said >= lease / SIGNS_PER_LEASE:
            return [self._say_manifest(now) if self._state is State.SEALED else self._say_open(now)]
        return []

    def _advance(self, event: Event) -> None:
        self._state = next_state(TRANSITIONS, self._state, event)

    def _pump(self, now: float) -> list[SourceAction]:
        sends: list[SourceAction] = []
        while run := self._next_run():
            self._reads += 1
            self._credited = now
            digests = b"".join([self._digests[index] for index in run])
            message = wire.BlockRun(first_index=run.start, digests=digests)
            sends.append(Send(message=message, payload_indices=run))
        if self._state is State.STREAMING and self._first_token is not None and not self._unsent:
            self._advance(Event.SEAL)
            sends.append(self._say_manifest(now))
        return sends

    def _next_run(self) -> range:
        """Unsent blocks that follow each other and for which there is credit."""
        first = self._unsent[0] if self._unsent else 0
        run = range(first, first)
        while (
            self._unsent
            and self._unsent[0] == run.stop
            and len(run) < self._run_blocks_max
            and self._sent_bytes + self._block_bytes <= self._granted_bytes
        ):
            self._unsent.popleft()
            self._sent_bytes += self._block_bytes
            run = range(first, run.stop + 1)
        return run

    def _say_open(self, now: float) -> Send:
        self._said = now
        return Send(message=wire.Open(sealed=self._sealed))

    def _say_manifest(self, now: float) -> Send:
        assert self._first_token is not None
        self._said = now
        ordered = (self._digests[index] for index in self.ticket.blocks_to_send())
        digest = manifest_digest(self.ticket, self._first_token, ordered)
        return Send(
            message=wire.Manifest(
                num_tokens=self.ticket.num_tokens, digest=digest, first_token=self._first_token
            )
        )

    def _give_up(self, reason: Reason, detail: str, now: float) -> list[SourceAction]:
        self._advance(Event.LOSE)
        return self._end(now, Send(message=wire.Abort(reason=reason)), self._failed(reason, detail))

    def _failed(self, reason: Reason, detail: str) -> Emit[events.SourceEvent]:
        return Emit(event=events.Failed(ticket_id=self.ticket.ticket_id, reason=reason, detail=detail))

    def _end(self, now: float, *last_words: SourceAction) -> list[SourceAction]:
        self._ended = now
        self._unsent.clear()
        return [*last_words, Drop(), *self._drain()]

    def _drain(self) -> list[SourceAction]:
        if self._reads:
            return []
        self._advance(Event.DRAIN)
        return [Emit(event=events.Closed(ticket_id=self.ticket.ticket_id))]
