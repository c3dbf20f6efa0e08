"""Cancels the work for an HTTP client that has gone, also before the first byte of its answer.

Wraps the whole ASGI application: servers say that a client has left only to those who listen. It looks at no
path and no body, and never cuts the cleaning up after a complete answer.
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class CancelOnDisconnect:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(receive, send)
        work = asyncio.ensure_future(self._run(scope, exchange))
        watch = asyncio.ensure_future(exchange.watch())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if exchange.answered:
                await asyncio.wait({work})
        finally:
            watch.cancel()
            work.cancel()
            results = await asyncio.gather(work, watch, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _run(self, scope: Scope, exchange: "_Exchange") -> None:
        await self._app(scope, exchange.receive, exchange.send)


class _Exchange:
    """Reads ahead of the application by one message, so that a disconnect is seen while it works."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._ahead: asyncio.Queue[Message] = asyncio.Queue(maxsize=1)
        self.answered = False

    async def watch(self) -> None:
        """Returns when the client has gone, or the server has seen the end of the answer."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return
            await self._ahead.put(message)

    async def receive(self) -> Message:
        return await self._ahead.get()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.answered = True
        await self._send(message)
