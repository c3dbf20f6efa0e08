"""Whatever a client asks wrongly, it is told at once what and by how much, and nobody else notices."""

import asyncio
import json
import math
import re
from contextlib import suppress

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from crossdock.v1 import inference_pb2
from tests.e2e.conftest import spec, stream, tokens_of, undisturbed

VOCAB, LENGTH, REQUEST_BYTES_MAX = 49152, 8192, 4 << 20
SMALLEST = 5e-324
INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
METHODS = {
    "Generate": inference_pb2.GenerateRequest,
    "GenerateStream": inference_pb2.GenerateStreamRequest,
}
# What a peer could learn of this machine: addresses in memory, files, places in the code.
REVEALING = re.compile(r"0x[0-9a-f]|Traceback|File \"|\.py\b|(/[\w.-]+){2}")


def sampling(**fields):
    return spec("hi", sampling=fields)


def stop(**fields):
    return spec("hi", stop=inference_pb2.StopConditions(**fields))


def chat(*messages):
    given = [inference_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    return inference_pb2.GenerationSpec(chat=inference_pb2.ChatPrompt(messages=given))


NUMBERS = [
    ("temperature", "[0, 2]", [-SMALLEST, 2.0000001, math.nan, math.inf, -math.inf]),
    ("top_p", "(0, 1]", [0, -1, 1.0000001, math.nan, math.inf]),
    ("min_p", "[0, 1]", [-SMALLEST, 1.0000001, math.nan, -math.inf]),
    ("top_k", f"[0, {VOCAB}]", [-1, VOCAB + 1, 2**31 - 1, -(2**31)]),
    ("max_tokens", f"[1, {LENGTH}]", [-1, LENGTH + 1, 2**31 - 1, -(2**31)]),
    ("max_tokens", "at least 1", [0]),
    ("min_tokens", f"[0, {LENGTH}]", [-1, LENGTH + 1, 2**31 - 1]),
    ("n", "must be in [1, 16]", [0, -1, 17, 2**31 - 1]),
    ("presence_penalty", "[-2, 2]", [-2.1, 2.1, math.nan, math.inf]),
    ("frequency_penalty", "[-2, 2]", [-2.1, 2.1, math.nan, -math.inf]),
    ("repetition_penalty", "(0, 2]", [0, -1, 2.1, math.nan, math.inf]),
    ("logit_bias", "at most 300", [dict.fromkeys(range(301), 1), dict.fromkeys(range(200_000), math.nan)]),
    ("logit_bias", f"[0, {VOCAB})", [{VOCAB: 1}, {2**32 - 1: 1}]),
    ("logit_bias", "[-100, 100]", [{5: 100.1}, {5: math.nan}, {5: -math.inf}]),
]
# What is asked, the field that is named, and how its limit is put.
INVALID_SPECS = [
    *(
        (sampling(**{name: bad}), f"sampling.{name}", rule)
        for name, rule, values in NUMBERS
        for bad in values
    ),
    (sampling(max_tokens=3, min_tokens=4), "sampling.min_tokens", "[0, 3]"),
    (inference_pb2.GenerationSpec(), "prompt", "is required"),
    (spec(""), "text", "at least one token"),
    (spec("a b c d" * LENGTH), "text", f"at most {LENGTH}"),
    (spec("a" * (16 * LENGTH + 1)), "text", f"at most {16 * LENGTH} characters"),
    (spec([]), "token_ids.ids", "at least one token"),
    (spec([VOCAB]), "token_ids.ids", f"[0, {VOCAB})"),
    (spec([5, VOCAB + 1, 5]), "token_ids.ids", f"[0, {VOCAB})"),
    (spec([2**32 - 1]), "token_ids.ids", f"[0, {VOCAB})"),
    (spec([5] * LENGTH), "token_ids.ids", f"at most {LENGTH}"),
    (spec([5] * (LENGTH + 1)), "token_ids.ids", f"at most {LENGTH}"),
    (spec([5] * 100, sampling={"max_tokens": LENGTH - 99}), "sampling.max_tokens", f"[1, {LENGTH - 100}]"),
    (chat(), "chat.messages", "at least one message"),
    (chat(("user", "hi"), ("", "hi")), "chat.messages[1].role", "1 to 64 bytes"),
    (chat(("r" * 65, "hi")), "chat.messages[0].role", "1 to 64 bytes"),
    (chat(("user", "a" * (16 * LENGTH))), "chat.messages", f"at most {16 * LENGTH} characters"),
    (chat(*[("user", "")] * (LENGTH + 1)), "chat.messages", f"at most {LENGTH} messages"),
    (stop(strings=["x"] * 17), "stop.strings", "at most 16"),
    (stop(strings=["x"] * 10_000), "stop.strings", "at most 16"),
    (stop(strings=["x", ""]), "stop.strings[1]", "1 to 256 bytes"),
    (stop(strings=["x" * 1_000_000]), "stop.strings[0]", "1 to 256 bytes"),
    (stop(token_ids=[5] * 65), "stop.token_ids", "at most 64"),
    (stop(token_ids=[VOCAB]), "stop.token_ids", f"[0, {VOCAB})"),
    (stop(token_ids=[2**32 - 1]), "stop.token_ids", f"[0, {VOCAB})"),
    *(
        (spec("hi", output=inference_pb2.OutputOptions(logprobs=bad)), "output.logprobs", "[0, 20]")
        for bad in (-1, 21, VOCAB, 2**31 - 1)
    ),
    (spec("hi", request_id="x" * 129), "request_id", "at most 128 characters"),
    *((spec("hi", request_id=bad), "request_id", "printable ASCII") for bad in ("é", "a\nb")),
    (spec("hi", model="m" * 257), "model", "at most 256 bytes"),
]
# At the edge, but inside: these are served.
SERVED_SPECS = [
    *(sampling(temperature=value, seed=1) for value in (SMALLEST, 1e-300, 1e-40, 2)),
    *(sampling(temperature=1, top_p=value) for value in (SMALLEST, 1e-40)),
    sampling(temperature=2, min_p=1, top_p=SMALLEST, top_k=1),
    *(sampling(repetition_penalty=value, temperature=1, seed=1) for value in (SMALLEST, 2)),
    *(
        sampling(presence_penalty=value, frequency_penalty=value, logit_bias={VOCAB - 1: 50 * value})
        for value in (-2, 2)
    ),
    sampling(logit_bias=dict.fromkeys(range(300), -100)),
    *(sampling(temperature=1, top_k=value) for value in (0, 1, VOCAB)),
    *(sampling(temperature=1, seed=value) for value in (2**63 - 1, -(2**63))),
    spec([0]),
    spec([VOCAB - 1]),
    stop(token_ids=[VOCAB - 1] * 64, strings=["x" * 256] * 16),
    chat(("wizard", "hi")),
]
TEXT = b"@@@@"
NO_TEXT = b"\xff\xfe\xfd\xfc"
NO_MESSAGES = [
    *(
        METHODS["Generate"](spec=asked).SerializeToString().replace(TEXT, NO_TEXT)
        for asked in (
            spec(TEXT.decode()),
            spec("hi", model=TEXT.decode()),
            spec("hi", request_id=TEXT.decode()),
            stop(strings=[TEXT.decode()]),
            chat((TEXT.decode(), "hi")),
            chat(("user", TEXT.decode())),
        )
    ),
    b"\xff" * 100,
    b"\x0a\x7f",
    b"\x0b" * 100_000,
]


def explained(error, code):
    """field -> rule, from the details of a refusal with this code. Nothing in it tells of this machine."""
    assert error.code() is code, error
    assert not REVEALING.search(f"{error.details()} {error.trailing_metadata()}"), error
    rich, info, bad = (
        rpc_status.from_call(error),
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
    )
    assert rich.details[0].Unpack(info), "ErrorInfo comes first"
    assert info.domain == "crossdock" and re.fullmatch(r"[A-Z][A-Z_]{0,62}", info.reason)
    if code is not grpc.StatusCode.NOT_FOUND:
        assert rich.details[1].Unpack(bad)
    assert not REVEALING.search(str(info) + str(bad)), error
    return {violation.field: violation.description for violation in bad.field_violations}


async def refusal(channel, method, request):
    """The error of one public call. request: a message, or bytes as they are."""
    data = request if isinstance(request, bytes) else request.SerializeToString()
    path = f"/crossdock.v1.InferenceService/{method}"
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        if method == "GenerateStream":
            await channel.unary_stream(path)(data, timeout=30).read()
        else:
            await channel.unary_unary(path)(data, timeout=30)
    return raised.value


def computed(stack):
    """Tokens so far, by all workers."""
    return sum(ledger.tokens.computed for ledger in stack.idle_ledgers())


def cost(answer):
    """Tokens that are computed for an answer: all but those of the cache, and but its last one."""
    usage = answer.usage
    return usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens - 1


async def test_every_invalid_field_is_named_with_its_limit_and_reaches_no_worker(exact_stack):
    before = computed(exact_stack)
    async with undisturbed(exact_stack) as answers, grpc.aio.insecure_channel(exact_stack.grpc) as channel:
        for asked, field, rule in INVALID_SPECS:
            for method, request in METHODS.items():
                fields = explained(await refusal(channel, method, request(spec=asked)), INVALID)
                assert rule in fields.get(field, ""), (str(asked)[:200], fields)
    assert computed(exact_stack) == before + sum(map(cost, answers)), "the neighbour's, and no other"


async def test_what_is_no_message_unknown_or_too_large_is_refused_with_details(exact_stack):
    """Case 80 among them."""
    async with undisturbed(exact_stack), grpc.aio.insecure_channel(exact_stack.grpc) as channel:
        for method, request in METHODS.items():
            for data in NO_MESSAGES:
                assert "UTF-8" in explained(await refusal(channel, method, data), INVALID)["request"]
            unknown = await refusal(channel, method, request(spec=spec("hi", model="other")))
            assert explained(unknown, grpc.StatusCode.NOT_FOUND) == {} and "model" in unknown.details()
            large = await refusal(channel, method, request(spec=spec("x" * REQUEST_BYTES_MAX)))
            assert str(REQUEST_BYTES_MAX) in explained(large, EXHAUSTED)["request"]
        for method, request, field in (
            ("Tokenize", inference_pb2.TokenizeRequest(text="x" * (16 * LENGTH + 1)), "text"),
            ("Tokenize", inference_pb2.TokenizeRequest(chat=chat().chat), "chat.messages"),
            ("Detokenize", inference_pb2.DetokenizeRequest(token_ids=[VOCAB]), "token_ids"),
            ("Detokenize", inference_pb2.DetokenizeRequest(token_ids=[5] * (LENGTH + 1)), "token_ids"),
        ):
            assert field in explained(await refusal(channel, method, request), INVALID)


async def test_what_grpc_itself_refuses_has_its_status_and_hurts_nobody(exact_stack):
    """Messages far over the limit, compressed ones and endless metadata are never read."""
    unlimited = [("grpc.max_send_message_length", -1)]
    bomb = METHODS["Generate"](spec=spec("x" * (64 << 20))).SerializeToString()
    path = "/crossdock.v1.InferenceService/Generate"
    async with undisturbed(exact_stack):
        for given, code in (
            ({"compression": grpc.Compression.Gzip}, grpc.StatusCode.UNIMPLEMENTED),
            ({}, EXHAUSTED),
            ({"metadata": (("x-filler", "x" * 65_536),)}, EXHAUSTED),
            ({"metadata": (("x-filler", "x" * (16 << 20)),)}, EXHAUSTED),
        ):
            async with grpc.aio.insecure_channel(exact_stack.grpc, options=unlimited) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await channel.unary_unary(path)(b"" if "metadata" in given else bomb, timeout=30, **given)
            assert raised.value.code() is code, raised.value
            assert "x" * 100 not in raised.value.details()


async def test_what_is_just_inside_its_limits_is_served(exact_stack):
    async with undisturbed(exact_stack), grpc.aio.insecure_channel(exact_stack.grpc) as channel:
        for asked in SERVED_SPECS:
            asked.sampling.max_tokens = 2
            asked.output.logprobs = 20
            asked.stop.ignore_eos = True
            answer = await stream(channel, asked)
            assert len(answer.token_ids) == 2 and all(0 <= each < VOCAB for each in answer.token_ids), asked
            assert all(math.isfinite(each) and each <= 0 for each in answer.logprobs), asked


JSON = {"content-type": "application/json"}
DEEP = b"[" * 100_000 + b"]" * 100_000
HTTP_BODIES = [
    (b"", "body", "JSON"),
    (b"{", "body", "JSON"),
    (b"[]", "body", "JSON object"),
    (b'{"prompt": "\xff"}', "body", "UTF-8"),
    (b'{"prompt": "hi", "temperature": NaN}', "body", "JSON"),
    (b'{"prompt": ' + DEEP + b"}", "body", "JSON"),
    (b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", "prompt", "must be"),
    (b"{}", "prompt", "must be"),
    (b'{"prompt": ""}', "prompt", "at least one token"),
    (b'{"prompt": [49152]}', "prompt", f"[0, {VOCAB})"),
    (b'{"prompt": [4294967296]}', "prompt", "must be"),
    (b'{"prompt": "hi", "max_tokens": 0}', "max_tokens", "at least 1"),
    (b'{"prompt": "hi", "max_tokens": 2147483647}', "max_tokens", f"[1, {LENGTH}]"),
    (b'{"prompt": "hi", "max_tokens": 9223372036854775807}', "max_tokens", "32 bits"),
    (b'{"prompt": "hi", "max_tokens": "5"}', "max_tokens", "whole number"),
    (b'{"prompt": "hi", "temperature": 2.5}', "temperature", "[0, 2]"),
    (b'{"prompt": "hi", "top_p": 1e308}', "top_p", "(0, 1]"),
    (b'{"prompt": "hi", "logprobs": 21}', "logprobs", "[0, 20]"),
    (b'{"prompt": "hi", "n": 17}', "n", "must be in [1, 16]"),
    (b'{"prompt": "hi", "stop": [""]}', "stop[0]", "1 to 256 bytes"),
    (b'{"prompt": "hi", "stop_token_ids": [49152]}', "stop_token_ids", f"[0, {VOCAB})"),
    (b'{"prompt": "hi", "stream": "yes"}', "stream", "true or false"),
]
HTTP_CHATS = [
    (b'{"messages": []}', "messages", "at least one message"),
    (b'{"messages": [{"role": "", "content": "x"}]}', "messages[0].role", "1 to 64 bytes"),
    (b'{"messages": [{"role": "user", "content": [[[]]]}]}', "messages[0].content", "list of objects"),
    (b'{"messages": [{"role": "user", "content": ' + DEEP + b"}]}", "body", "JSON"),
]


def told(response, status):
    """The error object of a refusal. Nothing in it tells of this machine."""
    assert response.status_code == status, response.text
    assert not REVEALING.search(response.text)
    return response.json()["error"]


async def test_every_mistake_over_http_is_an_error_object_that_names_field_and_limit(exact_stack):
    before = computed(exact_stack)
    async with undisturbed(exact_stack) as answers, httpx.AsyncClient(base_url=exact_stack.http) as client:
        for path, bodies in (("/v1/completions", HTTP_BODIES), ("/v1/chat/completions", HTTP_CHATS)):
            for body, field, rule in bodies:
                error = told(await client.post(path, content=body, headers=JSON), 400)
                assert error["type"] == "invalid_request_error"
                assert error["param"] == field and rule in error["message"], (body[:200], error)
        fine = b'{"prompt": "hi", "max_tokens": 1}'
        plain = await client.post("/v1/completions", content=fine, headers={"content-type": "text/plain"})
        assert "application/json" in told(plain, 415)["message"]
        unknown = await client.post("/v1/completions", json={"model": "other", "prompt": "hi"})
        assert told(unknown, 404)["code"] == "model_not_found"
        huge = await client.post("/v1/completions", content=b" " * (REQUEST_BYTES_MAX + 1), headers=JSON)
        assert str(REQUEST_BYTES_MAX) in told(huge, 413)["message"]
        assert told(await client.get("/v1/nothing"), 404)["message"]
    assert computed(exact_stack) == before + sum(map(cost, answers)), "the neighbour's, and no other"


async def cut_off(stack, sent):
    """What comes over a connection of raw HTTP until the other end hangs up."""
    host, port = stack.http.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    try:
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * 70_000,
        b"GET /health HTTP/1.1\r\nx-filler: " + b"x" * 70_000,
        b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 12_000,
    ],
    ids=["address", "header", "headers"],
)
async def test_an_http_head_without_end_is_cut_off_at_its_limit(exact_stack, head):
    answer = await cut_off(exact_stack, head)
    assert answer.startswith(b"HTTP/1.1 431 ") and b"65536" in answer


async def test_http_trailers_without_end_are_cut_off(exact_stack):
    head = b"POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with suppress(ConnectionResetError):
        assert await cut_off(exact_stack, head + b"1\r\n{\r\n0\r\nx: " + b"x" * 600_000) == b""


async def test_what_is_no_http_is_an_error_object(exact_stack):
    answer = await cut_off(exact_stack, b"\x16\x03\x01 hello\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["message"]


async def test_what_the_pool_can_never_hold_is_refused_with_the_numbers(small_stack):
    """Case 54."""
    async with grpc.aio.insecure_channel(small_stack.grpc) as channel:
        for asked, field, rule in (
            (spec([5] * 641), "token_ids.ids", "at most 640"),
            (spec([5] * 640), "token_ids.ids", "at most 640"),
            (spec("a b c d" * 640), "text", "at most 640"),
            (spec([5] * 100, sampling={"max_tokens": 541}), "sampling.max_tokens", "[1, 540]"),
            (spec("hi", sampling={"max_tokens": 641}), "sampling.max_tokens", "[1, 640]"),
        ):
            for method, request in METHODS.items():
                fields = explained(await refusal(channel, method, request(spec=asked)), INVALID)
                assert rule in fields[field]
    async with httpx.AsyncClient(base_url=small_stack.http) as client:
        long = await client.post("/v1/completions", json={"prompt": [5] * 600, "max_tokens": 41})
    error = told(long, 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "max_tokens"
    assert "[1, 40]" in error["message"]


async def test_what_fills_the_pool_to_its_last_token_is_served_exactly(exact_stack, small_stack):
    asked = spec(
        tokens_of(21, 600),
        sampling={"max_tokens": 40, "temperature": 0.8, "seed": 3},
        stop=inference_pb2.StopConditions(ignore_eos=True),
        output=inference_pb2.OutputOptions(logprobs=0),
    )
    answers = []
    for stack in (exact_stack, small_stack):
        async with grpc.aio.insecure_channel(stack.grpc) as channel:
            answers.append(await stream(channel, asked))
    assert len(answers[1].token_ids) == 40
    assert (answers[0].token_ids, answers[0].logprobs) == (answers[1].token_ids, answers[1].logprobs)
    small_stack.idle_ledgers()
