"""HTTP/1.1 with a bound on what a client may say that leads nowhere: an endless head, endless trailers.

The HTTP server speaks it. uvicorn's parser keeps an unfinished header however long it is; here the connection
ends instead. It reads no body and knows no path.
"""

from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.openai_errors import plain_error

HEAD_BYTES_MAX = 65_536
"""Of a request's line and headers together; of what one read brings on top, the loop's buffer is the bound."""


class BoundedHttp(HttpToolsProtocol):
    """Refusals are error objects, as all others are."""

    _idle_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._idle_bytes += len(data)
        super().data_received(data)
        if self._idle_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._refuse(431, f"headers: at most {HEAD_BYTES_MAX} bytes", "headers_too_large")

    def on_headers_complete(self) -> None:
        self._idle_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP at all. msg: uvicorn's own text, which says no more."""
        self._refuse(400, "must be an HTTP/1.1 request", "invalid_request")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Ends the connection; says why unless an answer is on its way already."""
        if self.cycle is None or self.cycle.response_complete:
            response = plain_error(status, message, code)
            headers = b"".join(b"%s: %s\r\n" % pair for pair in response.raw_headers)
            line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
            self.transport.write(line + headers + b"connection: close\r\n\r\n" + bytes(response.body))
        self.transport.close()
