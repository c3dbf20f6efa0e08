"""Several transports as one: each endpoint is dialled, and each peer answered, by the one it belongs to.

All of them share one Watch, so that one wait serves them all. Never looks into a message.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvtransfer.identity import Identity
from kvtransfer.transport import (
    Arrival,
    Connection,
    Delivery,
    PeerGone,
    SourceTransport,
    TargetTransport,
)
from kvtransfer.watch import Watch


class Way(Protocol):
    """What a transport needs to be one of several."""

    def patience_s(self) -> float:
        """How long the next wait may be."""
        ...

    def settle(self) -> None:
        """The shared wait is over: what the transport's own `wait` does then."""
        ...


class SourceWay(Way, SourceTransport, Protocol): ...


class TargetWay(Way, TargetTransport, Protocol): ...


class JoinedSource:
    """See `transport.SourceTransport`. ways: by the scheme of the endpoints they dial."""

    def __init__(self, watch: Watch, ways: Mapping[str, SourceWay]) -> None:
        self._watch = watch
        self._by_scheme = ways
        self._ways = tuple(dict.fromkeys(ways.values()))

    def dial(self, endpoint: str, source: Identity, target: Identity) -> Connection:
        way = self._by_scheme.get(endpoint.partition("://")[0])
        if way is None:
            raise ValueError("no such kind of endpoint")
        return way.dial(endpoint, source, target)

    def wait(self, timeout_s: float) -> None:
        _wait(self._watch, self._ways, timeout_s)

    def wake(self) -> None:
        self._watch.ring()

    def close(self) -> None:
        for way in self._ways:
            way.close()
        self._watch.close()


class JoinedTarget:
    """See `transport.TargetTransport`. ways: best first, at most 256."""

    def __init__(self, watch: Watch, ways: Sequence[TargetWay]) -> None:
        self._watch = watch
        self._ways = tuple(ways)
        self._turns = deque(range(len(ways)))

    def endpoints(self) -> tuple[str, ...]:
        return tuple(endpoint for way in self._ways for endpoint in way.endpoints())

    def receive(self) -> Arrival | PeerGone | None:
        for _ in self._ways:
            number = self._turns[0]
            # Who was served goes to the end, so that a busy way does not starve the others.
            self._turns.rotate(-1)
            arrival = self._ways[number].receive()
            if arrival is not None:
                # Peers name themselves: those of two ways may have the same name.
                return _renamed(arrival, bytes((number,)) + arrival.peer)
        return None

    def send(self, peer: bytes, header: bytes) -> Delivery:
        return self._ways[peer[0]].send(peer[1:], header)

    def wait(self, timeout_s: float) -> None:
        _wait(self._watch, self._ways, timeout_s)

    def wake(self) -> None:
        self._watch.ring()

    def close(self) -> None:
        for way in self._ways:
            way.close()
        self._watch.close()


def _wait(watch: Watch, ways: Sequence[Way], timeout_s: float) -> None:
    watch.wait(min((timeout_s, *(way.patience_s() for way in ways))))
    for way in ways:
        way.settle()


def _renamed(arrival: Arrival | PeerGone, peer: bytes) -> Arrival | PeerGone:
    """As dataclasses.replace, in a third of the time: each block comes by here."""
    if isinstance(arrival, PeerGone):
        return PeerGone(peer=peer)
    return Arrival(peer=peer, header=arrival.header, payloads=arrival.payloads, proven=arrival.proven)
