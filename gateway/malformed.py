"""Answers bytes that are no message of ours (garbage, invalid UTF-8) with INVALID_ARGUMENT.

gRPC's own answer would be UNKNOWN with a Python class in its text. An interceptor for the gateway's server;
it looks at nothing that parses.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from service import status
from service.errors import FieldViolation, InvalidRequest

_PACKAGE = "/crossdock.v1."

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]
Context = grpc.aio.ServicerContext[Any, Any]


class MalformedMessages(grpc.aio.ServerInterceptor):
    """For services of crossdock.v1 whose requests are single messages and whose handlers are coroutines."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_PACKAGE):
            return handler
        assert not handler.request_streaming, "public calls have one request message"
        streams = handler.response_streaming
        make: Any = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        behaviour: Any = handler.unary_stream if streams else handler.unary_unary
        return cast(
            Handler,
            make(
                _refusing(behaviour),
                request_deserializer=_tolerant(handler.request_deserializer or bytes),
                response_serializer=handler.response_serializer,
            ),
        )


class _Malformed:
    """Stands for a request that could not be read."""


def _tolerant(deserialize: Callable[[bytes], object]) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        try:
            return deserialize(data)
        except DecodeError:
            return _Malformed()

    return read


def _refusing(
    behaviour: Callable[[Any, Context], Awaitable[Any]],
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def answer(request: object, context: Context) -> Any:
        if isinstance(request, _Malformed):
            rule = "must be a message of this service, with valid UTF-8 in its texts"
            await status.abort(context, InvalidRequest(FieldViolation(field="request", description=rule)))
        return await behaviour(request, context)

    return answer
