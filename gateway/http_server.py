"""The HTTP face in the gateway's own event loop: uvicorn without its signal handling, which is the process's.

It knows no path: what is served is the application's, and what may come over the wire the protocol's.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from gateway.http_protocol import BoundedHttp
from gateway.patience import STALL_S
from service.bind_rules import BindError, BindRules
from service.tls import ServerTls

_OF_CONNECTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_S * 1000)),
)
"""They have them of who listens. A client whose host is gone is given up as over gRPC, after 60 s of silence and 20
more, or when nothing of what it was sent is taken for as long as anybody may stall."""


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """host, port: where to listen; port 0 is any free one. tls: None for none. Raises BindError."""

    def __init__(self, app: Starlette, host: str, port: int, rules: BindRules, tls: ServerTls | None) -> None:
        rules.check(f"{host}:{port}", encrypted=tls is not None)
        self._host = host
        self._socket = _listen(host, port)
        config = uvicorn.Config(
            app,
            http=BoundedHttp,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=30,
            server_header=False,
            # A caller is who it is: nothing is believed of what a header says about where it comes from.
            proxy_headers=False,
        )
        config.load()
        config.ssl = None if tls is None else tls.http_context()
        self._scheme = "http" if tls is None else "https"
        self._server = _QuietServer(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._host, int(self._socket.getsockname()[1])
        return f"{self._scheme}://[{host}]:{port}" if ":" in host else f"{self._scheme}://{host}:{port}"

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    def close(self) -> None:
        """Take nothing new, and finish what is being answered."""
        self._server.should_exit = True

    async def finish(self) -> None:
        """The same, and wait for it."""
        self.close()
        if self._task is not None:
            await asyncio.wait({self._task})

    async def stop(self) -> None:
        """Cut what is still answered, and end."""
        for connection in tuple(self._server.server_state.connections):
            assert isinstance(connection, BoundedHttp), "nothing else is spoken here"
            connection.cut()
        await self.finish()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for level, option, value in _OF_CONNECTIONS:
            listener.setsockopt(level, option, value)
        listener.bind((host, port))
    except OSError as error:
        raise BindError(f"{host}:{port}: cannot listen there: {error.strerror or error}") from None
    listener.listen(1024)
    return listener
