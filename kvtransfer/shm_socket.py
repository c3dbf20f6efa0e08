"""A Unix socket that carries whole packets, and once a file descriptor, between two processes of one user.

Used by both ends of the shared-memory transport. Never waits, and knows no packet's meaning.
"""

import os
import socket
import struct

import zmq

from kvtransfer.shm_ring import PACKET_BYTES_MAX, BadPacket
from kvtransfer.watch import Watch

_CREDENTIALS = struct.Struct("3i")


class PacketSocket:
    """raw: of kind SOCK_SEQPACKET. Every method but `close` raises OSError when the other end is gone."""

    def __init__(self, raw: socket.socket, watch: Watch) -> None:
        raw.setblocking(False)
        self._raw = raw
        self._fd = raw.fileno()
        self._watch = watch
        # One byte more than a packet may have: a longer one shows.
        self._packet = memoryview(bytearray(PACKET_BYTES_MAX + 1))
        watch.look_at(self._fd, zmq.POLLIN)

    def connect(self, address: bytes) -> None:
        self._raw.connect(address)

    def require_same_user(self) -> None:
        """Raises BadPacket where the other end is another user's."""
        credentials = self._raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.geteuid():
            raise BadPacket("another user")

    def ready(self) -> bool:
        """Whether the last wait found something to read."""
        return self._watch.ready(self._fd)

    def send(self, packet: bytes) -> bool:
        """False where there is no room now."""
        try:
            self._raw.send(packet)
        except BlockingIOError:
            self._watch.look_at(self._fd, zmq.POLLIN | zmq.POLLOUT)
            return False
        return True

    def receive(self) -> memoryview | None:
        """The next packet, None where there is none; valid until the next call."""
        try:
            size = self._raw.recv_into(self._packet)
        except BlockingIOError:
            return None
        if size == 0:
            raise ConnectionResetError
        return self._packet[:size]

    def send_descriptor(self, packet: bytes, descriptor: int) -> None:
        socket.send_fds(self._raw, [packet], [descriptor])

    def receive_descriptor(self) -> tuple[bytes, int] | None:
        """The packet that comes with a descriptor, which the caller closes. Raises BadPacket for any
        other."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(
                self._raw, PACKET_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        if not descriptors:
            raise BadPacket("no descriptor")
        return packet, descriptors[0]

    def close(self) -> None:
        """May be called again."""
        if self._raw.fileno() == self._fd:
            self._watch.look_at(self._fd, 0)
            self._raw.close()
