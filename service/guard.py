"""Asks about every call before it is served: one interceptor for all methods of a server, whatever they are.

What a call must bring is the caller's to say. A message is not even read before the answer; no method can be forgotten,
since none is named here but those that are open to everybody, and these get little: small messages, at once. What
nobody serves, and what is no message of the method, is refused here, with our details: gRPC's own answers would be a
status without them, or UNKNOWN with a Python class in its text.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from service import status
from service.errors import DeadlineExpired, FieldViolation, InvalidRequest, NotServed, ServiceError, TooLarge

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]
Context = grpc.aio.ServicerContext[Any, Any]

AUTHORIZATION = "authorization"
OPEN_METHODS = ("/grpc.health.v1.Health/",)
"""Of every server of ours, for everybody: what balancers ask."""
OPEN_MESSAGE_BYTES_MAX = 1024
OPEN_MESSAGE_S = 2.0
MESSAGE_S = 30.0
"""From a call's head to the end of its message: gRPC takes in all of it, however long, before anybody sees its size."""

_NAMES = ("x509_subject_alternative_name", "x509_common_name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """method: /package.Service/Method. authorization: that metadata as it came, "" for none. identities: names
    in the peer's certificate, if it brought one that we trust. Where it comes from is no credential."""

    method: str
    authorization: str
    identities: tuple[str, ...]


Check = Callable[[Call], None]
"""Raises Unauthorised for a call that must not be served."""


class Guard(grpc.aio.ServerInterceptor):
    """The outermost interceptor of a server. A ServiceError that leaves a call is how it ends.

    message_bytes_max: what is larger is not parsed, since small things in a message grow when it is; None for what
    the server takes in. on_refused: told of each call whose message did not come, or was none; of those without a
    right, `check` knows, and those that are open to everybody are nobody's.
    """

    def __init__(
        self,
        check: Check,
        on_refused: Callable[[ServiceError], None] = lambda error: None,
        *,
        message_bytes_max: int | None = None,
    ) -> None:
        self._check = check
        self._on_refused = on_refused
        self._message_bytes_max = message_bytes_max

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """To gRPC every method takes a stream of messages: the one of any other it would read before it asks us."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return _NO_METHOD
        make: Any = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return cast(
            Handler,
            make(
                self._guarded(handler_call_details.method, handler),
                response_serializer=handler.response_serializer,
            ),
        )

    def _guarded(self, method: str, handler: "grpc.RpcMethodHandler[Any, Any]") -> Callable[..., Any]:
        is_open = method.startswith(OPEN_METHODS)
        bytes_max = OPEN_MESSAGE_BYTES_MAX if is_open else self._message_bytes_max
        behaviour, parse = _behaviour(handler), _parser(handler, bytes_max)

        async def enter(messages: Any, context: Context) -> Any:
            """What the behaviour gets, once it is known that it may."""
            self._check(call_of(method, context))
            if handler.request_streaming:
                return _parsed(messages, parse)
            try:
                return parse(await _message(context, OPEN_MESSAGE_S if is_open else MESSAGE_S))
            except ServiceError as error:
                if not is_open:
                    self._on_refused(error)
                raise

        async def generate(messages: Any, context: Context) -> Any:
            try:
                async for response in behaviour(await enter(messages, context), context):
                    yield response
            except ServiceError as error:
                await status.abort(context, error)

        async def answer(messages: Any, context: Context) -> Any:
            try:
                return await behaviour(await enter(messages, context), context)
            except ServiceError as error:
                await status.abort(context, error)

        return generate if inspect.isasyncgenfunction(behaviour) else answer


def _behaviour(handler: "grpc.RpcMethodHandler[Any, Any]") -> Any:
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    return next(each for each in kinds if each is not None)


async def _message(context: Context, seconds: float) -> bytes:
    """The one message of a call. Raises ServiceError when it does not come."""
    try:
        async with asyncio.timeout(seconds):
            message = await context.read()
    except TimeoutError:
        raise DeadlineExpired(f"the request did not arrive whole within {seconds:g} seconds") from None
    if message is grpc.aio.EOF:
        raise InvalidRequest(_violation("is missing"))
    return cast(bytes, message)


def _parser(handler: "grpc.RpcMethodHandler[Any, Any]", bytes_max: int | None) -> Callable[[bytes], Any]:
    """From the bytes of a message to what the behaviour gets. Raises InvalidRequest."""
    deserialize: Callable[[bytes], Any] = handler.request_deserializer or bytes

    def parse(message: bytes) -> Any:
        if bytes_max is not None and len(message) > bytes_max:
            raise TooLarge(_violation(f"at most {bytes_max} bytes"))
        try:
            return deserialize(message)
        except DecodeError:
            rule = "must be a message of this service, with valid UTF-8 in its texts"
            raise InvalidRequest(_violation(rule)) from None

    return parse


async def _parsed(messages: AsyncIterator[bytes], parse: Callable[[bytes], Any]) -> AsyncIterator[Any]:
    async for message in messages:
        yield parse(message)


def _violation(rule: str) -> FieldViolation:
    return FieldViolation(field="request", description=rule)


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
