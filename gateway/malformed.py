"""Refuses what is no request of ours: garbage, invalid UTF-8, and more bytes than a request may have.

gRPC's own answers would be UNKNOWN with a Python class in its text, and a status without details. An
interceptor for the gateway's server; it looks at nothing that parses.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from service import status
from service.errors import FieldViolation, InvalidRequest, TooLarge

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]
Context = grpc.aio.ServicerContext[Any, Any]


class MalformedMessages(grpc.aio.ServerInterceptor):
    """For calls with one request message, whose handlers are coroutines; reflection's stream is left alone.

    request_bytes_max: what is larger is not parsed, since small things in a message grow when it is. on_refused: called
    for each call that is refused.
    """

    def __init__(
        self, request_bytes_max: int, on_refused: Callable[[InvalidRequest], None] = lambda refusal: None
    ) -> None:
        self._request_bytes_max = request_bytes_max
        self._on_refused = on_refused

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        streams = handler.response_streaming
        make: Any = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        behaviour: Any = handler.unary_stream if streams else handler.unary_unary
        return cast(
            Handler,
            make(
                _refusing(behaviour, self._on_refused),
                request_deserializer=_tolerant(
                    handler.request_deserializer or bytes, self._request_bytes_max
                ),
                response_serializer=handler.response_serializer,
            ),
        )


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a request that was not read."""

    error: InvalidRequest


def _tolerant(deserialize: Callable[[bytes], object], bytes_max: int) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        if len(data) > bytes_max:
            return _Malformed(TooLarge(_violation(f"at most {bytes_max} bytes")))
        try:
            return deserialize(data)
        except DecodeError:
            rule = "must be a message of this service, with valid UTF-8 in its texts"
            return _Malformed(InvalidRequest(_violation(rule)))

    return read


def _violation(rule: str) -> FieldViolation:
    return FieldViolation(field="request", description=rule)


def _refusing(
    behaviour: Callable[[Any, Context], Awaitable[Any]],
    on_refused: Callable[[InvalidRequest], None],
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def answer(request: object, context: Context) -> Any:
        if isinstance(request, _Malformed):
            on_refused(request.error)
            await status.abort(context, request.error)
        return await behaviour(request, context)

    return answer
