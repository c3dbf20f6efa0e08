"""A client of gRPC streams that costs next to nothing, so that a benchmark shows the server and not its client.

HTTP/2 by hand, as far as a stream of small answers needs it: windows that never close, no compression of headers, no
errors but a broken connection. Good for nothing else.
"""

import asyncio
from collections.abc import Callable
from struct import Struct
from typing import Any

_DATA, _HEADERS, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 4, 6, 7, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_WINDOW = 2**31 - 1
_FRAME = Struct(">HBBBI")
_SETTING = Struct(">HI")
_NUMBER = Struct(">I")
_MESSAGE = Struct(">BI")


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _FRAME.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload


def _header(name: str, value: str) -> bytes:
    """Literal, never indexed, shorter than 127 bytes."""
    return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class RawClient(asyncio.Protocol):
    """One connection. on_message: gets each message of each stream as it is on the wire. window_bytes: that it takes
    of each stream, all in all."""

    def __init__(self, on_message: Callable[[bytes], None], window_bytes: int = _WINDOW) -> None:
        self._on_message = on_message
        self._window_bytes = window_bytes
        self._unread = b""
        self._parts: dict[int, bytes] = {}
        self._streams = iter(range(1, 2**31, 2))
        self.ended = 0
        """Streams that the server has ended."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        settings = _SETTING.pack(1, 0) + _SETTING.pack(4, self._window_bytes)
        window = _frame(_WINDOW_UPDATE, 0, 0, _NUMBER.pack(_WINDOW - 65_535))
        transport.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, settings) + window)

    def open(self, path: str, message: bytes) -> None:
        """Begin a call with one message."""
        stream = self.begin(path)
        self.send(stream, _MESSAGE.pack(0, len(message)) + message, last=True)

    def begin(self, path: str, **more: str) -> int:
        """A call of which nothing but its head is sent; its stream. more: metadata."""
        stream = next(self._streams)
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "gateway",
            "content-type": "application/grpc",
            "te": "trailers",
            **more,
        }
        headers = b"".join(_header(name, value) for name, value in fields.items())
        self._transport.write(_frame(_HEADERS, _END_HEADERS, stream, headers))
        return stream

    def send(self, stream: int, data: bytes, *, last: bool = False) -> None:
        """One frame."""
        self._transport.write(_frame(_DATA, _END_STREAM if last else 0, stream, data))

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        unread, at = self._unread + data, 0
        while at + 9 <= len(unread):
            high, low, kind, flags, stream = _FRAME.unpack_from(unread, at)
            end = at + 9 + (high << 8 | low)
            if end > len(unread):
                break
            self._frame_received(kind, flags, stream, unread[at + 9 : end])
            at = end
        self._unread = unread[at:]

    def _frame_received(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA:
            self._take(stream, payload)
        elif kind == _HEADERS and flags & _END_STREAM:
            self.ended += 1
        elif kind in (_PING, _SETTINGS) and not flags & _ACK:
            self._transport.write(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
        assert kind != _GOAWAY, payload

    def _take(self, stream: int, data: bytes) -> None:
        data, at = self._parts.pop(stream, b"") + data, 0
        while at + 5 <= len(data):
            end = at + 5 + _MESSAGE.unpack_from(data, at)[1]
            if end > len(data):
                break
            self._on_message(data[at + 5 : end])
            at = end
        if at < len(data):
            self._parts[stream] = data[at:]
