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
from service.server import BindError, is_wildcard


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """host, port: where to listen; port 0 is any free one."""

    def __init__(self, app: Starlette, host: str, port: int, *, allow_wildcard: bool) -> None:
        if not allow_wildcard and is_wildcard(f"{host}:{port}"):
            raise BindError(f"{host}:{port}: listens on every interface; say --allow-wildcard-bind if meant")
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
        )
        self._server = _QuietServer(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def stop(self) -> None:
        """Finish what is being answered, then end."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        raise BindError(f"{host}:{port}: cannot listen there: {error.strerror or error}") from None
    listener.listen(1024)
    return listener
