"""What both ends of the ZeroMQ transport share: options, socket settings, security, and monitor events.

Never sends or receives a message.
"""

from dataclasses import dataclass
from typing import TypeAlias

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvtransfer.keys import KeyRing
from kvtransfer.wire import run_blocks_max

HEADROOM_BYTES = 4096
"""What a header may need beside a block: the largest frame is a block and this."""

ANSWERS_HWM = 256
"""Answers are some dozen bytes each; this many may wait for a source."""

ZAP_DOMAIN = b"crossdock-kv"

Socket: TypeAlias = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZmqOptions:
    """block_bytes: of one block; a peer that sends larger frames than a block and a header is cut off.
    silence_s: after which a tcp peer whose machine answers nothing is gone. queue_bytes:
    of blocks queued per connection and end; with only a few, the ends wait for each other. probe_ms: how long
    after a lost connection peers are asked whether it was theirs."""

    block_bytes: int
    silence_s: int = 3
    handshake_ms: int = 3000
    reconnect_ms: int = 50
    reconnect_max_ms: int = 2000
    queue_bytes: int = 16 * 1024 * 1024
    probe_ms: int = 300
    probe_interval_ms: int = 10

    def hwm_messages(self) -> int:
        """Of as many blocks as one may have, between 8 and 256."""
        message_bytes = run_blocks_max(self.block_bytes) * self.block_bytes
        return min(max(8, self.queue_bytes // message_bytes), 256)


def configure(raw: Socket, options: ZmqOptions) -> None:
    raw.setsockopt(zmq.LINGER, 0)
    raw.setsockopt(zmq.MAXMSGSIZE, options.block_bytes + HEADROOM_BYTES)
    # The system's signs of life and not ZeroMQ's: where input stands still, because nobody reads it, a heartbeat that
    # is missed ends the process (an assertion in libzmq 4.3.5). That a peer's process is frozen, leases tell.
    raw.setsockopt(zmq.TCP_KEEPALIVE, 1)
    raw.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 1)
    raw.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    raw.setsockopt(zmq.TCP_KEEPALIVE_CNT, options.silence_s)
    raw.setsockopt(zmq.TCP_MAXRT, 1000 * options.silence_s)
    raw.setsockopt(zmq.HANDSHAKE_IVL, options.handshake_ms)


def secure_target(raw: Socket, keys: KeyRing) -> None:
    """Take CURVE connections only, and of those what the allow-list of the context lets in."""
    raw.setsockopt(zmq.CURVE_SERVER, 1)
    raw.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    raw.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    raw.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_source(raw: Socket, keys: KeyRing, target_key: bytes) -> None:
    """Connect with CURVE, and only to who has the secret half of target_key."""
    raw.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    raw.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    raw.setsockopt(zmq.CURVE_SERVERKEY, target_key)


def next_monitor_event(monitor: Socket) -> tuple[int, int] | None:
    """The event, and the number that comes with it."""
    try:
        message = recv_monitor_message(monitor, zmq.NOBLOCK)
    except zmq.Again:
        return None
    return int(message["event"]), int(message["value"])
