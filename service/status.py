"""The only table between our exceptions, gRPC statuses with google.rpc details, and HTTP answers.

Servicers call `abort`, the HTTP routes `http_status`, clients of workers `from_rpc_error`. It decides
nothing about when a request fails, logs nothing, and never puts a peer's free text into an answer of ours.

Details follow AIP-193 (ErrorInfo always, BadRequest for fields) and RetryInfo, beside which the trailing
metadata `grpc-retry-pushback-ms` (gRFC A6) steers gRPC's own retries.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from service.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    AttemptsLost,
    DeadlineExpired,
    Exhausted,
    FieldViolation,
    Incompatible,
    InternalFault,
    InvalidRequest,
    ModelNotFound,
    NotServed,
    ServiceError,
    ServiceUnknown,
    StreamLost,
    TooLarge,
    Unauthorised,
    Unavailable,
)

DOMAIN = "crossdock"
PUSHBACK_KEY = "grpc-retry-pushback-ms"

# A status travels as HTTP/2 metadata, of which 8 KiB is safe everywhere.
_VIOLATIONS_MAX = 8
_FIELD_CHARS_MAX = 128
_DESCRIPTION_CHARS_MAX = 256
_MESSAGE_CHARS_MAX = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """What one kind of error looks like outside. fallback: our text when a peer gave none that we trust."""

    code: grpc.StatusCode
    http: int
    openai_type: str
    fallback: str


_TABLE: dict[type[ServiceError], _Row] = {
    InvalidRequest: _Row(
        code=grpc.StatusCode.INVALID_ARGUMENT,
        http=400,
        openai_type="invalid_request_error",
        fallback="the request breaks a limit",
    ),
    ModelNotFound: _Row(
        code=grpc.StatusCode.NOT_FOUND,
        http=404,
        openai_type="invalid_request_error",
        fallback="no such model",
    ),
    ServiceUnknown: _Row(
        code=grpc.StatusCode.NOT_FOUND,
        http=404,
        openai_type="invalid_request_error",
        fallback="no such service",
    ),
    NotServed: _Row(
        code=grpc.StatusCode.UNIMPLEMENTED,
        http=404,
        openai_type="invalid_request_error",
        fallback="no such method",
    ),
    Incompatible: _Row(
        code=grpc.StatusCode.FAILED_PRECONDITION,
        http=500,
        openai_type="server_error",
        fallback="the two ends do not understand each other",
    ),
    Exhausted: _Row(
        code=grpc.StatusCode.RESOURCE_EXHAUSTED,
        http=429,
        openai_type="rate_limit_error",
        fallback="a limit is reached",
    ),
    TooLarge: _Row(
        code=grpc.StatusCode.RESOURCE_EXHAUSTED,
        http=413,
        openai_type="invalid_request_error",
        fallback="the request is too large",
    ),
    Unavailable: _Row(
        code=grpc.StatusCode.UNAVAILABLE,
        http=503,
        openai_type="service_unavailable_error",
        fallback="the service cannot be reached",
    ),
    StreamLost: _Row(
        code=grpc.StatusCode.ABORTED,
        http=503,
        openai_type="service_unavailable_error",
        fallback="the answer broke off",
    ),
    DeadlineExpired: _Row(
        code=grpc.StatusCode.DEADLINE_EXCEEDED,
        http=504,
        openai_type="timeout_error",
        fallback="the deadline has passed",
    ),
    Unauthorised: _Row(
        code=grpc.StatusCode.UNAUTHENTICATED,
        http=401,
        openai_type="authentication_error",
        fallback="no valid credential",
    ),
    InternalFault: _Row(
        code=grpc.StatusCode.INTERNAL,
        http=500,
        openai_type="server_error",
        fallback="internal error",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(grpc.Status):
    """A gRPC status ready to be sent."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ServiceError) -> NoReturn:
    """Ends the RPC with the error's status; trailing metadata set before is kept. Always raises."""
    status = to_status(error)
    kept = tuple(context.trailing_metadata() or ())
    await context.abort(status.code, status.details, (*kept, *status.trailing_metadata))
    raise AssertionError("abort returned")


def to_status(error: ServiceError) -> Status:
    """The gRPC status of an error, cut so that it fits into trailing metadata."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_metadata(error))
    details: list[message.Message] = [info]
    if isinstance(error, InvalidRequest) and error.violations:
        details.append(_bad_request(error.violations))
    if error.retry_after_ms is not None:
        details.append(_retry_info(error.retry_after_ms))
    rich = status_pb2.Status(
        code=_row(error).code.value[0],
        message=error.message[:_MESSAGE_CHARS_MAX],
        details=[_packed(detail) for detail in details],
    )
    plain = rpc_status.to_status(rich)
    return Status(
        code=plain.code,
        details=plain.details,
        trailing_metadata=(*plain.trailing_metadata, *_pushback(error)),
    )


def from_rpc_error(err: grpc.RpcError) -> ServiceError:
    """The exception behind a failed call. Text and reason are the peer's only where it sent our details:
    gRPC's own texts name addresses. A code outside the table is an InternalFault."""
    kinds = [kind for kind, row in _TABLE.items() if row.code is err.code()] or [InternalFault]
    rich = _rich_status(err)
    info = error_details_pb2.ErrorInfo()
    if rich is None or not _unpack(rich, info) or info.domain != DOMAIN:
        return _error(kinds[0], _TABLE[kinds[0]].fallback, ())
    kind = next((each for each in kinds if each.reason == info.reason), kinds[0])
    bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    _unpack(rich, bad)
    violations = (FieldViolation(field=v.field, description=v.description) for v in bad.field_violations)
    error = _error(kind, rich.message, tuple(violations))
    error.reason = info.reason
    error.retry_after_ms = retry.retry_delay.ToMilliseconds() if _unpack(rich, retry) else None
    return error


def _pushback(error: ServiceError) -> tuple[tuple[str, str], ...]:
    """When gRPC is to try again by itself. Never what may have cost several workers their lives, and nothing of which
    some was shown: that is for people to decide."""
    if isinstance(error, AttemptsLost | StreamLost):
        return ((PUSHBACK_KEY, "-1"),)
    return () if error.retry_after_ms is None else ((PUSHBACK_KEY, str(error.retry_after_ms)),)


def http_status(error: ServiceError) -> tuple[int, str, str]:
    """(HTTP status, OpenAI error type, OpenAI error code) of an error."""
    row = _row(error)
    return row.http, row.openai_type, error.reason.lower()


def _row(error: ServiceError) -> _Row:
    return next((_TABLE[kind] for kind in type(error).__mro__ if kind in _TABLE), _TABLE[InternalFault])


def _metadata(error: ServiceError) -> dict[str, str]:
    """By how much the context is exceeded, of the first field that exceeds it."""
    if not isinstance(error, InvalidRequest) or error.reason != CONTEXT_LENGTH_EXCEEDED:
        return {}
    excess = next((v.excess for v in error.violations if v.excess), None)
    return {} if excess is None else {"max": str(excess.most), "got": str(excess.got), "unit": excess.unit}


def _packed(detail: message.Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _bad_request(violations: tuple[FieldViolation, ...]) -> error_details_pb2.BadRequest:
    return error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(
                field=violation.field[:_FIELD_CHARS_MAX],
                description=violation.description[:_DESCRIPTION_CHARS_MAX],
            )
            for violation in violations[:_VIOLATIONS_MAX]
        ]
    )


def _retry_info(retry_after_ms: int) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(retry_after_ms)
    return error_details_pb2.RetryInfo(retry_delay=delay)


def _rich_status(err: grpc.RpcError) -> status_pb2.Status | None:
    try:
        return rpc_status.from_call(err)
    except (ValueError, message.DecodeError):  # details that contradict the status, or are not protobuf
        return None


def _unpack(rich: status_pb2.Status, into: message.Message) -> bool:
    """Fills `into` from the first detail of its type."""
    for detail in rich.details:
        if detail.Is(into.DESCRIPTOR):
            try:
                return bool(detail.Unpack(into))
            except message.DecodeError:
                return False
    return False


def _error(kind: type[ServiceError], text: str, violations: tuple[FieldViolation, ...]) -> ServiceError:
    if not issubclass(kind, InvalidRequest):
        return kind(text)
    error = kind(*violations)
    error.message = text
    error.args = (text,)
    return error
