"""OpenAI's paths over a scripted source of tokens: answers, whole and streamed, and clients that leave."""

import asyncio
import math

import orjson
import pytest

from gateway.access import Access
from gateway.openai_http import openai_app
from gateway.request import EndReason

EVENT_S = 10.0
PROMPT = "The capital of France is"


def completion(**fields):
    return {"model": "smol", "prompt": PROMPT, **fields}


def chat(*contents, **fields):
    return {"model": "smol", "messages": [{"role": "user", "content": each} for each in contents], **fields}


def events_of(response):
    """The frames of a stream; the last one must be [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames[-1] == "" and frames[-2] == "data: [DONE]"
    return [orjson.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


async def test_a_completion_is_answered_whole(post, scripted, batches, tokenizer):
    ids = [*tokenizer.encode(" Paris"), 2]
    source = scripted(*batches(ids, end=EndReason.STOP, cached_tokens=4))
    response = await post(source, "/v1/completions", completion(), headers={"x-request-id": "mine"})
    assert response.status_code == 200 and response.headers["x-request-id"] == "mine"
    assert response.json() == {
        "id": "cmpl-mine",
        "object": "text_completion",
        "created": 1893542400,
        "model": "smol",
        "choices": [
            {"index": 0, "text": " Paris", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    assert source.requests[0].id == "mine" and source.requests[0].stop.max_tokens == 16


async def test_a_chat_is_answered_whole(post, scripted, batches, tokenizer):
    source = scripted(*batches(tokenizer.encode("Hello")))
    answer = (await post(source, "/v1/chat/completions", chat("hi"))).json()
    assert answer["id"] == "chatcmpl-id-1" and answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello"}
    assert choice["finish_reason"] == "length"
    prompt = tokenizer.decode(source.requests[0].prompt_token_ids, include_special=True)
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


async def test_a_completion_is_streamed_with_usage_as_asked(post, scripted, batches, tokenizer):
    """Case 77."""
    source = scripted(*batches(tokenizer.encode(" one two three")))
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = completion(stream=True, stream_options=options, stop=None, ignore_eos=True, max_tokens=3)
    response = await post(source, "/v1/completions", body)
    events = events_of(response)
    assert [event["choices"][0]["text"] for event in events[:-1]] == [" one", " two", " three"]
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, "length"]
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]
    assert {event["usage"]["prompt_tokens"] for event in events} == {5}
    assert events[-1]["choices"] == []
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    assert source.requests[0].stop.token_ids == frozenset()


async def test_a_chat_stream_begins_with_the_role(post, scripted, batches, tokenizer):
    source = scripted(*batches(tokenizer.encode("Hello there")))
    body = chat("hi", stream=True, stream_options={"include_usage": True})
    *events, last = events_of(await post(source, "/v1/chat/completions", body))
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " there"},
    ]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert [event["usage"] for event in events] == [None] * 3
    assert last["usage"]["completion_tokens"] == 2


async def test_the_first_chunk_knows_already_what_was_cached(post, scripted, batches, tokenizer):
    source = scripted(*batches(tokenizer.encode("Hello there"), cached_tokens=3))
    body = chat("hi", stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    events = events_of(await post(source, "/v1/chat/completions", body))
    assert [event["usage"]["prompt_tokens_details"]["cached_tokens"] for event in events] == [3] * 4


async def test_usage_is_absent_from_a_stream_unless_asked_for(post, scripted, batches):
    events = events_of(await post(scripted(*batches([500])), "/v1/completions", completion(stream=True)))
    assert len(events) == 1 and "usage" not in events[0]


async def test_parameters_reach_the_request(post, scripted, batches, tokenizer):
    body = completion(
        prompt=[504, 3575],
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.25,
        seed=-5,
        max_tokens=9,
        min_tokens=2,
        n=1,
        stop=["a", "b"],
        stop_token_ids=[9],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=3,
        user="somebody",
        some_unknown_field={"x": 1},
        presence_penalty=0.5,
        frequency_penalty=-1,
        repetition_penalty=1.25,
        logit_bias={"7": -100, "0": 2.5},
        tools=[],
        detokenize=True,
        truncation_side="left",
        response_format={"type": "text"},
        best_of=1,
        priority=-7,
    )
    source = scripted(*batches([500], alternatives=3))
    response = await post(source, "/v1/completions", body)
    assert response.status_code == 200
    (request,) = source.requests
    assert request.prompt_token_ids == (504, 3575) and request.include_special_tokens
    assert request.priority == -7
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 7)
    assert (sampling.min_p, sampling.seed, sampling.logprobs) == (0.25, -5, 3)
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    assert penalties == (0.5, -1.0, 1.25)
    assert sampling.logit_bias == ((0, 2.5), (7, -100.0))
    assert (request.stop.max_tokens, request.stop.min_tokens, request.stop.token_ids) == (9, 2, {2, 9})
    assert request.stop.strings == ("a", "b") and request.stop.include_string


async def test_a_chat_takes_biases_and_penalties_and_null_is_none(post, scripted, batches):
    given = {"presence_penalty": -2, "frequency_penalty": None, "logit_bias": {"5": 1}}
    for fields, penalty, biases in ((given, -2.0, ((5, 1.0),)), ({"logit_bias": None}, 0.0, ())):
        source = scripted(*batches([500]))
        assert (await post(source, "/v1/chat/completions", chat("hi", **fields))).status_code == 200
        sampling = source.requests[0].sampling
        assert (sampling.presence_penalty, sampling.logit_bias) == (penalty, biases)
        assert (sampling.frequency_penalty, sampling.repetition_penalty) == (0.0, 1.0)


async def test_the_newer_name_of_max_tokens_wins_in_a_chat(post, scripted, batches):
    for fields in ({"max_completion_tokens": 3, "max_tokens": 9}, {"max_tokens": 3}):
        source = scripted(*batches([500]))
        await post(source, "/v1/chat/completions", chat("hi", **fields))
        assert source.requests[0].stop.max_tokens == 3


async def test_text_parts_of_a_message_become_lines(post, scripted, batches, tokenizer):
    source = scripted(*batches([500]))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await post(source, "/v1/chat/completions", chat(parts))
    text = tokenizer.decode(source.requests[0].prompt_token_ids, include_special=True)
    assert "user\na\nb<|im_end|>" in text


async def test_a_developer_speaks_as_the_system_and_in_place_of_the_templates_own(
    post, scripted, batches, tokenizer
):
    spoken = {}
    for role in ("developer", "system"):
        source = scripted(*batches([500]))
        messages = [{"role": role, "content": "Be brief."}, {"role": "user", "content": "hi"}]
        await post(source, "/v1/chat/completions", {"messages": messages})
        counted = (await post(scripted(), "/tokenize", {"messages": messages})).json()["tokens"]
        spoken[role] = source.requests[0].prompt_token_ids
        assert list(spoken[role]) == counted
    assert spoken["developer"] == spoken["system"]
    text = tokenizer.decode(spoken["developer"], include_special=True)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>")


@pytest.mark.parametrize(("stop", "strings"), [("x", ("x",)), (["x", "y"], ("x", "y")), (None, ()), ([], ())])
async def test_stop_is_a_string_or_a_list(post, scripted, batches, stop, strings):
    source = scripted(*batches([500]))
    await post(source, "/v1/completions", completion(stop=stop))
    assert source.requests[0].stop.strings == strings


async def test_a_stop_string_is_named_as_the_reason(post, scripted, batches, tokenizer):
    source = scripted(*batches(tokenizer.encode(" one two three")))
    (choice,) = (await post(source, "/v1/completions", completion(stop="two"))).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" one ", "stop", "two")


async def test_a_stop_token_is_named_as_the_reason(post, scripted, batches):
    source = scripted(*batches([500, 501], end=EndReason.STOP))
    (choice,) = (await post(source, "/v1/completions", completion(stop_token_ids=[501]))).json()["choices"]
    assert choice["stop_reason"] == 501


@pytest.mark.parametrize("prompts", [["a", "b", "c"], [[504], [3575], [282]]])
@pytest.mark.parametrize("stream", [False, True])
async def test_each_of_several_prompts_has_its_own_choice(post, scripted, batches, prompts, stream):
    source = scripted(*batches([500, 501]))
    response = await post(source, "/v1/completions", completion(prompt=prompts, stream=stream))
    assert [request.id for request in source.requests] == ["id-1-0", "id-1-1", "id-1-2"]
    if stream:
        indices = [event["choices"][0]["index"] for event in events_of(response)]
        assert sorted(indices) == [0, 0, 1, 1, 2, 2]
    else:
        answer = response.json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert answer["usage"]["completion_tokens"] == 6 and answer["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(("prompts", "n"), [(256, 1), (16, 16)])
async def test_a_call_may_have_256_choices_of_all_its_prompts(post, scripted, batches, prompts, n):
    source = scripted(*(batch._replace(choice=choice) for choice in range(n) for batch in batches([500])))
    longest = {"x-request-id": "x" * 124}
    response = await post(source, "/v1/completions", completion(prompt=["a"] * prompts, n=n), headers=longest)
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(256))
    assert {request.id[:125] for request in source.requests} == {"x" * 124 + "-"}


async def test_completion_logprobs_have_the_classic_shape(post, scripted, batches, tokenizer):
    ids = tokenizer.encode(" one two")
    source = scripted(*batches(ids, alternatives=2))
    (choice,) = (await post(source, "/v1/completions", completion(logprobs=2))).json()["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [" one", " two"] and logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["text_offset"] == [0, 4]
    assert logprobs["top_logprobs"][0] == {" one": -0.5, tokenizer.decode([ids[0] + 1]): -1.5}


async def test_offsets_go_on_over_the_chunks_of_a_stream(post, scripted, batches, tokenizer):
    source = scripted(*batches(tokenizer.encode(" one two"), alternatives=0))
    events = events_of(await post(source, "/v1/completions", completion(logprobs=0, stream=True)))
    assert [event["choices"][0]["logprobs"]["text_offset"] for event in events] == [[0], [4]]


async def test_chat_logprobs_have_their_own_shape(post, scripted, batches, tokenizer):
    ids = tokenizer.encode("Hello")
    source = scripted(*batches(ids, alternatives=1))
    body = chat("hi", logprobs=True, top_logprobs=1)
    (choice,) = (await post(source, "/v1/chat/completions", body)).json()["choices"]
    entry = {"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello")}
    assert choice["logprobs"] == {"content": [{**entry, "top_logprobs": [entry]}]}


async def test_part_of_a_character_and_an_impossible_token_have_logprobs_too(
    post, scripted, batches, tokenizer
):
    (half, _) = [token_id for token_id in range(17, 300) if tokenizer.piece(token_id) in (b"\xe2", b"\x82")]
    (batch,) = batches([half], alternatives=0)
    batch = batch._replace(tokens=(batch.tokens[0]._replace(logprob=-math.inf),))
    (choice,) = (await post(scripted(batch), "/v1/completions", completion(logprobs=0))).json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]
    assert choice["logprobs"]["tokens"][0].startswith("bytes:\\x")


async def test_token_ids_are_returned_when_asked_for(post, scripted, batches):
    whole = await post(scripted(*batches([500, 501])), "/v1/completions", completion(return_token_ids=True))
    (choice,) = whole.json()["choices"]
    assert choice["token_ids"] == [500, 501]
    assert choice["prompt_token_ids"] == [504, 3575, 282, 4649, 314]
    body = chat("hi", return_token_ids=True, stream=True)
    events = events_of(await post(scripted(*batches([500, 501])), "/v1/chat/completions", body))
    assert len(events[0]["prompt_token_ids"]) > 5 and "prompt_token_ids" not in events[1]
    assert [event["choices"][0]["token_ids"] for event in events[1:]] == [[500], [501]]


class Leaving:
    """A client that sends its request, and leaves when told to."""

    def __init__(self, frontend, path, body):
        self._app = openai_app(frontend, Access(), body_bytes_max=10_000)
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "scheme": "http",
            "server": ("gateway", 80),
            "client": ("client", 1),
        }
        self._messages = asyncio.Queue()
        self._messages.put_nowait({"type": "http.request", "body": orjson.dumps(body)})
        self.sent = asyncio.Queue()

    async def run(self):
        await self._app(self._scope, self._messages.get, self.sent.put)

    def leave(self):
        self._messages.put_nowait({"type": "http.disconnect"})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_closes_the_source(frontend_over, scripted, stream):
    source = scripted(asyncio.Event())
    client = Leaving(frontend_over(source), "/v1/completions", completion(stream=stream))
    exchange = asyncio.ensure_future(client.run())
    await asyncio.wait_for(source.started.wait(), EVENT_S)
    client.leave()
    await asyncio.wait_for(exchange, EVENT_S)
    assert source.closed.is_set() and client.sent.empty()


async def test_a_client_that_leaves_a_stream_closes_the_source(frontend_over, scripted, batches):
    source = scripted(*batches([500], end=None), asyncio.Event())
    client = Leaving(frontend_over(source), "/v1/chat/completions", chat("hi", stream=True))
    exchange = asyncio.ensure_future(client.run())
    assert (await asyncio.wait_for(client.sent.get(), EVENT_S))["type"] == "http.response.start"
    client.leave()
    await asyncio.wait_for(exchange, EVENT_S)
    assert source.closed.is_set()


async def test_models_are_listed(client_of, frontend_over, scripted):
    async with client_of(frontend_over(scripted())) as client:
        (model,) = (await client.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("smol", "model", 512)


async def test_a_model_is_found_by_its_name(client_of, frontend_over, scripted):
    async with client_of(frontend_over(scripted())) as client:
        found = await client.get("/v1/models/smol")
        unknown = await client.get("/v1/models/other")
    assert (found.status_code, found.json()["id"]) == (200, "smol")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_the_tokenizer_is_described_as_harnesses_ask_for_it(
    client_of, frontend_over, scripted, tokenizer
):
    async with client_of(frontend_over(scripted())) as client:
        about = (await client.get("/tokenizer_info")).json()
    assert tokenizer.encode(about["eos_token"]) == list(tokenizer.eos_token_ids)
    assert about["chat_template"] == tokenizer.chat_template and about["model_max_length"] == 512


async def test_tokenize_and_detokenize_undo_each_other(post, scripted):
    tokens = (await post(scripted(), "/tokenize", {"prompt": PROMPT})).json()
    assert tokens == {"tokens": [504, 3575, 282, 4649, 314], "count": 5, "max_model_len": 512}
    text = (await post(scripted(), "/detokenize", {"tokens": tokens["tokens"]})).json()
    assert text == {"prompt": PROMPT}


async def test_tokenize_renders_messages(post, scripted, golden):
    (case,) = [case for case in golden if case["kind"] == "chat"][:1]
    assert (await post(scripted(), "/tokenize", {"messages": case["messages"]})).json()["tokens"] == case[
        "prompt_ids"
    ]


@pytest.mark.parametrize("path", ["/health", "/ping"])
@pytest.mark.parametrize(("ready", "status"), [(True, 200), (False, 503)])
async def test_health_says_whether_work_is_welcome(client_of, frontend_over, scripted, path, ready, status):
    async with client_of(frontend_over(scripted(), ready=lambda: ready)) as client:
        assert (await client.get(path)).status_code == status


async def test_metrics_and_version_are_shown(client_of, frontend_over, scripted, batches):
    async with client_of(frontend_over(scripted(*batches([500])))) as client:
        await client.post("/v1/completions", json=completion())
        await client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        for outcome in ("length", "invalid_request"):
            assert f'crossdock_requests_total{{outcome="{outcome}"}} 1.0' in metrics.text
        assert (await client.get("/version")).json()["version"]
