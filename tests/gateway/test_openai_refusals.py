"""What OpenAI's paths refuse, with which status, and what else a refusal says."""

import asyncio

import httpx
import orjson
import pytest

from gateway.access import Access
from gateway.openai_http import openai_app
from service.errors import AttemptsLost, Exhausted, GuideFailed, InternalFault, Unauthorised, Unavailable

EVENT_S = 10.0
PROMPT = "The capital of France is"
HELLO = [{"role": "user", "content": "hi"}]


def completion(**fields):
    return {"model": "smol", "prompt": PROMPT, **fields}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"temperature": NaN, "prompt": "x"}',
        b'{"temperature": 1e999, "prompt": "x"}',
        b"[" * 19_000,
    ],
)
async def test_a_body_that_is_no_json_object_is_a_400(post, scripted, body):
    response = await post(scripted(), "/v1/completions", body)
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_over_the_limit_is_refused_unread(post, scripted):
    response = await post(scripted(), "/v1/completions", b"x" * 200_001)
    assert response.status_code == 413 and "200000" in response.json()["error"]["message"]


async def test_a_body_that_is_said_to_be_over_the_limit_is_refused_before_it_comes(
    client_of, frontend_over, scripted
):
    async def never():
        await asyncio.Event().wait()
        yield b""

    async with client_of(frontend_over(scripted())) as client:
        headers = {"content-type": "application/json", "content-length": str(10**12)}
        response = await client.post("/v1/completions", content=never(), headers=headers)
    assert response.status_code == 413 and "200000" in response.json()["error"]["message"]


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("br, identity", 415), ("Identity", 200)])
async def test_a_body_in_a_coding_of_its_own_is_not_taken(post, scripted, batches, encoding, status):
    source = scripted(*batches([500]))
    response = await post(source, "/v1/completions", completion(), headers={"content-encoding": encoding})
    assert response.status_code == status
    assert status == 200 or response.headers["accept-encoding"] == "identity"


async def test_answers_to_all_prompts_of_a_call_share_what_fits_in_one(post, scripted):
    body = completion(prompt=[PROMPT] * 64, logprobs=20, max_tokens=400_000 // (64 * 21) + 1)
    response = await post(scripted(), "/v1/completions", body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "max_tokens")
    assert "at most 297 " in error["message"] and "streamed" in error["message"]


async def test_no_model_has_no_name(client_of, frontend_over, scripted):
    async with client_of(frontend_over(scripted())) as client:
        assert (await client.get("/v1/models/")).status_code == 404


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_only_what_says_that_it_is_json_is_read(post, scripted, content_type):
    """A page in a browser may send all other types to any server that the browser can reach."""
    source = scripted()
    headers = {"content-type": content_type}
    response = await post(source, "/v1/completions", completion(), headers=headers)
    assert response.status_code == 415 and "application/json" in response.json()["error"]["message"]
    assert source.requests == []


async def test_another_model_is_a_404(post, scripted):
    response = await post(scripted(), "/v1/completions", completion(model="other"))
    error = response.json()["error"]
    assert response.status_code == 404 and error["code"] == "model_not_found"
    assert error["param"] == "model" and error["message"].startswith("model: ")


async def test_a_prompt_that_is_too_long_has_its_own_code(post, scripted):
    response = await post(scripted(), "/v1/completions", completion(prompt=[1] * 512))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (Exhausted("full", retry_after_ms=1500), 429, "2"),
        (Exhausted("full"), 429, "1"),
        (Unavailable("no worker", retry_after_ms=3000), 503, "3"),
        (AttemptsLost("every attempt was lost"), 503, None),
        (Exhausted("not read", reason="CLIENT_STALLED"), 429, None),
        (InternalFault("x"), 500, None),
    ],
)
async def test_an_error_before_the_first_token_has_its_status(
    post, scripted, error, status, retry_after, stream
):
    response = await post(scripted(error), "/v1/completions", completion(stream=stream))
    assert response.status_code == status and response.headers.get("retry-after") == retry_after
    assert response.headers["content-type"] == "application/json"
    final = status in (429, 503) and retry_after is None
    assert response.headers.get("x-should-retry") == ("false" if final else None)


@pytest.mark.parametrize(
    ("error", "code"), [(Unavailable("gone"), "unavailable"), (RuntimeError("secret"), "internal")]
)
async def test_an_error_in_a_stream_is_its_last_frame(post, scripted, batches, error, code):
    source = scripted(*batches([500], end=None), error)
    response = await post(source, "/v1/completions", completion(stream=True))
    assert response.status_code == 200
    *_, last, empty = response.text.split("\n\n")
    assert empty == "" and orjson.loads(last.removeprefix("data: "))["error"]["code"] == code
    assert "secret" not in response.text and "[DONE]" not in response.text


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs.grammar"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_what_cannot_go_on_within_its_guide_names_the_guide_as_it_was_asked(
    client_of, frontend_over, scripted, batches, asked, name
):
    async def anything(guide, tenant):
        pass

    source = scripted(*batches([500], end=None), GuideFailed())
    async with client_of(frontend_over(source, require_guide=anything)) as client:
        response = await client.post("/v1/completions", json=completion(stream=True, **asked))
    *_, last, _ = response.text.split("\n\n")
    error = orjson.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "guide_failed" and error["param"] == name


async def test_a_mistake_of_ours_is_a_500_that_tells_nothing(post, scripted):
    response = await post(scripted(RuntimeError("secret")), "/v1/completions", completion())
    assert response.status_code == 500 and "secret" not in response.text


async def test_one_failing_prompt_ends_the_others(post, frontend_over, scripted, batches):
    source = scripted(*batches([500], end=None), asyncio.Event())
    started = []
    run = source.run

    async def run_or_fail(request, unread):
        started.append(request.id)
        if request.id.endswith("-1"):
            raise Unavailable("gone")
        async for batch in run(request, unread):
            yield batch

    source.run = run_or_fail
    response = await post(source, "/v1/completions", completion(prompt=["a", "b"]))
    assert response.status_code == 503 and len(started) == 2
    await asyncio.wait_for(source.closed.wait(), EVENT_S)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/embeddings", 404), ("GET", "/v1/completions", 405), ("GET", "/health/", 404)],
)
async def test_unknown_paths_and_methods_are_json_errors(
    client_of, frontend_over, scripted, method, path, status
):
    async with client_of(frontend_over(scripted())) as client:
        response = await client.request(method, path)
    assert response.status_code == status and response.json()["error"]["message"]
    assert response.headers.get("allow") == ("POST" if status == 405 else None)


class Closed(Access):
    """Whoever asks has no key."""

    def check_path(self, path, call):
        raise Unauthorised("no valid credential")


@pytest.mark.parametrize(
    ("method", "path", "given", "status"),
    [
        ("POST", "/v1/completions", {"json": completion(temperature=3)}, 400),
        ("POST", "/v1/completions", {"json": completion()}, 429),
        ("POST", "/v1/chat/completions", {"json": {"messages": HELLO, "stream": True}}, 429),
        ("POST", "/v1/completions", {"json": completion(model="x")}, 404),
        ("POST", "/v1/completions", {"content": b"{", "headers": {"content-type": "application/json"}}, 400),
        ("POST", "/v1/completions", {"content": b"x"}, 415),
        ("POST", "/tokenize", {"json": {"prompt": "x" * 200_001}}, 413),
        ("GET", "/v1/completions", {}, 405),
        ("GET", "/v1/embeddings", {}, 404),
        ("GET", "/v1/models/x", {}, 404),
        ("GET", "/health", {}, 503),
        ("POST", "/v1/completions", {"json": completion(prompt=[5])}, 500),
    ],
)
async def test_every_refusal_names_the_request(
    client_of, frontend_over, scripted, method, path, given, status
):
    class Source(type(scripted())):
        async def run(self, request, unread):
            raise Exhausted("full") if len(request.prompt_token_ids) > 1 else RuntimeError("ours")
            yield

    frontend = frontend_over(Source([]), ready=lambda: False)
    async with client_of(frontend) as client:
        own = await client.request(
            method, path, **given | {"headers": {**given.get("headers", {}), "x-request-id": "mine"}}
        )
        other = await client.request(method, path, **given)
    assert (own.status_code, own.headers["x-request-id"]) == (status, "mine")
    assert (other.status_code, other.headers["x-request-id"]) == (status, "id-1")


async def test_whoever_has_no_key_is_told_the_name_of_the_request_too(frontend_over, scripted):
    app = openai_app(frontend_over(scripted()), Closed(), body_bytes_max=100)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        for given, expected in (("mine", "mine"), ("x" * 125, "id-1"), ("\x00", "id-2")):
            refused = await client.get("/v1/models", headers={"x-request-id": given})
            assert (refused.status_code, refused.headers["x-request-id"]) == (401, expected)


async def test_a_large_body_is_read_like_a_small_one(post, scripted):
    response = await post(scripted(), "/v1/completions", completion(prompt="x" * 100_000))
    assert response.json()["error"]["code"] == "context_length_exceeded"
    response = await post(scripted(), "/v1/completions", b"{" + b" " * 100_000)
    assert response.json()["error"]["param"] == "body"
