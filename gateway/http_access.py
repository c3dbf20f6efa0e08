"""Asks about every HTTP request before it is routed, and notes whose it is. Reads no body; a path that nobody serves
is not told apart from one that is somebody else's."""

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access import Access
from gateway.openai_errors import error_response
from service.errors import Unauthorised
from service.guard import AUTHORIZATION, Call

TENANT = "tenant"
"""Key in the state of a request."""


class HttpAccess:
    """The outermost middleware."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            try:
                tenant = self._access.check_path(scope["path"], _call_of(scope))
                scope.setdefault("state", {})[TENANT] = tenant
            except Unauthorised as error:
                app = error_response(error)
        await app(scope, receive, send)


def _call_of(scope: Scope) -> Call:
    given = {value for name, value in scope["headers"] if name == AUTHORIZATION.encode()}
    return Call(
        method=scope["path"],
        authorization=given.pop().decode("latin-1") if len(given) == 1 else "",
        identities=(),
    )
