"""Exceptions, gRPC statuses and HTTP answers: one table, both ways, over a real connection."""

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from service import status
from service.errors import (
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

TOP_P = FieldViolation(field="sampling.top_p", description="in (0, 1]")
STOP = FieldViolation(field="stop.strings", description="at most 16")

ERRORS = [
    InvalidRequest(TOP_P, STOP),
    InvalidRequest(TOP_P, reason="CONTEXT_LENGTH_EXCEEDED"),
    ModelNotFound("no model named x"),
    Exhausted("the queue is full", retry_after_ms=250),
    Exhausted("too much"),
    Unavailable("draining", reason="DRAINING", retry_after_ms=1500),
    DeadlineExpired("the deadline has passed"),
    StreamLost("nobody can go on", reason="NO_DECODE_WORKER"),
    NotServed("no such method"),
    ServiceUnknown("no such service"),
    TooLarge(FieldViolation(field="body", description="at most 10 bytes")),
    Incompatible("another version"),
    Unauthorised("no valid credential"),
    InternalFault("internal error"),
]


class Failing(grpc.GenericRpcHandler):
    """Every method fails with the error that `error` holds then."""

    error: ServiceError = InternalFault("unset")

    def service(self, handler_call_details):
        async def fail(request, context):
            context.set_trailing_metadata((("x-request-id", "r-1"),))
            await status.abort(context, self.error)

        return grpc.unary_unary_rpc_method_handler(fail)


@pytest.fixture(scope="module")
async def failing():
    """Calls a server on loopback with an error, and returns what a client then gets."""
    handler = Failing()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def call(error: ServiceError) -> grpc.aio.AioRpcError:
        handler.error = error
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary("/test.Service/Fail")(b"", timeout=10)
        return raised.value

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield call
    await server.stop(None)


def same(first: ServiceError, second: ServiceError) -> bool:
    return (
        type(first) is type(second)
        and first.message == second.message
        and first.reason == second.reason
        and first.retry_after_ms == second.retry_after_ms
        and getattr(first, "violations", ()) == getattr(second, "violations", ())
    )


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__}-{error.reason}")
async def test_an_error_comes_back_as_it_was_sent(failing, error):
    assert same(status.from_rpc_error(await failing(error)), error)


async def test_every_kind_of_error_is_tried_here():
    assert {type(error) for error in ERRORS} == {TooLarge, *ServiceError.__subclasses__()}


@pytest.mark.parametrize(
    ("error", "code", "http"),
    [
        (InvalidRequest(TOP_P), grpc.StatusCode.INVALID_ARGUMENT, (400, "invalid_request_error")),
        (ModelNotFound("m"), grpc.StatusCode.NOT_FOUND, (404, "invalid_request_error")),
        (TooLarge(TOP_P), grpc.StatusCode.RESOURCE_EXHAUSTED, (413, "invalid_request_error")),
        (Exhausted("m"), grpc.StatusCode.RESOURCE_EXHAUSTED, (429, "rate_limit_error")),
        (Unavailable("m"), grpc.StatusCode.UNAVAILABLE, (503, "service_unavailable_error")),
        (StreamLost("m"), grpc.StatusCode.ABORTED, (503, "service_unavailable_error")),
        (NotServed("m"), grpc.StatusCode.UNIMPLEMENTED, (404, "invalid_request_error")),
        (ServiceUnknown("m"), grpc.StatusCode.NOT_FOUND, (404, "invalid_request_error")),
        (Incompatible("m"), grpc.StatusCode.FAILED_PRECONDITION, (500, "server_error")),
        (DeadlineExpired("m"), grpc.StatusCode.DEADLINE_EXCEEDED, (504, "timeout_error")),
        (Unauthorised("m"), grpc.StatusCode.UNAUTHENTICATED, (401, "authentication_error")),
        (InternalFault("m"), grpc.StatusCode.INTERNAL, (500, "server_error")),
    ],
)
async def test_codes_are_those_of_the_contract(failing, error, code, http):
    assert (await failing(error)).code() is code
    assert status.http_status(error) == (*http, error.reason.lower())


async def test_details_are_google_rpc_in_our_domain(failing):
    rich = rpc_status.from_call(await failing(Exhausted("full", retry_after_ms=250)))
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert rich.details[0].Unpack(info)
    assert rich.details[1].Unpack(retry)
    assert (info.domain, info.reason) == ("crossdock", "QUEUE_FULL")
    assert retry.retry_delay.ToMilliseconds() == 250


async def test_a_delay_also_steers_grpcs_own_retries(failing):
    metadata = dict((await failing(Unavailable("draining", retry_after_ms=1500))).trailing_metadata())
    assert metadata["grpc-retry-pushback-ms"] == "1500"


@pytest.mark.parametrize("error", [AttemptsLost("every attempt was lost"), StreamLost("nobody can go on")])
async def test_what_is_not_to_be_tried_again_by_itself_says_so_everywhere(failing, error):
    failure = await failing(error)
    details = rpc_status.from_call(failure).details
    assert not any(each.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for each in details)
    assert dict(failure.trailing_metadata())["grpc-retry-pushback-ms"] == "-1"


async def test_aborting_keeps_trailing_metadata_that_was_set_before(failing):
    assert dict((await failing(ModelNotFound("m"))).trailing_metadata())["x-request-id"] == "r-1"


async def test_an_enormous_error_still_fits_into_metadata(failing):
    violations = [
        FieldViolation(field=f"stop.token_ids[{i}]" * 50, description="é" * 999) for i in range(999)
    ]
    error = status.from_rpc_error(await failing(InvalidRequest(*violations)))
    assert isinstance(error, InvalidRequest)
    assert 1 <= len(error.violations) < 999


async def test_texts_of_grpc_itself_are_not_repeated():
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary("/test.Service/Fail")(b"", timeout=10)
    assert "127.0.0.1" in raised.value.details()
    error = status.from_rpc_error(raised.value)
    assert isinstance(error, Unavailable)
    assert "127.0.0.1" not in error.message
    assert error.retry_after_ms is not None


def test_a_code_outside_the_table_is_our_own_fault():
    unknown = grpc.aio.AioRpcError(
        grpc.StatusCode.UNKNOWN, grpc.aio.Metadata(), grpc.aio.Metadata(), details="ValueError: secret"
    )
    error = status.from_rpc_error(unknown)
    assert isinstance(error, InternalFault)
    assert "secret" not in error.message


def test_details_that_are_garbage_are_ignored():
    garbage = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    error = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), garbage, details="m")
    assert isinstance(status.from_rpc_error(error), ModelNotFound)
