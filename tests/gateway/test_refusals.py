"""Every call that is refused before it begins is counted once, by its reason, whichever way it came."""

import re

import grpc
import pytest

from crossdock.v1 import inference_pb2, inference_pb2_grpc
from gateway.access import Access
from gateway.servicer import InferenceServicer
from service import guard
from service.server import bind, create_server
from tests.gateway.test_servicer import stub_of

GENERATE = "/crossdock.v1.InferenceService/Generate"
JSON = {"content-type": "application/json"}


def counted(frontend):
    text = frontend.metrics.render().decode()
    found = re.findall(r'^crossdock_requests_total\{outcome="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {outcome: float(count) for outcome, count in found}


@pytest.fixture
def frontend(frontend_over, scripted, admission_of):
    """Of a gateway with room for one request."""
    return frontend_over(scripted(), admission=admission_of(requests=1))


@pytest.fixture
async def channel(frontend):
    count = frontend.metrics.count_refusal
    server = create_server([guard.Guard(lambda call: None, count, message_bytes_max=1000)])
    servicer = InferenceServicer(frontend, Access())
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


def spec(**fields):
    return inference_pb2.GenerationSpec(**{"text": "Hi", **fields})


ASKED = {
    "an answer": lambda channel: stub_of(channel).Generate(inference_pb2.GenerateRequest(spec=spec(text=""))),
    "a stream": lambda channel: (
        stub_of(channel).GenerateStream(inference_pb2.GenerateStreamRequest(spec=spec(text=""))).read()
    ),
    "a text": lambda channel: stub_of(channel).Detokenize(inference_pb2.DetokenizeRequest(token_ids=[49152])),
    "nonsense": lambda channel: channel.unary_unary(GENERATE)(b"\xff"),
    "nothing": lambda channel: channel.stream_unary(GENERATE)(iter([])),
}


@pytest.mark.parametrize("asked", ASKED)
async def test_over_grpc_what_is_no_request_is_counted(frontend, channel, asked):
    for times in (1, 2):
        with pytest.raises(grpc.aio.AioRpcError):
            await ASKED[asked](channel)
        assert counted(frontend) == {"invalid_request": times}


async def test_over_grpc_what_is_too_large_is_counted(frontend, channel):
    with pytest.raises(grpc.aio.AioRpcError):
        await channel.unary_unary(GENERATE)(bytes(1001))
    assert counted(frontend) == {"request_too_large": 1}


async def test_over_grpc_what_finds_no_room_is_counted(frontend, channel):
    request = inference_pb2.GenerateRequest(spec=spec())
    with frontend.hold(""):
        for times in (1, 2):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub_of(channel).Generate(request)
            assert counted(frontend) == {"queue_full": times}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"prompt": "Hi", "max_tokens": -1}'),
        ("/v1/completions", b"{"),
        ("/v1/chat/completions", b'{"messages": []}'),
        ("/tokenize", b"{}"),
    ],
)
async def test_over_http_what_is_no_request_is_counted(frontend, client_of, path, body):
    async with client_of(frontend) as client:
        assert (await client.post(path, content=body, headers=JSON)).status_code == 400
    assert counted(frontend) == {"invalid_request": 1}


async def test_over_http_what_finds_no_room_is_counted(frontend, client_of):
    async with client_of(frontend) as client:
        with frontend.hold(""):
            answer = await client.post("/v1/completions", content=b'{"prompt": "Hi"}', headers=JSON)
        assert answer.status_code == 429
    assert counted(frontend) == {"queue_full": 1}
