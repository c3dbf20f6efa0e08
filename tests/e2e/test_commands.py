"""What a user's first five minutes touch: the commands, health, reflection, and the OpenAI face."""

import asyncio
import json
import re
import socket
import subprocess
import sys

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from service import orca, reflection
from service.health import HEALTH
from tests.e2e.conftest import ROOT, crossdock, spec, stream

SERVICES = ("crossdock.v1.InferenceService", "crossdock.v1.ControlService", "vllm.grpc.engine.VllmEngine")
SERVING = health_pb2.HealthCheckResponse.SERVING
PROMPT, TOKENS = "The capital of France is", 24


async def answer_to(stack, prompt=PROMPT, max_tokens=TOKENS):
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        return await stream(channel, spec(prompt, sampling={"max_tokens": max_tokens}))


async def test_generate_shows_the_answer_while_it_is_computed(exact_stack):
    words = ("generate", PROMPT, "--target", exact_stack.grpc, "--max-tokens", str(TOKENS))
    argv = [sys.executable, "-m", "commands.main", *words]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, subprocess.Popen(argv, cwd=ROOT, stdout=theirs) as process:
        theirs.close()
        process.wait(timeout=60)
        writes = [write for _ in range(10 * TOKENS) if (write := ours.recv(65_536))]
    assert process.returncode == 0
    assert b"".join(writes).decode() == (await answer_to(exact_stack)).text + "\n"
    assert len(writes) > TOKENS / 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("x", "--temperature", "3"), "sampling.temperature"),
        (("x", "--max-tokens", "0"), "sampling.max_tokens"),
        (("x", "--model", "other"), "model"),
        (("", "--top-p", "0"), "text"),
        (("--token-ids", "49152"), "token_ids.ids"),
    ],
)
def test_generate_names_the_wrong_field_in_one_line(exact_stack, words, named):
    done = crossdock("generate", "--target", exact_stack.grpc, *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1 and f"{named}: " in done.stderr


@pytest.mark.parametrize(("verb", "code"), [(("generate", "x"), 1), (("status",), 1), (("audit",), 2)])
def test_a_gateway_that_is_not_there_is_one_line(verb, code):
    done = crossdock(*verb, "--target", "127.0.0.1:1", "--timeout", "10")
    assert done.returncode == code and done.stdout == "" and done.stderr.count("\n") == 1


def test_status_and_audit_show_every_worker_and_that_the_books_balance(exact_stack):
    exact_stack.idle_ledgers()
    for verb, words in (("status", ("ready", "0 live requests")), ("audit", ("0 live requests; balanced",))):
        done = crossdock(verb, "--target", exact_stack.grpc)
        assert (done.returncode, done.stderr) == (0, "")
        assert [each for each in ("prefill-0", "decode-0", *words) if each not in done.stdout] == []


async def test_health_and_reflection_speak_for_every_service(exact_stack):
    async with grpc.aio.insecure_channel(exact_stack.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "readiness", *SERVICES):
            request = health_pb2.HealthCheckRequest(service=name)
            assert (await health.Check(request, timeout=10)).status == SERVING, name
            watch = health.Watch(request, timeout=10)
            assert (await watch.read()).status == SERVING, name
            watch.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await health.Check(health_pb2.HealthCheckRequest(service="no.such"), timeout=10)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        listed = await stub.ServerReflectionInfo(iter([asked]), timeout=10).read()
    names = {service.name for service in listed.list_services_response.service}
    assert names == {*SERVICES, HEALTH, orca.SERVICE, *reflection.NAMES}


async def test_health_and_metrics_over_http(exact_stack):
    await answer_to(exact_stack, max_tokens=2)
    async with httpx.AsyncClient(base_url=exact_stack.http) as client:
        assert (await client.get("/health")).status_code == 200
        metrics = await shown(client, lambda text: len(moved_bytes(text)) == 2)
    assert 'crossdock_kv_transfers_total{pool="prefill",transport="shm",worker="prefill-0"} ' in metrics
    assert "kv_transfer_events_total" in metrics and "committed_over" not in metrics
    for pool in ("prefill", "decode"):
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert f'crossdock_{name}{{pool="{pool}",worker="{pool}-0"}} ' in metrics
            assert f'vllm:{name}{{pool="{pool}",worker="{pool}-0"}} ' in metrics
    for name in (
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "e2e_request_latency_seconds",
    ):
        (line,) = (each for each in metrics.splitlines() if each.startswith(f"crossdock_{name}_count"))
        assert float(line.split()[-1]) >= 1, line


def moved_bytes(metrics):
    """By pool, where anything was handed over."""
    line = re.compile(r'crossdock_kv_transfer_bytes_total{pool="(\w+)",worker="\w+-0"} (\S+)')
    return {pool: float(count) for pool, count in line.findall(metrics) if float(count)}


async def shown(client, holds):
    """A scrape, once it shows what is looked for: workers report, and the gateway shows it, a little later."""
    while not holds(text := (await client.get("/metrics")).text):
        await asyncio.sleep(0.05)
    return text


async def events(client, path, body):
    """The chunks of a stream, which must end with [DONE]."""
    async with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        frames = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert frames.pop() == "[DONE]"
    return [json.loads(frame) for frame in frames]


async def test_a_completion_streams_its_text_and_the_usage_last(exact_stack):
    body = {
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    async with httpx.AsyncClient(base_url=exact_stack.http) as client:
        *chunks, last = await events(client, "/v1/completions", body)
        whole = (await client.post("/v1/completions", json=body | {"stream_options": None})).json()
    answer = await answer_to(exact_stack)
    assert len(chunks) > 1 and all(chunk["usage"] is None for chunk in chunks)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answer.text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "length"
    ]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == TOKENS
    assert len({chunk["id"] for chunk in (*chunks, last)}) == 1
    assert whole["choices"][0]["text"] == answer.text
    assert (
        whole["usage"]["total_tokens"] == last["usage"]["total_tokens"] == TOKENS + answer.usage.prompt_tokens
    )


async def test_a_conversation_streams_the_role_then_the_words_then_the_usage(exact_stack):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {
        "messages": messages,
        "max_tokens": 8,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    async with httpx.AsyncClient(base_url=exact_stack.http) as client:
        first, *chunks, last = await events(client, "/v1/chat/completions", body)
        whole = (await client.post("/v1/chat/completions", json=body | {"stream_options": None})).json()
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    words = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert words and words == whole["choices"][0]["message"]["content"]
    for usage in (last["usage"], whole["usage"]):
        del usage["prompt_tokens_details"]  # the second time the prompt is cached
    assert last["choices"] == [] and last["usage"] == whole["usage"]
