"""The receiving end of payloads over torch.distributed, while all else goes over a carrying transport.

Wraps a `TargetTransport`, usually ZeroMQ. Owns one pair per peer that asked for one: its group, its thread
and its staging memory. Receives only into staging, and only a block that the peer has announced, of exactly
the size of a block here. What a peer sends arrives in the order it was sent: messages wait behind announced
blocks. On any error the pair is destroyed and its peer is gone; staging that it may still write into is never
used again."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from kvtransfer import dist_endpoint, dist_signals
from kvtransfer.dist_group import TARGET_RANK, join
from kvtransfer.dist_lane import Join, Lane, Moved, Note, Over, Said, Up
from kvtransfer.dist_transport import LET_GO_S, DistOptions
from kvtransfer.errors import WireError
from kvtransfer.transport import Arrival, Delivery, PeerGone, TargetTransport
from kvtransfer.wire import run_blocks_max

HELD_MAX = 1024
"""Messages of one peer that wait behind its announced blocks; one with more is cut off."""

SIGNALS_PER_RECEIVE = 64
"""However many a peer sends, a call of `receive` returns."""


@dataclass(slots=True)
class _Held:
    """A message that waits for its turn. number: of its first payload. missing: payloads that are not here yet.
    staging: where they go."""

    arrival: Arrival
    number: int = 0
    missing: int = 0
    staging: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Pair:
    """announced: payloads so far. fed: held messages whose payloads are under way, oldest first. staged:
    staging that is under way or not yet taken."""

    peer: bytes
    lane: Lane
    announced: int = 0
    held: deque[_Held] = field(default_factory=deque)
    unfed: deque[_Held] = field(default_factory=deque)
    fed: deque[_Held] = field(default_factory=deque)
    staged: int = 0


_Out: TypeAlias = tuple[_Pair | None, _Held | PeerGone]


class DistTargetTransport:
    """See `transport.TargetTransport`. Offers every backend over every tcp and ipc endpoint of the carrier,
    then the carrier's own. make_group: how the two ends meet."""

    def __init__(self, options: DistOptions, carrier: TargetTransport, *, make_group: Join = join) -> None:
        self._options = options
        self._carrier = carrier
        self._make_group = make_group
        self._notes: deque[tuple[_Pair, Note]] = deque()
        self._pairs: dict[bytes, _Pair] = {}
        self._lanes: set[Lane] = set()
        self._out: deque[_Out] = deque()
        self._free: list[torch.Tensor] = []
        self._lent: tuple[_Pair, list[torch.Tensor]] | None = None

    def endpoints(self) -> tuple[str, ...]:
        carriers = self._carrier.endpoints()
        return (*dist_endpoint.offered(self._options.backends, carriers), *carriers)

    def receive(self) -> Arrival | PeerGone | None:
        self._take_back()
        while self._notes:
            self._heed(*self._notes.popleft())
        for _ in range(SIGNALS_PER_RECEIVE):
            if self._out:
                return self._hand_out(*self._out.popleft())
            arrival = self._carrier.receive()
            match arrival:
                case None:
                    return None
                case PeerGone():
                    self._end(arrival.peer)
                    return arrival
                case Arrival():
                    self._sort(arrival)
        return None

    def send(self, peer: bytes, header: bytes) -> Delivery:
        return self._carrier.send(peer, header)

    def wait(self, timeout_s: float) -> None:
        self._carrier.wait(0.0 if self._out or self._notes else timeout_s)

    def wake(self) -> None:
        self._carrier.wake()

    def close(self) -> None:
        for peer in list(self._pairs):
            self._end(peer)
        for lane in self._lanes:
            lane.wait_over(LET_GO_S)
        self._lanes.clear()
        self._notes.clear()
        self._carrier.close()

    def _sort(self, arrival: Arrival) -> None:
        """A signal is heeded; everything else leaves after what its peer sent before."""
        pair = self._pairs.get(arrival.peer)
        if dist_signals.is_signal(arrival.header) and not arrival.payloads:
            try:
                self._on_signal(pair, arrival, dist_signals.decode(arrival.header))
            except WireError:
                # Passed on: it is counted like every message that is none.
                self._out.append((None, _Held(arrival)))
            return
        if pair is None or not pair.held:
            self._out.append((None, _Held(arrival)))
        else:
            # The carrier's memory may be used again by then.
            payloads = tuple(memoryview(bytes(payload)) for payload in arrival.payloads)
            self._hold(pair, _Held(replace(arrival, payloads=payloads)))

    def _on_signal(self, pair: _Pair | None, arrival: Arrival, signal: dist_signals.Signal) -> None:
        match signal:
            case dist_signals.Join():
                self._on_join(pair, arrival.peer, signal)
            case dist_signals.Entry() if pair is not None:
                if not pair.lane.learn(signal.key, signal.value):
                    self._cut(pair)
            case dist_signals.Ready() if pair is not None:
                self._on_ready(pair, arrival, signal)
            case _:
                raise WireError("a signal that nobody waits for")

    def _on_join(self, pair: _Pair | None, peer: bytes, wish: dist_signals.Join) -> None:
        if pair is not None:
            self._cut(pair)
        elif (
            wish.backend not in self._options.backends
            or wish.block_bytes != self._options.block_bytes
            or len(self._lanes) >= self._options.pairs_max
        ):
            self._carrier.send(peer, dist_signals.encode(dist_signals.Leave()))
        else:
            self._pairs[peer] = self._new_pair(peer, wish.backend)

    def _new_pair(self, peer: bytes, backend: str) -> _Pair:
        def note(what: Note) -> None:
            self._notes.append((pair, what))
            self._carrier.wake()

        lane = Lane(backend, TARGET_RANK, self._make_group, self._options.group, note)
        pair = _Pair(peer, lane)
        self._lanes.add(lane)
        lane.start()
        return pair

    def _on_ready(self, pair: _Pair, arrival: Arrival, ready: dist_signals.Ready) -> None:
        block_bytes = self._options.block_bytes
        due = ready.number == pair.announced and ready.count <= run_blocks_max(block_bytes)
        if not due or ready.payload_bytes != block_bytes:
            self._cut(pair)
            return
        pair.announced += ready.count
        held = _Held(replace(arrival, header=ready.header), number=ready.number, missing=ready.count)
        pair.unfed.append(held)
        self._hold(pair, held)
        self._feed(pair)

    def _hold(self, pair: _Pair, held: _Held) -> None:
        pair.held.append(held)
        if len(pair.held) > HELD_MAX:
            self._cut(pair)

    def _feed(self, pair: _Pair) -> None:
        """Let announced payloads come as far as there is staging for them."""
        window = self._options.window_blocks()
        while pair.unfed and (not pair.staged or pair.staged + pair.unfed[0].missing <= window):
            held = pair.unfed.popleft()
            held.staging = [self._new_staging() for _ in range(held.missing)]
            pair.staged += held.missing
            pair.fed.append(held)
            for number, staging in enumerate(held.staging, held.number):
                pair.lane.put(number, staging)

    def _new_staging(self) -> torch.Tensor:
        return self._free.pop() if self._free else torch.empty(self._options.block_bytes, dtype=torch.uint8)

    def _heed(self, pair: _Pair, note: Note) -> None:
        if isinstance(note, Over):
            self._lanes.discard(pair.lane)
        if self._pairs.get(pair.peer) is not pair:
            return
        match note:
            case Said():
                self._say(pair, dist_signals.Entry(key=note.key, value=note.value))
            case Up():
                self._say(pair, dist_signals.Joined())
            case Moved():
                pair.fed[0].missing -= 1
                if not pair.fed[0].missing:
                    pair.fed.popleft()
                    self._out.extend(_released(pair))
            case Over():
                self._cut(pair)

    def _say(self, pair: _Pair, signal: dist_signals.Signal) -> None:
        if self._carrier.send(pair.peer, dist_signals.encode(signal)) is not Delivery.QUEUED:
            self._cut(pair)

    def _hand_out(self, pair: _Pair | None, out: _Held | PeerGone) -> Arrival | PeerGone:
        if isinstance(out, PeerGone):
            return out
        if pair is None or not out.staging:
            return out.arrival
        self._lent = (pair, out.staging)
        return replace(out.arrival, payloads=tuple(staging.numpy().data for staging in out.staging))

    def _take_back(self) -> None:
        """What was handed out last is not read any more."""
        if self._lent is not None:
            pair, staging = self._lent
            self._lent = None
            self._free += staging
            pair.staged -= len(staging)
            self._feed(pair)

    def _cut(self, pair: _Pair) -> None:
        """Give the pair up, and tell both ends' owners. Staging under way is left to the lane."""
        self._carrier.send(pair.peer, dist_signals.encode(dist_signals.Leave()))
        self._end(pair.peer)
        self._out.append((None, PeerGone(peer=pair.peer)))

    def _end(self, peer: bytes) -> None:
        pair = self._pairs.pop(peer, None)
        if pair is not None:
            pair.unfed.clear()
            pair.lane.end()


def _released(pair: _Pair) -> Iterator[_Out]:
    """What nothing holds back any more, in order."""
    while pair.held and not pair.held[0].missing:
        yield pair, pair.held.popleft()
