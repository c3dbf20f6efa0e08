"""HTTP/1.1 with bounds on what a client may do that leads nowhere: an endless head, endless trailers, a request that
never ends, an answer that is not read.

The HTTP server speaks it. uvicorn's parser keeps an unfinished request however long it is and takes; here the
connection ends instead. It reads no body and knows no path.
"""

import asyncio
from http import HTTPStatus
from typing import Any

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway import patience
from gateway.openai_errors import error_response, plain_error
from service.errors import Ending

HEAD_BYTES_MAX = 65_536
"""Of a request's path and headers together."""
HEAD_S = 30.0
"""From a connection, or a request's first byte, to the end of its headers."""
BODY_S = 120.0
"""From there to the end of its body."""


class BoundedHttp(HttpToolsProtocol):
    """Refusals are error objects, as all others are."""

    _idle_bytes = 0
    _head_bytes = 0
    _patience: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _last_words: Response | None = None
    """A refusal that waits for the answers to what came whole before it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        self._unstall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._unstall()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Reading may have been paused until now: what is on its way has its time from here."""
        super().on_response_complete()
        if self._last_words is not None and not self.transport.is_closing():
            self._refuse(self._last_words)
        elif self._patience is not None:
            self._wait(BODY_S)

    def on_message_begin(self) -> None:
        self._wait(HEAD_S)
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(name, b": ", value, b"\r\n")
        super().on_header(name, value)

    def on_message_complete(self) -> None:
        self._wait(None)
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._last_words is not None:
            return  # nothing is made of what comes behind it
        self._idle_bytes += len(data)
        super().data_received(data)
        if self._idle_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._refuse_head()

    def on_headers_complete(self) -> None:
        self._idle_bytes = 0
        self._wait(BODY_S)
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _without_chunks(self.cycle)
        _until_taken(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP at all. msg: uvicorn's own text, which says no more."""
        if self._head_bytes > HEAD_BYTES_MAX:
            self._refuse_head()
        else:
            self._refuse(plain_error(400, "must be an HTTP/1.1 request", "invalid_request"))

    def cut(self) -> None:
        """The server ends now."""
        if self._answers() or self.transport.is_closing():
            self.transport.abort()
        else:
            self._refuse(error_response(Ending()))

    def _expect_reading(self, unread: int) -> None:
        """Enough of so many bytes, in time. When little enough is left, writing goes on by itself."""
        self._stall = self.loop.call_later(patience.STALL_S, self._look, unread)

    def _look(self, unread: int) -> None:
        left = self.transport.get_write_buffer_size()
        if unread - left < patience.STALL_BYTES:
            self.transport.abort()
        else:
            self._expect_reading(left)

    def _unstall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
        self._stall = None

    def _wait(self, seconds: float | None) -> None:
        """For the next part of a request, instead of any wait before; None for no longer."""
        if self._patience is not None:
            self._patience.cancel()
        self._patience = None if seconds is None else self.loop.call_later(seconds, self._out_of_patience)

    def _out_of_patience(self) -> None:
        if self._answers():
            self._wait(HEAD_S)
        elif not self.transport.is_closing():
            self._refuse(plain_error(408, "the request took too long to arrive", "request_timeout"))

    def _answers(self) -> bool:
        """A request that came whole, or has an answer on its way: what comes behind it takes nothing from that."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return bool(self.pipeline)
        return cycle.response_started or not cycle.more_body or bool(self.pipeline)

    def _owes(self) -> bool:
        """An answer to a request that came whole."""
        cycle = self.cycle
        return (cycle is not None and not (cycle.response_complete or cycle.more_body)) or bool(self.pipeline)

    def _count_head(self, *parts: bytes) -> None:
        """What is too long is no request to the parser: it reads no further."""
        self._head_bytes += sum(map(len, parts))
        if self._head_bytes > HEAD_BYTES_MAX:
            raise ValueError("the head is too long")

    def _refuse_head(self) -> None:
        self._refuse(plain_error(431, f"headers: at most {HEAD_BYTES_MAX} bytes", "headers_too_large"))

    def _refuse(self, response: Response) -> None:
        """Ends the connection, behind the answers to what came whole; says why unless another one is on its way."""
        if self._owes():
            self._last_words = response
            return
        if not self._answers():
            status = response.status_code
            headers = b"".join(b"%s: %s\r\n" % pair for pair in response.raw_headers)
            line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
            self.transport.write(line + headers + b"connection: close\r\n\r\n" + bytes(response.body))
        if self.cycle is not None:
            self.cycle.disconnected = True  # whatever comes of it goes nowhere
        self.transport.close()


def _until_taken(cycle: RequestResponseCycle) -> None:
    """What is sent is sent when the connection has taken it, but for what it always holds: the last of an answer too,
    which may be all of it."""
    send = cycle.send

    async def send_and_wait(message: Any) -> None:
        await send(message)
        await cycle.flow.drain()

    cycle.send = send_and_wait  # type: ignore[method-assign]


def _without_chunks(cycle: RequestResponseCycle) -> None:
    """HTTP/1.0 knows none: an answer of no told length ends with its connection. What comes of each part is its own
    length to the server, which would count down to zero."""
    send = cycle.send

    async def send_plain(message: Any) -> None:
        cycle.chunked_encoding = False
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]
