"""A transport inside one process, with a script for what goes wrong on the way. For tests and simulation.

Deterministic: what arrives, and in which order, follows from the order of calls and the script alone. Like
a zero-copy transport it reads a payload only when it is delivered, so that a block freed too early shows as
wrong bytes."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import TypeAlias

from kvtransfer.identity import Identity
from kvtransfer.transport import Arrival, Delivery, LinkStatus, PeerGone, unread


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """One message under way. number: from 0, over the whole network. delay: how many later messages of the
    same direction may overtake it."""

    number: int
    to_target: bool
    header: bytes
    payloads: tuple[memoryview, ...]
    delay: int = 0


Script: TypeAlias = Callable[[Packet], Sequence[Packet]]
"""What becomes of a sent message: () drops it, two packets duplicate it, a replaced one is damaged or
late."""


def deliver(packet: Packet) -> Sequence[Packet]:
    """The script of a perfect network."""
    return (packet,)


class MemoryNetwork:
    """Connects sources and targets of this process. capacity_packets: queued per connection and direction."""

    def __init__(self, script: Script = deliver, capacity_packets: int = 64) -> None:
        self.script = script
        self.capacity_packets = capacity_packets
        self.lock = threading.RLock()
        self.targets: dict[str, MemoryTarget] = {}
        self.numbers = count()
        self.names = count()

    def listen(self, *endpoints: str) -> "MemoryTarget":
        with self.lock:
            target = MemoryTarget(self, endpoints)
            self.targets.update(dict.fromkeys(endpoints, target))
            return target

    def source(self) -> "MemorySource":
        return MemorySource(self)

    def cut(self) -> None:
        """Break every connection, for both ends."""
        with self.lock:
            for target in set(self.targets.values()):
                for connection in list(target.connections.values()):
                    connection.break_off()


class _Queue:
    """One direction of a connection: packets by the number they arrive at."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Packet, Callable[[], None]]] = []
        self._tie = count()

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, packet: Packet, delivered: Callable[[], None]) -> None:
        # Half a step later than the last packet that may overtake it.
        at = packet.number + (packet.delay + 0.5 if packet.delay else 0)
        heappush(self._heap, (at, next(self._tie), packet, delivered))

    def take(self) -> tuple[Packet, Callable[[], None]] | None:
        if not self._heap:
            return None
        _, _, packet, delivered = heappop(self._heap)
        return packet, delivered


class MemoryConnection:
    """See `transport.Connection`."""

    def __init__(self, source: "MemorySource", target: "MemoryTarget | None", name: bytes) -> None:
        self.name = name
        self.source = source
        self._target = target
        self._network = source.network
        self._status = LinkStatus.UP if target else LinkStatus.FAILING
        self.to_target = _Queue()
        self.to_source = _Queue()

    def status(self) -> LinkStatus:
        return self._status

    def send(
        self, header: bytes, payloads: Sequence[memoryview] = (), on_read: Callable[[], None] = unread
    ) -> bool:
        with self._network.lock:
            if self._status is not LinkStatus.UP or len(self.to_target) >= self._network.capacity_packets:
                return False
            assert self._target is not None
            reading = _Reading(self.source, on_read if payloads else None)
            _scripted(self._network, self.to_target, True, header, tuple(payloads), reading)
            self._target.rouse(self)
            return True

    def receive(self) -> bytes | None:
        with self._network.lock:
            taken = self.to_source.take()
            return None if taken is None else taken[0].header

    def close(self) -> None:
        with self._network.lock:
            self.break_off()

    def break_off(self) -> None:
        """For the network: lost for both ends; what is queued is dropped."""
        if self._status is LinkStatus.LOST:
            return
        self._status = LinkStatus.LOST
        while (taken := self.to_target.take()) is not None:
            taken[1]()
        if self._target is not None:
            self._target.forget(self)
        self.source.wake()


class MemorySource:
    """See `transport.SourceTransport`."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self._connections: list[MemoryConnection] = []
        self._read: deque[Callable[[], None]] = deque()
        self._awake = threading.Event()

    def dial(self, endpoint: str, source: Identity, target: Identity) -> MemoryConnection:
        with self.network.lock:
            listening = self.network.targets.get(endpoint)
            name = f"{source.worker_id}/{source.epoch}/{next(self.network.names)}".encode()
            connection = MemoryConnection(self, listening, name)
            if listening is not None:
                listening.connections[name] = connection
            self._connections.append(connection)
            return connection

    def wait(self, timeout_s: float) -> None:
        self._awake.wait(timeout_s)
        self._awake.clear()
        while self._read:
            self._read.popleft()()

    def wake(self) -> None:
        self._awake.set()

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._read.clear()

    def read_done(self, on_read: Callable[[], None]) -> None:
        """For the network: a payload is no longer read; told in the next wait."""
        self._read.append(on_read)
        self._awake.set()


class MemoryTarget:
    """See `transport.TargetTransport`."""

    def __init__(self, network: MemoryNetwork, endpoints: tuple[str, ...]) -> None:
        self.connections: dict[bytes, MemoryConnection] = {}
        self._network = network
        self._endpoints = endpoints
        self._gone: deque[PeerGone] = deque()
        self._ready: deque[MemoryConnection] = deque()
        self._awake = threading.Event()

    def endpoints(self) -> tuple[str, ...]:
        return self._endpoints

    def receive(self) -> Arrival | PeerGone | None:
        with self._network.lock:
            while self._ready:
                connection = self._ready[0]
                taken = connection.to_target.take()
                if taken is None:
                    self._ready.popleft()
                    continue
                packet, delivered = taken
                payloads = tuple(memoryview(bytes(payload)) for payload in packet.payloads)
                delivered()
                connection.source.wake()
                return Arrival(peer=connection.name, header=packet.header, payloads=payloads)
            return self._gone.popleft() if self._gone else None

    def send(self, peer: bytes, header: bytes) -> Delivery:
        with self._network.lock:
            connection = self.connections.get(peer)
            if connection is None:
                return Delivery.GONE
            if len(connection.to_source) >= self._network.capacity_packets:
                return Delivery.FULL
            nothing = _Reading(None, None)
            _scripted(self._network, connection.to_source, False, header, (), nothing)
            connection.source.wake()
            return Delivery.QUEUED

    def wait(self, timeout_s: float) -> None:
        self._awake.wait(timeout_s)
        self._awake.clear()

    def wake(self) -> None:
        self._awake.set()

    def close(self) -> None:
        with self._network.lock:
            for endpoint in self._endpoints:
                self._network.targets.pop(endpoint, None)
            for connection in list(self.connections.values()):
                connection.break_off()

    def rouse(self, connection: MemoryConnection) -> None:
        """For the network: something was queued."""
        self._ready.append(connection)
        self._awake.set()

    def forget(self, connection: MemoryConnection) -> None:
        """For the network: the connection is lost."""
        if self.connections.pop(connection.name, None) is not None:
            self._gone.append(PeerGone(peer=connection.name))
            self._awake.set()


class _Reading:
    """Tells the source, once, that the last copy of a message with payloads was delivered or dropped."""

    def __init__(self, source: MemorySource | None, on_read: Callable[[], None] | None) -> None:
        self._source = source
        self._on_read = on_read
        self.copies = 1

    def done(self) -> None:
        self.copies -= 1
        if self.copies == 0 and self._source is not None and self._on_read is not None:
            self._source.read_done(self._on_read)


def _scripted(
    network: MemoryNetwork,
    queue: _Queue,
    to_target: bool,
    header: bytes,
    payloads: tuple[memoryview, ...],
    reading: _Reading,
) -> None:
    sent = Packet(number=next(network.numbers), to_target=to_target, header=header, payloads=payloads)
    arriving = network.script(sent)
    reading.copies += len(arriving)
    for packet in arriving:
        queue.put(replace(packet, number=sent.number), reading.done)
    reading.done()
