"""Answers that end before their end, over gRPC: whether whoever asked is invited to ask again."""

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2

from crossdock.v1 import inference_pb2
from gateway import patience
from service.errors import AttemptsLost, DeadlineExpired, Ending, Exhausted, InternalFault, Unavailable
from tests.gateway.test_servicer import EVENT_S, details_of, refusal_of, serving, stream_request, stub_of


@pytest.mark.parametrize(
    ("end", "code", "reason"),
    [
        (Unavailable("gone", reason="NO_DECODE_WORKER"), grpc.StatusCode.ABORTED, "NO_DECODE_WORKER"),
        (Ending(), grpc.StatusCode.ABORTED, "DRAINING"),
        (AttemptsLost("every attempt was lost"), grpc.StatusCode.ABORTED, "ATTEMPTS_LOST"),
        (Exhausted("full", retry_after_ms=9), grpc.StatusCode.ABORTED, "QUEUE_FULL"),
        (DeadlineExpired("late"), grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXPIRED"),
        (InternalFault("broken"), grpc.StatusCode.INTERNAL, "INTERNAL"),
    ],
)
async def test_after_the_first_tokens_nobody_is_invited_to_try_again(
    frontend_over, scripted, batches, end, code, reason
):
    source = scripted(*batches([500], end=None), end)
    async with serving(frontend_over(source)) as channel:
        call = stub_of(channel).GenerateStream(stream_request())
        assert (await call.read()).deltas[0].token_ids == [500]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    error, details = caught.value, details_of(caught.value)
    assert (error.code(), details[error_details_pb2.ErrorInfo].reason) == (code, reason)
    assert error_details_pb2.RetryInfo not in details
    assert dict(error.trailing_metadata()).get("grpc-retry-pushback-ms") in (None, "-1")


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_before_anything_is_shown_another_try_is_welcome(frontend_over, scripted, batches, method):
    """A whole answer is shown when it is complete: tokens that were made before count for nothing."""
    made = [] if method == "GenerateStream" else batches([500], end=None)
    source = scripted(*made, Unavailable("gone", retry_after_ms=70))
    async with serving(frontend_over(source)) as channel:
        request = getattr(inference_pb2, f"{method}Request")(spec=stream_request().spec)
        error = await refusal_of(getattr(stub_of(channel), method)(request))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert details_of(error)[error_details_pb2.RetryInfo].retry_delay.ToMilliseconds() == 70


async def test_a_stream_that_is_not_read_is_given_up(frontend_over, scripted, batches, monkeypatch):
    monkeypatch.setattr(patience, "STALL_S", 0.3)
    source = scripted(*batches([500] * 2_000_000, size=20_000, end=None), asyncio.Event())
    async with serving(frontend_over(source)) as channel:
        call = stub_of(channel).GenerateStream(stream_request())
        await asyncio.wait_for(source.closed.wait(), EVENT_S)
        error = await refusal_of(call)
    assert error.code() is grpc.StatusCode.ABORTED
    assert details_of(error)[error_details_pb2.ErrorInfo].reason == "CLIENT_STALLED"
