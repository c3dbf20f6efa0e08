"""What the I/O thread of an endpoint waits for: the sockets of its transports, and a bell that any thread may ring.

Owned by one transport, or shared by those that `joined_transport` makes one of. Never reads from a socket.
"""

import socket
from math import ceil

import zmq

from kvtransfer.zmq_socket import Socket


class Watch:
    def __init__(self) -> None:
        self._hear, self._push = socket.socketpair()
        self._hear.setblocking(False)
        self._push.setblocking(False)
        self._bell = self._hear.fileno()
        self._poller = zmq.Poller()
        self._poller.register(self._bell, zmq.POLLIN)
        self._ready: frozenset[Socket | int] = frozenset()

    def look_at(self, item: Socket | int, flags: int) -> None:
        """Watch a ZeroMQ socket or a file descriptor for zmq.POLLIN, and POLLOUT if it has no room; 0 to
        stop. That there is room is told once: whoever still wants to send fails or succeeds then."""
        self._poller.register(item, flags)

    def wait(self, timeout_s: float) -> None:
        """Return when something watched is ready, or at a ring before or meanwhile; at the latest after
        timeout_s."""
        found = self._poller.poll(ceil(timeout_s * 1000))
        for item, flags in found:
            if flags & zmq.POLLOUT:
                self._poller.register(item, zmq.POLLIN)
        self._ready = frozenset(item for item, _ in found)
        if self._bell in self._ready:
            self._silence()

    def ready(self, item: Socket | int) -> bool:
        """Whether the last wait found it ready."""
        return item in self._ready

    def ring(self) -> None:
        """End the current or next wait. From any thread."""
        try:
            self._push.send(b"\0")
        except OSError:
            # Full: it rings already. Closed: nobody waits any more.
            return

    def close(self) -> None:
        """Nobody waits any more. May be called again."""
        self._push.close()
        self._hear.close()

    def _silence(self) -> None:
        try:
            while self._hear.recv(4096):
                pass
        except BlockingIOError:
            return
