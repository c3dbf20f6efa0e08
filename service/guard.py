"""Asks about every call before it is served: one interceptor for all methods of a server, whatever they are.

What a call must bring is the caller's to say. A message is not even parsed before the answer; no method can be
forgotten, since none is named here. What nobody serves is refused here, with our details.
"""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import grpc

from service import status
from service.errors import NotServed, Unauthorised

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]
Context = grpc.aio.ServicerContext[Any, Any]

AUTHORIZATION = "authorization"
OPEN_METHODS = ("/grpc.health.v1.Health/", "/xds.service.orca.v3.OpenRcaService/")
"""Of every server of ours, for everybody: what balancers ask."""

_LOCAL_PEERS = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:")
_NAMES = ("x509_subject_alternative_name", "x509_common_name")
_MAKERS: dict[tuple[bool, bool], Any] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """method: /package.Service/Method. authorization: that metadata as it came, "" for none. local: whether the peer is
    on this machine. identities: names in the peer's certificate, if it brought one that we trust."""

    method: str
    authorization: str
    local: bool
    identities: tuple[str, ...]


Check = Callable[[Call], None]
"""Raises Unauthorised for a call that must not be served."""


class Guard(grpc.aio.ServerInterceptor):
    """The outermost interceptor of a server."""

    def __init__(self, check: Check) -> None:
        self._check = check

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return _NO_METHOD
        kind = (handler.request_streaming, handler.response_streaming)
        behaviour = next(
            each
            for each in (
                handler.unary_unary,
                handler.unary_stream,
                handler.stream_unary,
                handler.stream_stream,
            )
            if each is not None
        )
        read = (lambda message: message) if kind[0] else handler.request_deserializer or bytes
        return cast(
            Handler,
            _MAKERS[kind](
                self._guarded(handler_call_details.method, behaviour, read),
                request_deserializer=handler.request_deserializer if kind[0] else None,
                response_serializer=handler.response_serializer,
            ),
        )

    def _guarded(self, method: str, behaviour: Any, read: Callable[[Any], Any]) -> Callable[..., Any]:
        """read: what makes a message of the bytes; a stream of messages is read by gRPC, one by one, later."""

        async def ask(context: Context) -> None:
            try:
                self._check(call_of(method, context))
            except Unauthorised as error:
                await status.abort(context, error)

        async def generate(request: Any, context: Context) -> Any:
            await ask(context)
            async for response in behaviour(read(request), context):
                yield response

        async def answer(request: Any, context: Context) -> Any:
            await ask(context)
            return await behaviour(read(request), context)

        return generate if inspect.isasyncgenfunction(behaviour) else answer


async def _refuse(requests: object, context: Context) -> None:
    await status.abort(context, NotServed("there is no such method here"))


_NO_METHOD: Handler = grpc.stream_stream_rpc_method_handler(_refuse)
"""Whatever was called: nothing of it is read."""


def call_of(method: str, context: Context) -> Call:
    """What is known of a call before its message is."""
    shown = context.auth_context()
    return Call(
        method=method,
        authorization=authorization(context),
        local=context.peer().startswith(_LOCAL_PEERS),
        identities=tuple(name.decode("utf-8", "replace") for key in _NAMES for name in shown.get(key, ())),
    )


def authorization(context: Context) -> str:
    """The metadata of that name as it came; "" for none, or for several that differ."""
    given = {value for key, value in context.invocation_metadata() or () if key == AUTHORIZATION}
    return str(given.pop()) if len(given) == 1 else ""


def bearer(text: str) -> str:
    """The token in `Bearer <token>` (RFC 6750), "" for anything else."""
    scheme, _, token = text.partition(" ")
    return token if scheme.lower() == "bearer" else ""
