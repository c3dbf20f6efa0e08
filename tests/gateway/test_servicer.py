"""The public gRPC face on a real server, over a scripted source of tokens."""

import asyncio
import math
from contextlib import asynccontextmanager

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from crossdock.v1 import inference_pb2, inference_pb2_grpc
from gateway.access import Access
from gateway.request import EndReason
from gateway.servicer import InferenceServicer
from service.errors import Exhausted, Unavailable
from service.guard import Guard
from service.server import bind, create_server

EVENT_S = 10.0
REQUEST_BYTES_MAX = 100_000
METHODS = ["Generate", "GenerateStream", "Tokenize", "Detokenize", "ListModels"]


@asynccontextmanager
async def serving(frontend, *, on_refused=lambda refusal: None, **given):
    server = create_server([Guard(lambda call: None, on_refused, message_bytes_max=REQUEST_BYTES_MAX)])
    servicer = InferenceServicer(frontend, Access(), **given)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


def stub_of(channel):
    return inference_pb2_grpc.InferenceServiceStub(channel)


def stream_request(text="The capital of France is", **fields):
    return inference_pb2.GenerateStreamRequest(spec=inference_pb2.GenerationSpec(text=text, **fields))


def details_of(error):
    """The google.rpc details of a refusal, by type."""
    found = {}
    for detail in rpc_status.from_call(error).details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            if detail.Is(kind.DESCRIPTOR):
                found[kind] = kind()
                detail.Unpack(found[kind])
    return found


async def refusal_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "read"):
            async for _ in call:
                pass
        else:
            await call
    return caught.value


async def test_a_stream_starts_with_the_prompt_and_ends_with_usage(
    frontend_over, scripted, batches, tokenizer
):
    ids = [*tokenizer.encode(" Paris is"), 2]
    source = scripted(*batches(ids, end=EndReason.STOP, cached_tokens=4))
    async with serving(frontend_over(source)) as channel:
        call = stub_of(channel).GenerateStream(stream_request(request_id="mine"))
        parts = [part async for part in call]
        assert ("x-request-id", "mine") in tuple(await call.initial_metadata())
    info = inference_pb2.PromptInfo(prompt_tokens=5, cached_tokens=4, seed=7, choice_seeds=[7])
    usage = inference_pb2.Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=4)
    finish = inference_pb2.Finish(reason=inference_pb2.FINISH_REASON_STOP, eos_token_id=2)
    assert [part.HasField("prompt_info") for part in parts] == [True, False, False]
    assert [part.HasField("usage") for part in parts] == [False, False, True]
    assert parts[0].prompt_info == info and parts[-1].usage == usage
    deltas = [delta for part in parts for delta in part.deltas]
    assert "".join(delta.text for delta in deltas) == " Paris is"
    assert [token_id for delta in deltas for token_id in delta.token_ids] == ids
    assert [delta.first_position for delta in deltas] == [0, 1, 2]
    assert [delta.HasField("finish") for delta in deltas] == [False, False, True]
    assert deltas[-1].finish == finish


async def test_a_whole_answer_is_the_joined_stream(frontend_over, scripted, batches, tokenizer):
    ids = tokenizer.encode(" one two three")
    spec = inference_pb2.GenerationSpec(
        text="Count:",
        stop=inference_pb2.StopConditions(strings=["three"]),
        output=inference_pb2.OutputOptions(logprobs=2),
    )
    async with serving(frontend_over(scripted(*batches(ids, alternatives=2)))) as channel:
        call = stub_of(channel).Generate(inference_pb2.GenerateRequest(spec=spec))
        answer = await call
        assert ("x-request-id", answer.request_id) in tuple(await call.initial_metadata())
    (output,) = answer.outputs
    assert output.text == " one two " and list(output.token_ids) == ids
    assert output.finish.stop_string == "three"
    assert output.logprobs.top_count == 2
    assert list(output.logprobs.token_logprobs) == [-0.5] * 3
    assert list(output.logprobs.top_token_ids) == [
        top for token_id in ids for top in (token_id, token_id + 1)
    ]
    assert list(output.logprobs.top_logprobs) == [-0.5, -1.5] * 3
    assert answer.usage.completion_tokens == 3


async def test_logprobs_are_absent_unless_asked_for(frontend_over, scripted, batches):
    async with serving(frontend_over(scripted(*batches([500])))) as channel:
        parts = [part async for part in stub_of(channel).GenerateStream(stream_request())]
    assert not parts[0].deltas[0].HasField("logprobs")


async def test_a_refused_request_names_its_fields_and_starts_nothing(frontend_over, scripted):
    source = scripted()
    async with serving(frontend_over(source)) as channel:
        sampling = inference_pb2.SamplingParams(temperature=math.nan, n=17)
        error = await refusal_of(stub_of(channel).GenerateStream(stream_request(sampling=sampling)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = details_of(error)
    assert details[error_details_pb2.ErrorInfo].reason == "INVALID_REQUEST"
    fields = [violation.field for violation in details[error_details_pb2.BadRequest].field_violations]
    assert fields == ["sampling.temperature", "sampling.n"]
    assert source.requests == []


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"model": "other"}, grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
        ({"text": "a b " * 512}, grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED"),
    ],
)
async def test_refusals_at_the_door_have_their_status(frontend_over, scripted, fields, code, reason):
    async with serving(frontend_over(scripted())) as channel:
        error = await refusal_of(stub_of(channel).GenerateStream(stream_request(**fields)))
    assert (error.code(), details_of(error)[error_details_pb2.ErrorInfo].reason) == (code, reason)


@pytest.mark.parametrize(
    ("fields", "most", "got", "unit"),
    [
        ({"text": "a" * (16 * 512 + 1)}, 16 * 512, 16 * 512 + 1, "character"),
        ({"token_ids": inference_pb2.TokenIds(ids=[1] * 600)}, 512, 600, "token"),
        ({"token_ids": inference_pb2.TokenIds(ids=[1] * 512)}, 511, 512, "token"),
        (
            {
                "token_ids": inference_pb2.TokenIds(ids=[1] * 500),
                "sampling": inference_pb2.SamplingParams(max_tokens=13),
            },
            12,
            13,
            "token",
        ),
    ],
)
async def test_what_is_too_long_says_by_how_much(frontend_over, scripted, fields, most, got, unit):
    async with serving(frontend_over(scripted())) as channel:
        error = await refusal_of(stub_of(channel).GenerateStream(stream_request(**fields)))
    info = details_of(error)[error_details_pb2.ErrorInfo]
    assert info.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert dict(info.metadata) == {"max": str(most), "got": str(got), "unit": unit}


async def test_an_exhausted_source_says_when_to_try_again(frontend_over, scripted):
    source = scripted(Exhausted("too many live requests", retry_after_ms=1500))
    async with serving(frontend_over(source)) as channel:
        error = await refusal_of(stub_of(channel).GenerateStream(stream_request(request_id="mine")))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details_of(error)[error_details_pb2.RetryInfo].retry_delay.ToMilliseconds() == 1500
    trailing = dict(error.trailing_metadata())
    assert trailing["grpc-retry-pushback-ms"] == "1500" and trailing["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("end", "failed"),
    [(None, False), (Exhausted("full"), False), (Unavailable("gone"), True), (ZeroDivisionError(), True)],
)
async def test_every_call_ends_with_what_the_process_says_of_its_load(
    frontend_over, scripted, batches, end, failed
):
    told = []

    def trailer(*, failed):
        told.append(failed)
        return (("x-load", "heavy"),)

    steps = batches([500], end=EndReason.LENGTH) if end is None else [end]
    async with serving(frontend_over(scripted(*steps)), trailer=trailer) as channel:
        call = stub_of(channel).GenerateStream(stream_request(request_id="mine"))
        if end is None:
            assert [message async for message in call]
        else:
            await refusal_of(call)
        trailing = dict(await call.trailing_metadata())
    assert (trailing["x-load"], trailing["x-request-id"], told) == ("heavy", "mine", [failed])


@pytest.mark.parametrize(
    "fault", [RuntimeError("secret"), AssertionError("secret"), asyncio.CancelledError("secret")]
)
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_a_mistake_of_ours_is_internal_and_tells_nothing(frontend_over, scripted, fault, method):
    source = scripted()

    async def failing(request):
        raise fault
        yield

    source.run = failing
    async with serving(frontend_over(source)) as channel:
        spec = stream_request().spec
        kinds = {
            "Generate": inference_pb2.GenerateRequest,
            "GenerateStream": inference_pb2.GenerateStreamRequest,
        }
        error = await refusal_of(getattr(stub_of(channel), method)(kinds[method](spec=spec)))
    assert error.code() is grpc.StatusCode.INTERNAL and "secret" not in error.details()


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_a_client_that_cancels_closes_the_source(frontend_over, scripted, batches, method):
    source = scripted(*batches([500], end=None), asyncio.Event())
    async with serving(frontend_over(source)) as channel:
        spec = stream_request().spec
        kinds = {
            "Generate": inference_pb2.GenerateRequest,
            "GenerateStream": inference_pb2.GenerateStreamRequest,
        }
        call = getattr(stub_of(channel), method)(kinds[method](spec=spec))
        await asyncio.wait_for(source.started.wait(), EVENT_S)
        call.cancel()
        await asyncio.wait_for(source.closed.wait(), EVENT_S)


async def test_a_client_that_stops_reading_and_leaves_closes_the_source(frontend_over, scripted, batches):
    """The server is in the middle of a write, not of a wait for tokens, when the client cancels."""
    endless = batches(range(1000, 40000), end=None)
    source = scripted(*endless, asyncio.Event())
    async with serving(frontend_over(source)) as channel:
        call = stub_of(channel).GenerateStream(stream_request())
        await call.read()
        call.cancel()
        await asyncio.wait_for(source.closed.wait(), EVENT_S)


async def test_the_deadline_reaches_the_request_and_ends_it(frontend_over, scripted):
    source = scripted(asyncio.Event())
    async with serving(frontend_over(source, monotonic=lambda: 100.0)) as channel:
        error = await refusal_of(stub_of(channel).GenerateStream(stream_request(), timeout=0.5))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(source.closed.wait(), EVENT_S)
    (request,) = source.requests
    assert 100.0 < request.deadline <= 100.51, "gRPC rounds a timeout up on its way"


@pytest.mark.parametrize(
    ("method", "garbage"),
    [
        *((method, b"\xff\xff\xff") for method in METHODS),
        ("Generate", b"\x0a\x03\x12\x01\xff"),
        ("GenerateStream", b"\x0a\x03\x12\x01\xff"),
        ("Tokenize", b"\x12\x01\xff"),
    ],
)
async def test_bytes_that_are_no_message_are_an_invalid_argument(frontend_over, scripted, method, garbage):
    async with serving(frontend_over(scripted())) as channel:
        path = f"/crossdock.v1.InferenceService/{method}"
        kind = channel.unary_stream if method == "GenerateStream" else channel.unary_unary
        error = await refusal_of(kind(path)(garbage))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "DecodeError" not in error.details()


async def test_a_request_over_the_limit_is_refused_unread_with_details(frontend_over, scripted):
    garbage = b"\xff" * (REQUEST_BYTES_MAX + 1)
    async with serving(frontend_over(scripted())) as channel:
        error = await refusal_of(channel.unary_unary("/crossdock.v1.InferenceService/Generate")(garbage))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    details = details_of(error)
    assert details[error_details_pb2.ErrorInfo].reason == "REQUEST_TOO_LARGE"
    (violation,) = details[error_details_pb2.BadRequest].field_violations
    assert violation.field == "request" and str(REQUEST_BYTES_MAX) in violation.description


async def test_tokenize_and_detokenize_undo_each_other(frontend_over, scripted, tokenizer):
    async with serving(frontend_over(scripted())) as channel:
        stub = stub_of(channel)
        tokens = await stub.Tokenize(inference_pb2.TokenizeRequest(text="The capital of France is"))
        assert list(tokens.token_ids) == [504, 3575, 282, 4649, 314] and tokens.max_model_len == 512
        text = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[*tokens.token_ids, 2]))
        assert text.text == "The capital of France is"
        asked = inference_pb2.DetokenizeRequest(token_ids=[2], include_special_tokens=True)
        assert (await stub.Detokenize(asked)).text == "<|im_end|>"


async def test_tokenize_renders_a_chat(frontend_over, scripted, golden):
    (case,) = [case for case in golden if case["kind"] == "chat"][:1]
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(**m) for m in case["messages"]])
    async with serving(frontend_over(scripted())) as channel:
        tokens = await stub_of(channel).Tokenize(inference_pb2.TokenizeRequest(chat=chat))
    assert list(tokens.token_ids) == case["prompt_ids"]


@pytest.mark.parametrize(
    ("method", "request_", "code"),
    [
        ("Tokenize", inference_pb2.TokenizeRequest(model="x", text="a"), grpc.StatusCode.NOT_FOUND),
        ("Tokenize", inference_pb2.TokenizeRequest(text="a" * 9000), grpc.StatusCode.INVALID_ARGUMENT),
        (
            "Tokenize",
            inference_pb2.TokenizeRequest(chat=inference_pb2.ChatPrompt()),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        ("Detokenize", inference_pb2.DetokenizeRequest(model="x"), grpc.StatusCode.NOT_FOUND),
        ("Detokenize", inference_pb2.DetokenizeRequest(token_ids=[49152]), grpc.StatusCode.INVALID_ARGUMENT),
        (
            "Detokenize",
            inference_pb2.DetokenizeRequest(token_ids=[1] * 513),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ],
)
async def test_tokenize_and_detokenize_refuse_what_generate_would(
    frontend_over, scripted, method, request_, code
):
    async with serving(frontend_over(scripted())) as channel:
        error = await refusal_of(getattr(stub_of(channel), method)(request_))
    assert error.code() is code


async def test_the_served_model_is_listed(frontend_over, scripted):
    async with serving(frontend_over(scripted())) as channel:
        listed = await stub_of(channel).ListModels(inference_pb2.ListModelsRequest())
    assert list(listed.models) == [
        inference_pb2.Model(
            name="smol", max_model_len=512, vocab_size=49152, eos_token_ids=[2], digest="ab12"
        )
    ]


async def test_what_is_refused_for_what_it_is_is_counted(frontend_over, scripted):
    frontend, refused = frontend_over(scripted()), []
    path = "/crossdock.v1.InferenceService/Generate"
    async with serving(frontend, on_refused=refused.append) as channel:
        for data in (b"\xff" * 10, bytes(REQUEST_BYTES_MAX + 1)):
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary(path)(data)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub_of(channel).GenerateStream(stream_request(text="")).read()
    assert [refusal.reason for refusal in refused] == ["INVALID_REQUEST", "REQUEST_TOO_LARGE"]
    assert 'crossdock_requests_total{outcome="invalid_request"} 1.0' in frontend.metrics.render().decode()


@pytest.mark.parametrize(
    ("steps", "outcome"),
    [("stop", "stop"), ("refuse", "queue_full"), ("fail", "internal")],
)
async def test_every_end_is_counted_once(frontend_over, scripted, batches, steps, outcome):
    scripts = {
        "stop": [*batches([500, 2], end=EndReason.STOP)],
        "refuse": [Exhausted("full")],
        "fail": [RuntimeError("x")],
    }
    frontend = frontend_over(scripted(*scripts[steps]))
    async with serving(frontend) as channel:
        try:
            async for _ in stub_of(channel).GenerateStream(stream_request()):
                pass
        except grpc.aio.AioRpcError:
            assert steps != "stop"
    text = frontend.metrics.render().decode()
    assert f'crossdock_requests_total{{outcome="{outcome}"}} 1.0' in text
    first_token = 'crossdock_time_to_first_token_seconds_count{pool="gateway"} 1.0'
    assert (first_token in text) == (steps == "stop")
    assert 'crossdock_prompt_tokens_total{pool="gateway"} 5.0' in text
