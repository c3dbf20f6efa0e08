"""A source's connection to one target process: dials the best endpoint that answers, greets, sends in order.

Owns the choice of the endpoint, the greeting, and the messages that have not left yet. Driven by the source
endpoint on its I/O thread; time is an argument. Never looks into a transfer, and never comes back once it
failed: the next transfer gets a new link."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvtransfer import wire
from kvtransfer.counters import Counters
from kvtransfer.errors import Reason, UnknownVersion, WireError
from kvtransfer.greeting import WIRE_VERSION_FIELD
from kvtransfer.identity import Identity
from kvtransfer.refusals import Refusals
from kvtransfer.transport import Connection, LinkStatus, NoKey, SourceTransport


class Phase(Enum):
    DIALLING = auto()
    GREETING = auto()
    READY = auto()
    DEAD = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a link is dead. detail: one line, without addresses."""

    reason: Reason
    detail: str


@dataclass(slots=True)
class _Parcel:
    ticket_id: bytes
    header: bytes
    payloads: Sequence[memoryview]
    on_read: Callable[[], None]


class Link:
    """endpoints: at least one, best first; each is given connect_s to answer the greeting."""

    def __init__(
        self,
        *,
        transport: SourceTransport,
        source: Identity,
        target: Identity,
        hello: wire.Hello,
        endpoints: tuple[str, ...],
        connect_s: float,
        malformed_max: int,
        counters: Counters,
        refusals: Refusals,
        now: float,
    ) -> None:
        assert endpoints, "no endpoint to dial"
        self.source = source
        self.target = target
        self._transport = transport
        self._hello = hello
        self._untried = deque(endpoints)
        self._connect_s = connect_s
        self._malformed_left = malformed_max
        self._counters = counters
        self._refusals = refusals
        self._endpoint = ""
        self._outbox: deque[_Parcel] = deque()
        self._phase = Phase.DIALLING
        self._connection: Connection | None = None
        self._failure = Failure(reason=Reason.UNREACHABLE, detail="no endpoint answers")
        self._deadline = now
        self._dial_next(now)

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def way(self) -> str:
        """How the endpoint that was dialled last is reached: the scheme of its address."""
        return self._endpoint.partition("://")[0]

    @property
    def failure(self) -> Failure:
        """Why the link is dead."""
        assert self._phase is Phase.DEAD
        return self._failure

    def send(
        self,
        ticket_id: bytes,
        header: bytes,
        payloads: Sequence[memoryview],
        on_read: Callable[[], None],
    ) -> None:
        """Queue a message; it leaves with a later `flush`. On a dead link it is dropped, but one with payloads
        stays queued until `drop`, so that every read is accounted for."""
        if self._phase is not Phase.DEAD or payloads:
            self._outbox.append(_Parcel(ticket_id, header, payloads, on_read))

    def drop(self, ticket_id: bytes) -> int:
        """Forget the blocks that this transfer has not sent. Returns how many messages of them."""
        kept = deque(each for each in self._outbox if not each.payloads or each.ticket_id != ticket_id)
        dropped = len(self._outbox) - len(kept)
        self._outbox = kept
        return dropped

    def receive(self, now: float) -> list[wire.Envelope]:
        """Go on dialling and greeting; returns what arrived for transfers."""
        arrived: list[wire.Envelope] = []
        while self._connection is not None and (header := self._connection.receive()) is not None:
            envelope = self._read(header, now)
            if envelope is not None and envelope.ticket_id != wire.NO_TICKET:
                arrived.append(envelope)
            elif envelope is not None:
                self._greeted(envelope, now)
        self._watch(now)
        return arrived

    def flush(self) -> None:
        """Send what the connection takes."""
        if self._phase is not Phase.READY or self._connection is None:
            return
        while self._outbox:
            parcel = self._outbox[0]
            if not self._connection.send(parcel.header, parcel.payloads, parcel.on_read):
                return
            self._outbox.popleft()

    def fail(self, failure: Failure) -> None:
        """Give the connection up. Idempotent."""
        if self._phase is not Phase.DEAD:
            self._phase = Phase.DEAD
            self._failure = failure
            self._hang_up()

    def _dial_next(self, now: float) -> None:
        """Try the next endpoint; without one the link is dead, for the reason of the last try."""
        self._hang_up()
        self._deadline = now + self._connect_s
        while self._untried:
            try:
                self._endpoint = self._untried.popleft()
                self._connection = self._transport.dial(self._endpoint, self.source, self.target)
            except NoKey:
                self._not_trusted("no public key of the target in the key folder")
                continue
            except ValueError:
                self._counters.add("bad_endpoint")
                continue
            self._phase = Phase.DIALLING
            return
        self.fail(self._failure)

    def _watch(self, now: float) -> None:
        if self._connection is None:
            return
        status = self._connection.status()
        if self._phase is Phase.READY:
            if status is LinkStatus.LOST:
                self.fail(Failure(reason=Reason.PEER_LOST, detail="the target's connection is gone"))
            return
        hopeless = status in {LinkStatus.FAILING, LinkStatus.REFUSED} and bool(self._untried)
        if hopeless or status is LinkStatus.LOST or now >= self._deadline:
            if status is LinkStatus.REFUSED:
                self._not_trusted("the handshake was refused: check the keys on both sides")
            self._dial_next(now)
        elif self._phase is Phase.DIALLING and status is LinkStatus.UP:
            self._greet()

    def _greet(self) -> None:
        assert self._connection is not None
        greeting = wire.Envelope(
            source_epoch=self.source.epoch,
            target_epoch=self.target.epoch,
            attempt=0,
            ticket_id=wire.NO_TICKET,
            message=self._hello,
        )
        if self._connection.send(wire.encode(greeting)):
            self._phase = Phase.GREETING

    def _read(self, header: bytes, now: float) -> wire.Envelope | None:
        try:
            return wire.decode(header)
        except UnknownVersion:
            self._refused((WIRE_VERSION_FIELD,), now)
        except WireError:
            self._malformed_left -= 1
        self._counters.add("malformed")
        if self._malformed_left <= 0:
            self.fail(Failure(reason=Reason.PEER_LOST, detail="malformed messages from the target"))
        return None

    def _greeted(self, envelope: wire.Envelope, now: float) -> None:
        message = envelope.message
        if self._phase is not Phase.GREETING:
            self._counters.add("unexpected_greeting")
        elif isinstance(message, wire.HelloRefused):
            self._refused(message.fields, now)
        elif isinstance(message, wire.HelloAccepted):
            found = (message.target_id, envelope.target_epoch)
            if found == (self.target.worker_id, self.target.epoch):
                self._phase = Phase.READY
                self._refusals.succeeded(self._endpoint)
            else:
                self._refused(("target",), now)
        else:
            self._counters.add("unexpected_greeting")

    def _refused(self, fields: tuple[str, ...], now: float) -> None:
        if self._phase is Phase.GREETING:
            self._failure = Failure(reason=Reason.HANDSHAKE_REFUSED, detail=", ".join(fields))
            self._dial_next(now)

    def _not_trusted(self, why: str) -> None:
        self._refusals.refused(self._endpoint, why)
        self._failure = Failure(reason=Reason.HANDSHAKE_REFUSED, detail=why)

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
