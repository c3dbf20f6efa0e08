"""Gives every HTTP request its id before anybody looks at it, and says it with every answer, refusals too.

The outermost middleware. The id is the client's own, where it can be one. Reads no body.
"""

from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = "request_id"
"""Key in the state of a request."""
REQUEST_ID_KEY = "x-request-id"


class HttpRequestId:
    """new_id: for whoever gave none. characters_max: of one that is given."""

    def __init__(self, app: ASGIApp, new_id: Callable[[], str], characters_max: int) -> None:
        self._app = app
        self._new_id = new_id
        self._characters_max = characters_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = self._id_of(scope)
        scope.setdefault("state", {})[REQUEST_ID] = request_id

        async def say(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_KEY] = request_id
            await send(message)

        await self._app(scope, receive, say)

    def _id_of(self, scope: Scope) -> str:
        given = Headers(scope=scope).get(REQUEST_ID_KEY, "")
        if 1 <= len(given) <= self._characters_max and given.isascii() and given.isprintable():
            return given
        return self._new_id()
