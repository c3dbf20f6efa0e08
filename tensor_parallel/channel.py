"""One end of a ZeroMQ pair between the rank that plans and one that follows.

Owns a socket in a folder that only this user can enter: whoever can open it is one of us. Every wait ends: with what
came, with somebody's death, or with time. Used by one thread at a time.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Self

import zmq

from engine.errors import RankLost
from tensor_parallel.wire import MESSAGE_BYTES_MAX, Bounds, MalformedMessage, Message, decode, encode

QUEUE_MESSAGES_MAX = 16
LOOK_MS = 100


class Channel:
    """stall_s: after which a message that nobody takes is given up."""

    def __init__(self, socket: "zmq.Socket[bytes]", stall_s: float) -> None:
        self._socket = socket
        self._stall_s = stall_s
        self.bounds: Bounds | None = None
        """Of the work that may come; None while there is no cache."""

    @classmethod
    def listen(cls, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, stall_s: float) -> Self:
        channel = cls(_socket(context, stall_s), stall_s)
        channel._socket.bind(endpoint)
        return channel

    @classmethod
    def dial(cls, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, stall_s: float) -> Self:
        channel = cls(_socket(context, stall_s), stall_s)
        channel._socket.connect(endpoint)
        return channel

    def say(self, message: Message, block_size: int | None = None) -> None:
        """block_size: see `encode`. Raises RankLost."""
        encoded = encode(message, block_size)
        # The other side would drop it without a word; `batch_bytes_max` is looked at before there is one.
        assert len(encoded) <= MESSAGE_BYTES_MAX, f"a {type(message).__name__} of {len(encoded)} bytes"
        try:
            self._socket.send(encoded)
        except zmq.Again:
            raise RankLost(f"a rank takes no message for {self._stall_s:g} s") from None

    def say_at_once(self, message: Message) -> None:
        """To somebody who may be gone, and then is told nothing."""
        with suppress(zmq.Again):
            self._socket.send(encode(message), zmq.NOBLOCK)

    def hear(self, check: Callable[[], None] = lambda: None, stall_s: float | None = None) -> Message:
        """The next message. check: asked again and again while nothing comes; may raise. stall_s: after which a silence
        is RankLost; None for never. Raises MalformedMessage as RankLost too: whoever says such things is not one of us
        any more."""
        waited_ms = 0
        while not self._socket.poll(LOOK_MS):
            check()
            waited_ms += LOOK_MS
            if stall_s is not None and waited_ms > 1000 * stall_s:
                raise RankLost(f"a rank says nothing for {stall_s:g} s")
        return self._received()

    def hear_at_once(self) -> Message | None:
        """What is there, from somebody who may be gone. None for nothing. Raises RankLost as `hear` does."""
        return self._received() if self._socket.poll(LOOK_MS) else None

    def close(self) -> None:
        self._socket.close()

    def _received(self) -> Message:
        try:
            return decode(self._socket.recv(), self.bounds)
        except MalformedMessage as error:
            raise RankLost(f"a rank says what none should: {error}") from error


def _socket(context: "zmq.Context[zmq.Socket[bytes]]", stall_s: float) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 500)
    socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.SNDTIMEO, int(1000 * stall_s))
    return socket
