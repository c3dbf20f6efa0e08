"""Messages between processes of one host: headers over a Unix socket, blocks through shared staging memory.

The target listens under an abstract name, which is no file, and gives each connection a ring of its own. A
source copies blocks into free slots and says which; the target hands the slots out as payloads and frees them
with its next `receive`. Only processes of the same user are talked to, and whoever breaks these rules is cut
off. A source that is dead, slow or hostile holds up its own ring and nothing else."""

import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from math import inf

import numpy as np
import zmq

from kvtransfer.errors import BindRefused
from kvtransfer.identity import Identity
from kvtransfer.shm_ring import SLOTS_MAX, BadPacket, Ring, attach, new_ring, pack, unpack
from kvtransfer.shm_socket import PacketSocket
from kvtransfer.transport import Arrival, Delivery, LinkStatus, PeerGone, unread
from kvtransfer.watch import Watch

SCHEME = "shm"
STAGING_BYTES = 16 * 1024 * 1024
"""Per connection: few enough to stay in a cache, enough that neither end waits for the other."""
SLOTS_MIN = 4
TELLS_PER_RING = 4
"""Freed slots are told when a quarter of the ring has gathered, or nothing else is to be done."""
CONNECTIONS_MAX = 64

_NAME_BYTES_MAX = 100


def available() -> bool:
    """Whether this system has what it takes: memory without a name, and sockets without a file."""
    return hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED")


class ShmSourceTransport:
    """See `transport.SourceTransport`. watch: where it is one of several transports."""

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch = watch or Watch()
        self._connections: set[ShmConnection] = set()
        self._read: deque[Callable[[], None]] = deque()

    def dial(self, endpoint: str, source: Identity, target: Identity) -> "ShmConnection":
        scheme, _, name = endpoint.partition("://")
        if scheme != SCHEME or not 0 < len(name.encode()) <= _NAME_BYTES_MAX:
            raise ValueError("not an endpoint")
        connection = ShmConnection(self, self._watch, name)
        self._connections.add(connection)
        return connection

    def wait(self, timeout_s: float) -> None:
        self._watch.wait(min(timeout_s, self.patience_s()))
        self.settle()

    def patience_s(self) -> float:
        return 0.0 if self._read else inf

    def settle(self) -> None:
        while self._read:
            self._read.popleft()()

    def wake(self) -> None:
        self._watch.ring()

    def close(self) -> None:
        for connection in list(self._connections):
            connection.close()
        self._read.clear()
        self._watch.close()

    def read(self, on_read: Callable[[], None]) -> None:
        """For connections: a payload was copied; told after the next wait."""
        self._read.append(on_read)

    def closed(self, connection: "ShmConnection") -> None:
        """For connections."""
        self._connections.discard(connection)


class ShmConnection:
    """See `transport.Connection`."""

    def __init__(self, owner: ShmSourceTransport, watch: Watch, name: str) -> None:
        self._owner = owner
        self._packets = PacketSocket(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), watch)
        self._status = LinkStatus.DIALLING
        self._ring: Ring | None = None
        self._free: list[int] = []
        self._taken: set[int] = set()
        try:
            self._packets.connect(_address(name))
            self._packets.require_same_user()
        except (OSError, BadPacket):
            self._lose()

    def status(self) -> LinkStatus:
        if self._status is LinkStatus.DIALLING:
            self._attach()
        return self._status

    def send(
        self, header: bytes, payloads: Sequence[memoryview] = (), on_read: Callable[[], None] = unread
    ) -> bool:
        if self._status is not LinkStatus.UP:
            return False
        try:
            return (
                self._send_blocks(header, payloads, on_read) if payloads else self._packets.send(pack(header))
            )
        except (OSError, BadPacket):
            self._lose()
            return False

    def receive(self) -> bytes | None:
        try:
            while self._status is LinkStatus.UP and (packet := self._packets.receive()) is not None:
                freed, header = unpack(packet)
                if not freed:
                    return header
                self._take_back(freed)
        except (OSError, BadPacket):
            self._lose()
        return None

    def close(self) -> None:
        self._lose()
        self._owner.closed(self)

    def _attach(self) -> None:
        try:
            received = self._packets.receive_descriptor()
        except (OSError, BadPacket):
            self._lose()
            return
        if received is None:
            return
        greeting, descriptor = received
        try:
            self._ring = attach(greeting, descriptor)
        except BadPacket:
            self._lose()
            return
        finally:
            os.close(descriptor)
        # The slot that was freed last is used next: it is the one that a cache still holds.
        self._free = list(range(len(self._ring.slots)))
        self._status = LinkStatus.UP

    def _send_blocks(
        self, header: bytes, payloads: Sequence[memoryview], on_read: Callable[[], None]
    ) -> bool:
        ring = self._ring
        assert ring is not None
        if len(payloads) > len(ring.slots) or payloads[0].nbytes != ring.slot_bytes:
            raise BadPacket("slots of another size than our blocks, or too few")
        if len(payloads) > len(self._free):
            return False
        slots = self._free[-len(payloads) :]
        for slot, payload in zip(slots, payloads, strict=True):
            # numpy lets other threads run while it copies; a memoryview assignment does not.
            np.copyto(np.frombuffer(ring.slots[slot], np.uint8), np.frombuffer(payload, np.uint8))
        if not self._packets.send(pack(header, slots)):
            return False
        del self._free[-len(payloads) :]
        self._taken.update(slots)
        self._owner.read(on_read)
        return True

    def _take_back(self, slots: Sequence[int]) -> None:
        if not self._taken.issuperset(slots) or len(set(slots)) < len(slots):
            raise BadPacket("freed what was not taken")
        self._taken.difference_update(slots)
        self._free += slots

    def _lose(self) -> None:
        self._status = LinkStatus.LOST
        self._ring = None
        self._packets.close()


class ShmTargetTransport:
    """See `transport.TargetTransport`. name: what the endpoint is called, unused on this host, at most 100
    bytes. watch: where it is one of several transports. Raises BindRefused."""

    def __init__(self, name: str, block_bytes: int, watch: Watch | None = None) -> None:
        self._name = name
        self._block_bytes = block_bytes
        self._watch = watch or Watch()
        self._names = count()
        self._peers: dict[bytes, _Peer] = {}
        self._readable: deque[_Peer] = deque()
        self._lent: tuple[_Peer, tuple[int, ...]] | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        try:
            self._listener.bind(_address(name))
            self._listener.listen(CONNECTIONS_MAX)
        except OSError as error:
            self.close()
            raise BindRefused(f"{SCHEME}://{name}: {error.strerror}") from error
        self._watch.look_at(self._listener.fileno(), zmq.POLLIN)

    def endpoints(self) -> tuple[str, ...]:
        return (f"{SCHEME}://{self._name}",)

    def receive(self) -> Arrival | PeerGone | None:
        self._take_back()
        while self._readable:
            peer = self._readable.popleft()
            try:
                packet = peer.packets.receive()
                if packet is None:
                    peer.tell_freed()
                    continue
                arrival = self._arrival(peer, packet)
            except (OSError, BadPacket):
                return self._lose(peer)
            self._readable.append(peer)
            return arrival
        return None

    def send(self, peer: bytes, header: bytes) -> Delivery:
        known = self._peers.get(peer)
        if known is None:
            return Delivery.GONE
        try:
            return Delivery.QUEUED if known.packets.send(pack(header)) else Delivery.FULL
        except OSError:
            return Delivery.GONE

    def wait(self, timeout_s: float) -> None:
        self._watch.wait(timeout_s)
        self.settle()

    def patience_s(self) -> float:
        return inf

    def settle(self) -> None:
        if self._watch.ready(self._listener.fileno()):
            self._accept()
        waiting = set(self._readable)
        for peer in self._peers.values():
            if peer.packets.ready() and peer not in waiting:
                self._readable.append(peer)

    def wake(self) -> None:
        self._watch.ring()

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self._lose(peer)
        self._watch.look_at(self._listener.fileno(), 0)
        self._listener.close()
        self._watch.close()

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            if len(self._peers) >= CONNECTIONS_MAX:
                raw.close()
                continue
            packets = PacketSocket(raw, self._watch)
            try:
                peer = self._welcome(packets)
            except (OSError, BadPacket):
                packets.close()
            else:
                self._peers[peer.name] = peer

    def _welcome(self, packets: PacketSocket) -> "_Peer":
        """Give the newcomer a ring. Raises OSError or BadPacket."""
        packets.require_same_user()
        slot_count = min(max(SLOTS_MIN, STAGING_BYTES // self._block_bytes), SLOTS_MAX)
        ring, descriptor = new_ring(slot_count, self._block_bytes)
        try:
            packets.send_descriptor(ring.greeting(), descriptor)
        finally:
            os.close(descriptor)
        return _Peer(f"{SCHEME}/{next(self._names)}".encode(), packets, ring)

    def _arrival(self, peer: "_Peer", packet: memoryview) -> Arrival:
        slots, header = unpack(packet)
        if slots:
            if max(slots) >= len(peer.ring.slots):
                raise BadPacket("no such slot")
            self._lent = (peer, slots)
        payloads = tuple([peer.ring.slots[slot] for slot in slots])
        return Arrival(peer=peer.name, header=header, payloads=payloads)

    def _take_back(self) -> None:
        """The payloads that were handed out last have been copied."""
        if self._lent is not None:
            peer, slots = self._lent
            self._lent = None
            peer.free(slots)

    def _lose(self, peer: "_Peer") -> PeerGone:
        peer.packets.close()
        self._peers.pop(peer.name, None)
        return PeerGone(peer=peer.name)


class _Peer:
    def __init__(self, name: bytes, packets: PacketSocket, ring: Ring) -> None:
        self.name = name
        self.packets = packets
        self.ring = ring
        # A set: a source that uses one slot again and again makes nothing grow.
        self._freed: set[int] = set()

    def free(self, slots: Sequence[int]) -> None:
        self._freed.update(slots)
        if len(self._freed) * TELLS_PER_RING >= len(self.ring.slots):
            self.tell_freed()

    def tell_freed(self) -> None:
        """Again later, if the source does not read now: with the next slot, or the next time it says
        something."""
        try:
            if self._freed and self.packets.send(pack(b"", self._freed)):
                self._freed.clear()
        except OSError:
            # It is gone, and the next reading from it will tell.
            return


def _address(name: str) -> bytes:
    """In Linux' abstract namespace: no file, gone with its last owner."""
    return b"\0" + name.encode()
