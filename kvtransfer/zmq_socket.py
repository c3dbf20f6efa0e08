"""What both ends of the ZeroMQ transport share: options, socket settings, monitor events, and a bell.

Never sends or receives a message.
"""

import socket
from dataclasses import dataclass
from typing import TypeAlias

import zmq
from zmq.utils.monitor import recv_monitor_message

HEADROOM_BYTES = 4096
"""What a header may need beside a block: the largest frame is a block and this."""

ANSWERS_HWM = 256
"""Answers are some dozen bytes each; this many may wait for a source."""

Socket: TypeAlias = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZmqOptions:
    """block_bytes: of one block; a peer that sends larger frames than a block and a header is cut off.
    heartbeat_ms: between pings on an idle connection; a peer silent for three of them is gone.
    hwm_messages: blocks queued per connection and end. probe_ms: how long after a lost connection peers are
    asked whether it was theirs."""

    block_bytes: int
    heartbeat_ms: int = 1000
    handshake_ms: int = 3000
    reconnect_ms: int = 50
    reconnect_max_ms: int = 2000
    hwm_messages: int = 8
    probe_ms: int = 300
    probe_interval_ms: int = 10


class Bell:
    """Ends a poll from another thread."""

    def __init__(self) -> None:
        self._hear, self._push = socket.socketpair()
        self._hear.setblocking(False)
        self._push.setblocking(False)
        self._fd = self._hear.fileno()

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        try:
            self._push.send(b"\0")
        except OSError:
            # Full: it rings already. Closed: nobody waits any more.
            return

    def silence(self) -> None:
        try:
            while self._hear.recv(4096):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        self._push.close()
        self._hear.close()


def configure(raw: Socket, options: ZmqOptions) -> None:
    raw.setsockopt(zmq.LINGER, 0)
    raw.setsockopt(zmq.MAXMSGSIZE, options.block_bytes + HEADROOM_BYTES)
    raw.setsockopt(zmq.HEARTBEAT_IVL, options.heartbeat_ms)
    raw.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * options.heartbeat_ms)
    raw.setsockopt(zmq.HEARTBEAT_TTL, 3 * options.heartbeat_ms)
    raw.setsockopt(zmq.HANDSHAKE_IVL, options.handshake_ms)


def next_monitor_event(monitor: Socket) -> int | None:
    try:
        return int(recv_monitor_message(monitor, zmq.NOBLOCK)["event"])
    except zmq.Again:
        return None
