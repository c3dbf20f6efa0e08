"""The sending end of payloads over torch.distributed, while all else goes over a carrying transport.

Wraps a `SourceTransport`, usually ZeroMQ, and adds endpoints of the form gloo+tcp://host:port. Owns one pair
per connection, so of one source epoch and one target epoch: its group, its thread, and the payloads that
thread reads. Blocks are announced over the carrier in the order of all messages, and only then sent. On any
error the connection is lost; the next endpoint, or the next transfer, goes on without the pair. Never waits
but in `wait` and `close`, and never makes a group that the target has not agreed to."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvtransfer import dist_endpoint, dist_signals
from kvtransfer.dist_group import SOURCE_RANK, GroupOptions, join, require_backend
from kvtransfer.dist_lane import Join, Lane, Moved, Note, Over, Said, Up
from kvtransfer.errors import WireError
from kvtransfer.identity import Identity
from kvtransfer.transport import Connection, LinkStatus, SourceTransport, unread

LET_GO_S = 15.0
"""More than any group takes to be made or given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistOptions:
    """backends: gloo, nccl or both, best first. block_bytes: of every payload, exactly. window_bytes: of one
    pair, announced and not yet sent at its source, staged and not yet taken at its target, unless one message
    has more; the more, the less a block waits for the round trip before it. pairs_max: groups that a target
    has at once. shun_s: how long an endpoint whose pair failed is not tried again.

    Raises BindRefused for a backend that cannot or may not be used."""

    backends: tuple[str, ...]
    block_bytes: int
    group: GroupOptions = field(default_factory=GroupOptions)
    window_bytes: int = 16 * 1024 * 1024
    pairs_max: int = 64
    shun_s: float = 30.0

    def __post_init__(self) -> None:
        for backend in self.backends:
            require_backend(backend, self.group)

    def window_blocks(self) -> int:
        return max(2, self.window_bytes // self.block_bytes)


class DistSourceTransport:
    """See `transport.SourceTransport`. carrier: takes all endpoints that are not of a pair, too. make_group:
    how the two ends meet."""

    def __init__(
        self,
        options: DistOptions,
        carrier: SourceTransport,
        *,
        make_group: Join = join,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self._carrier = carrier
        self._make_group = make_group
        self._clock = clock
        self._notes: deque[tuple[DistConnection, Note]] = deque()
        self._pairs: set[DistConnection] = set()
        self._shunned: dict[str, float] = {}

    def dial(self, endpoint: str, source: Identity, target: Identity) -> Connection:
        """Raises ValueError for the endpoint of a pair, too, while it is shunned or its backend is not
        wanted here."""
        parts = dist_endpoint.split(endpoint)
        if parts is None:
            return self._carrier.dial(endpoint, source, target)
        backend, carried = parts
        if backend not in self.options.backends:
            raise ValueError("a backend that is not wanted here")
        if self._clock() < self._shunned.get(endpoint, 0.0):
            raise ValueError("a pair that failed a moment ago")
        return DistConnection(self, self._carrier.dial(carried, source, target), backend, endpoint)

    def wait(self, timeout_s: float) -> None:
        self._carrier.wait(timeout_s)
        while self._notes:
            connection, note = self._notes.popleft()
            connection.heed(note)

    def wake(self) -> None:
        self._carrier.wake()

    def close(self) -> None:
        for connection in list(self._pairs):
            connection.close()
        for connection in self._pairs:
            connection.wait_over(LET_GO_S)
        self._pairs.clear()
        self._notes.clear()
        self._carrier.close()

    def new_lane(self, connection: "DistConnection", backend: str) -> Lane:
        """For connections: a started lane, whose notes come with a later wait."""

        def note(what: Note) -> None:
            self._notes.append((connection, what))
            self._carrier.wake()

        lane = Lane(backend, SOURCE_RANK, self._make_group, self.options.group, note)
        self._pairs.add(connection)
        lane.start()
        return lane

    def over(self, connection: "DistConnection") -> None:
        """For connections: their lane is no more."""
        self._pairs.discard(connection)

    def shun(self, endpoint: str) -> None:
        """For connections: their pair failed."""
        now = self._clock()
        self._shunned = {each: until for each, until in self._shunned.items() if until > now}
        self._shunned[endpoint] = now + self.options.shun_s


class DistConnection:
    """See `transport.Connection`. Dialling until the carrier's connection is up and both ends are in the
    group."""

    def __init__(self, owner: DistSourceTransport, carrier: Connection, backend: str, endpoint: str) -> None:
        self._owner = owner
        self._carrier = carrier
        self._backend = backend
        self._endpoint = endpoint
        self._lane: Lane | None = None
        self._signals: deque[bytes] = deque()
        self._reads: deque[Callable[[], None]] = deque()
        self._sent = 0
        self._here = self._there = False
        self._status = LinkStatus.DIALLING

    def status(self) -> LinkStatus:
        if self._status is LinkStatus.LOST:
            return self._status
        carried = self._carrier.status()
        if carried is not LinkStatus.UP:
            self._status = carried
            return carried
        if self._lane is None:
            block_bytes = self._owner.options.block_bytes
            self._say(dist_signals.Join(backend=self._backend, block_bytes=block_bytes))
            self._lane = self._owner.new_lane(self, self._backend)
        self._flush()
        self._status = LinkStatus.UP if self._here and self._there else LinkStatus.DIALLING
        return self._status

    def send(
        self, header: bytes, payloads: Sequence[memoryview] = (), on_read: Callable[[], None] = unread
    ) -> bool:
        if self._status is not LinkStatus.UP or not self._flush():
            return False
        if not payloads:
            return self._carrier.send(header)
        options, count = self._owner.options, len(payloads)
        assert self._lane is not None
        assert all(each.nbytes == options.block_bytes for each in payloads), "a payload of another size"
        if self._reads and len(self._reads) + count > options.window_blocks():
            return False
        ready = dist_signals.Ready(
            number=self._sent, count=count, payload_bytes=options.block_bytes, header=header
        )
        if not self._carrier.send(dist_signals.encode(ready)):
            return False
        for number, payload in enumerate(payloads, self._sent):
            self._lane.put(number, torch.from_numpy(np.frombuffer(payload, np.uint8)))
        self._sent += count
        # They move in order: nothing is read any more when the last one has.
        self._reads.extend([unread] * (count - 1) + [on_read])
        return True

    def receive(self) -> bytes | None:
        while (header := self._carrier.receive()) is not None:
            if not dist_signals.is_signal(header):
                return header
            try:
                self._on_signal(dist_signals.decode(header))
            except WireError:
                return header
        return None

    def close(self) -> None:
        if self._lane is not None and not (self._here and self._there):
            # Nobody waits any longer for this pair: the other end or the network does not take part.
            self._shun()
        self._give_up()
        self._carrier.close()

    def heed(self, note: Note) -> None:
        """For the transport: what the lane says, on the transport's thread."""
        match note:
            case Said():
                self._say(dist_signals.Entry(key=note.key, value=note.value))
            case Up():
                self._here = True
            case Moved():
                self._reads.popleft()()
            case Over():
                self._on_over(note)

    def wait_over(self, timeout_s: float) -> None:
        """For the transport: until the lane reads nothing any more."""
        if self._lane is not None:
            self._lane.wait_over(timeout_s)

    def _on_signal(self, signal: dist_signals.Signal) -> None:
        match signal:
            case dist_signals.Entry() if self._lane is not None:
                if not self._lane.learn(signal.key, signal.value):
                    self._fail()
            case dist_signals.Joined():
                self._there = True
            case dist_signals.Leave():
                self._fail()
            case _:
                raise WireError("a signal that goes to the target")

    def _on_over(self, over: Over) -> None:
        if over.broken:
            self._fail()
        self._owner.over(self)
        while self._reads:
            self._reads.popleft()()

    def _fail(self) -> None:
        self._shun()
        self._give_up()

    def _shun(self) -> None:
        if self._status is not LinkStatus.LOST and self._carrier.status() is LinkStatus.UP:
            self._owner.shun(self._endpoint)

    def _give_up(self) -> None:
        self._status = LinkStatus.LOST
        if self._lane is not None:
            self._lane.end()

    def _say(self, signal: dist_signals.Signal) -> None:
        self._signals.append(dist_signals.encode(signal))

    def _flush(self) -> bool:
        while self._signals and self._carrier.send(self._signals[0]):
            self._signals.popleft()
        return not self._signals
