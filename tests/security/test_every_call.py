"""Whatever can be called, called without a right to: methods come from the contracts, paths from the application, and
that no other methods are there from the sources."""

import asyncio
import json
import re
import socket

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from smg_grpc_proto import vllm_engine_pb2

from crossdock.v1 import control_pb2, control_pb2_grpc, inference_pb2
from crossdock.worker.v1 import worker_pb2
from gateway.openai_http import openai_app
from tests.e2e.conftest import ROOT, crossdock
from tests.security.conftest import CONTROL_TOKEN

UNAUTHENTICATED, OK = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.OK
REFLECTIONS = [f"/grpc.reflection.{each}.ServerReflection/ServerReflectionInfo" for each in ("v1", "v1alpha")]


def methods(contract, *services):
    """Every method of a contract, or of some services of it."""
    return [
        f"/{service.full_name}/{method.name}"
        for name, service in contract.DESCRIPTOR.services_by_name.items()
        if not services or name in services
        for method in service.methods
    ]


LOAD = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"
PLACES = {
    "gateway": [
        *methods(inference_pb2),
        *methods(vllm_engine_pb2),
        *methods(control_pb2),
        *REFLECTIONS,
        LOAD,
    ],
    "p": [*methods(worker_pb2, "PrefillService"), LOAD],
    "d": [*methods(worker_pb2, "DecodeService"), LOAD],
}
OPEN = methods(health_pb2)
"""In every place, to everybody."""
REGISTRATIONS = {
    "add_InferenceServiceServicer_to_server": methods(inference_pb2),
    "add_VllmEngineServicer_to_server": methods(vllm_engine_pb2),
    "add_ControlServiceServicer_to_server": methods(control_pb2),
    "add_PrefillServiceServicer_to_server": methods(worker_pb2, "PrefillService"),
    "add_DecodeServiceServicer_to_server": methods(worker_pb2, "DecodeService"),
    "add_HealthServicer_to_server": OPEN,
    "add_generic_rpc_handlers": [*REFLECTIONS, LOAD],
}
"""All that puts methods on a server of ours, and which."""
STREAMED = {*REFLECTIONS} | {
    f"/{service.full_name}/{method.name}"
    for contract in (inference_pb2, vllm_engine_pb2, control_pb2, worker_pb2)
    for service in contract.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.client_streaming
}
NOT_SERVED = ("tests", "benchmarks", "crossdock", ".venv")
KEYS = ["", "nonsense", "cdk_0123456789abcdef_" + "A" * 43]


def call(channel, method, key="", message=b"", *, refused=True):
    """A stream that is to be refused begins without a message: gRPC's own client takes a stream that ends while it
    writes for an internal error, whatever the status is."""
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    if method in STREAMED:
        messages = None if refused else iter([message])
        return channel.stream_stream(method)(messages, timeout=20, metadata=metadata)
    return channel.unary_stream(method)(message, timeout=20, metadata=metadata)


def test_no_method_is_served_that_is_not_called_here():
    """SEC-07."""
    sources = [path for path in ROOT.glob("*/**/*.py") if path.parts[len(ROOT.parts)] not in NOT_SERVED]
    calls = re.compile(r"\b(add_\w+_to_server|add_generic_rpc_handlers)\(")
    assert {name for path in sources for name in calls.findall(path.read_text("utf-8"))} == set(REGISTRATIONS)
    called = {*OPEN, *(method for place in PLACES.values() for method in place)}
    assert {method for methods in REGISTRATIONS.values() for method in methods} == called


@pytest.mark.parametrize("place", PLACES)
async def test_every_method_without_a_right_to_it_is_unauthenticated(stack, code_of, place):
    """SEC-07."""
    assert len(PLACES[place]) >= 1
    async with stack.channel(place) as channel:
        for method in PLACES[place]:
            for key in KEYS:
                assert await code_of(call(channel, method, key)) is UNAUTHENTICATED, (method, key)


async def test_a_refusal_has_its_reason_and_never_reads_the_message(stack):
    """SEC-07. What is no message at all is refused for its missing key."""
    async with stack.channel() as channel:
        refused = call(channel, "/crossdock.v1.InferenceService/Generate", message=b"\xff" * 1000)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await refused.read()
    info = error_details_pb2.ErrorInfo()
    (detail,) = rpc_status.from_call(raised.value).details
    assert detail.Unpack(info) and (info.reason, info.domain) == ("UNAUTHORISED", "crossdock")


async def test_health_is_for_everybody(stack, code_of):
    for place in PLACES:
        async with stack.channel(place) as channel:
            for method in OPEN:
                assert await code_of(call(channel, method)) is OK


async def test_a_tenants_key_opens_no_control_method_and_no_worker(stack, code_of):
    """SEC-07."""
    closed = {"gateway": methods(control_pb2), "p": PLACES["p"], "d": PLACES["d"]}
    for place, names in closed.items():
        async with stack.channel(place) as channel:
            for method in names:
                assert await code_of(call(channel, method, stack.keys["acme"])) is UNAUTHENTICATED
                if place != "gateway":
                    assert await code_of(call(channel, method, CONTROL_TOKEN)) is UNAUTHENTICATED


async def test_how_busy_a_gateway_is_may_know_who_has_any_right_to_call_it(stack, code_of):
    async with stack.channel() as channel:
        for key in (stack.keys["acme"], CONTROL_TOKEN):
            assert await code_of(call(channel, LOAD, key)) is OK


async def test_a_key_is_told_which_methods_of_vllms_service_are_not_served(stack, code_of):
    async with stack.channel() as channel:
        for name in ("Embed", "FlushCache", "StartProfile", "SubscribeKvEvents"):
            method = f"/vllm.grpc.engine.VllmEngine/{name}"
            assert await code_of(call(channel, method, stack.keys["acme"])) is grpc.StatusCode.UNIMPLEMENTED


async def test_operators_come_by_token_or_by_certificate(stack, code_of):
    operator = {"certificate": stack.operator.pem(), "private_key": stack.operator.key.read_bytes()}
    for who, key in (({}, CONTROL_TOKEN), (operator, "")):
        async with stack.channel(**who) as channel:
            for method in (methods(control_pb2)[0], *REFLECTIONS):
                code = await code_of(call(channel, method, key, refused=False))
                assert code in (OK, grpc.StatusCode.INVALID_ARGUMENT)
            assert await code_of(call(channel, PLACES["gateway"][0], key)) is UNAUTHENTICATED


async def test_reflection_is_for_those_who_have_any_key(stack):
    async with stack.channel() as channel:
        asked = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]),
            metadata=stack.credentials(stack.keys["acme"]).metadata(),
        )
        names = {each.name for each in (await asked.read()).list_services_response.service}
        asked.cancel()
    assert "crossdock.v1.InferenceService" in names


def test_every_path_without_a_key_is_an_error_object(stack):
    """SEC-07. Paths that nobody serves are not told apart."""
    served = {route.path for route in openai_app(None, None, body_bytes_max=1).routes}
    open_paths = {"/health", "/ping", "/version"}
    for path in (served | {"/invocations", "/v1/secret", "//health", "/health/../v1/models"}) - open_paths:
        for key in KEYS:
            status, headers, body = stack.http(path, {}, key)
            assert (status, headers["www-authenticate"]) == (401, "Bearer"), path
            assert headers["x-request-id"]
            error = json.loads(body)["error"]
            assert (error["type"], error["code"]) == ("authentication_error", "unauthorised")
    for path in open_paths:
        assert stack.http(path)[0] == 200


def test_a_key_opens_answers_over_http_and_metrics_are_the_operators(stack):
    key = stack.keys["acme"]
    status, _, body = stack.http("/v1/completions", {"prompt": [5, 6], "max_tokens": 2}, key)
    assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 2
    assert stack.http("/v1/models", key=key)[0] == 200
    assert [stack.http("/metrics", key=each)[0] for each in (key, "", CONTROL_TOKEN)] == [401, 401, 200]
    assert b'crossdock_requests_total{outcome="unauthorised"}' in stack.http("/metrics", key=CONTROL_TOKEN)[2]


@pytest.mark.parametrize("place", PLACES)
async def test_without_a_certificate_of_ours_no_call_gets_through(stack, code_of, place, tmp_path):
    from crossdock.credentials import Credentials
    from tests.security.certificates import Authority

    target = stack.said[place]["grpc"]
    stranger = Authority(tmp_path, "stranger").issue("client.example")
    whoever = [
        Credentials(),
        Credentials(ca=stack.authority.pem()),
        Credentials(
            ca=stack.authority.pem(), certificate=stranger.pem(), private_key=stranger.key.read_bytes()
        ),
    ]
    for each in whoever:
        async with each.aio_channel(target) as channel:
            asked = call(channel, "/grpc.health.v1.Health/Check")
            assert await code_of(asked) is grpc.StatusCode.UNAVAILABLE


def test_http_speaks_no_plain_text_where_it_speaks_tls(stack):
    host, _, port = stack.said["gateway"]["http"].removeprefix("https://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert not plain.recv(100).startswith(b"HTTP")


async def test_commands_bring_key_and_certificate(stack):
    tls = (f"--ssl-ca-certs={stack.authority.path}", *stack.client.flags())
    target = (f"--target={stack.said['gateway']['grpc']}", *tls)

    async def run(*words):
        return await asyncio.to_thread(crossdock, *words, *target)

    said = await run("generate", "hello", "--max-tokens=2", f"--api-key={stack.keys['zeta']}")
    assert said.returncode == 0, said.stderr
    assert "UNAUTHENTICATED" in (await run("generate", "hello")).stderr
    books = await run("audit", f"--control-token={CONTROL_TOKEN}")
    assert books.returncode == 0, books.stderr + books.stdout
    assert "UNAUTHENTICATED" in (await run("audit", f"--control-token={stack.keys['zeta']}")).stderr


async def test_what_the_control_service_says_is_whole(stack):
    async with stack.channel() as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        token = stack.credentials(CONTROL_TOKEN).metadata()
        seen = await stub.GetStatus(control_pb2.GetStatusRequest(), metadata=token, timeout=10)
    assert {worker.worker_id for worker in seen.workers} == {"p", "d"}
