"""What OpenAI's paths refuse, with the status, the field and the limit named."""

import asyncio

import orjson
import pytest

from service.errors import Exhausted, GuideFailed, InternalFault, Unavailable

EVENT_S = 10.0
PROMPT = "The capital of France is"
HELLO = [{"role": "user", "content": "hi"}]


def completion(**fields):
    return {"model": "smol", "prompt": PROMPT, **fields}


def chat(*contents, **fields):
    return {"model": "smol", "messages": [{"role": "user", "content": each} for each in contents], **fields}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"priority": 101}, "priority"),
        ({"priority": 0.5}, "priority"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1e30}, "max_tokens"),
        ({"n": 17}, "n"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"use_beam_search": True}, "best_of"),
        ({"use_beam_search": True, "best_of": 17}, "best_of"),
        ({"use_beam_search": True, "best_of": 2, "temperature": 0.5}, "temperature"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"logprobs": 21}, "logprobs"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"presence_penalty": "0.5"}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"frequency_penalty": True}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": [1.1]}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": 1e300}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": {"5": True}}, "logit_bias"),
        ({"logit_bias": {"5": None}}, "logit_bias"),
        ({"logit_bias": {"49152": 1}}, "logit_bias"),
        ({"logit_bias": {"4294967296": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"05": 1}}, "logit_bias"),
        ({"logit_bias": {"\u0665": 1}}, "logit_bias"),
        ({"logit_bias": {"": 1}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias"),
        ({"logit_bias": [[5, 1]]}, "logit_bias"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format.json_schema"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"regexp": "[0-9]"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs.regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [5]}, "guided_choice"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"guided_json": {"const": "x" * 70_000}}, "guided_json"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": {"const": "x" * 70_000}}}, "structured_outputs.json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "x" * 70_000}}}},
            "response_format",
        ),
        ({"guided_json": {}, "use_beam_search": True, "best_of": 2}, "guided_json"),
        ({"use_beam_search": True, "n": 17}, "n"),
        ({"echo": "yes"}, "echo"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"max_tokens": 0, "min_tokens": 1, "echo": True}, "min_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": -1, "echo": True, "logprobs": 1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "use_beam_search": True, "best_of": 2}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "use_beam_search": True, "best_of": 2}, "echo"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 512}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": "all"}, "truncate_prompt_tokens"),
        ({"truncation_side": "right"}, "truncation_side"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"detokenize": False}, "detokenize"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"repetition_detection": {"max_pattern_size": 5}}, "repetition_detection"),
        ({"vllm_xargs": {"x": 1}}, "vllm_xargs"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"suffix": "x"}, "suffix"),
        ({"kv_transfer_params": {"remote_host": "x"}}, "kv_transfer_params"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ""}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [49152]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [2**63]}, "stop_token_ids"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "a b " * 512}, "prompt"),
        ({"prompt": [5] * 512}, "prompt"),
        ({"prompt": ["a", "a b " * 512]}, "prompt[1]"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [[5], [49152]]}, "prompt[1]"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a"] * 17, "n": 16}, "prompt"),
        ({"prompt": [[5]] * 17, "best_of": 16}, "prompt"),
        ({"prompt": ["a"] * 129, "use_beam_search": True, "n": 2}, "prompt"),
        ({"prompt": ["a"] * 2, "n": 257}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {"include_usage": False}}, "stream_options"),
        ({"ignore_eos": 0}, "ignore_eos"),
    ],
)
async def test_a_bad_field_is_a_400_that_names_it(post, scripted, fields, param):
    source = scripted()
    response = await post(source, "/v1/completions", completion(**fields))
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and error["message"].startswith(f"{param}: ")
    assert source.requests == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "smol"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a b " * 512}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 9000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "x"}], "echo": True}, "echo"),
        ({"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "max_tokens"),
        (
            {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0},
            "max_completion_tokens",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 21},
            "top_logprobs",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": 1}},
            "chat_template_kwargs",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "stream_options": {"x": 1}}, "stream_options"),
        (
            {"messages": [{"role": "user", "content": "x"}], "thinking_token_budget": 1},
            "thinking_token_budget",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]},
            "messages[0].function_call",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "f"}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
    ],
)
async def test_a_bad_chat_is_a_400_that_names_its_place(post, scripted, body, param):
    response = await post(scripted(), "/v1/chat/completions", body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


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
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


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
        (InternalFault("x"), 500, None),
    ],
)
async def test_an_error_before_the_first_token_has_its_status(
    post, scripted, error, status, retry_after, stream
):
    response = await post(scripted(error), "/v1/completions", completion(stream=stream))
    assert response.status_code == status and response.headers.get("retry-after") == retry_after
    assert response.headers["content-type"] == "application/json"


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
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a" * 9000}, "prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"messages": HELLO, "tools": [{"type": "function"}]}, "tools"),
        ("/tokenize", {"messages": HELLO, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": HELLO, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": HELLO, "documents": [{"text": "x"}]}, "documents"),
        ("/tokenize", {"messages": HELLO, "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [49152]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
async def test_tokenize_and_detokenize_name_the_bad_field(post, scripted, path, body, param):
    response = await post(scripted(), path, body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/embeddings", 404), ("GET", "/v1/completions", 405)]
)
async def test_unknown_paths_and_methods_are_json_errors(
    client_of, frontend_over, scripted, method, path, status
):
    async with client_of(frontend_over(scripted())) as client:
        response = await client.request(method, path)
    assert response.status_code == status and response.json()["error"]["message"]


async def test_of_many_mistakes_the_first_are_named(post, scripted):
    body = {"messages": [{"role": "", "content": "x"}] * 100}
    response = await post(scripted(), "/v1/chat/completions", body)
    assert response.status_code == 400 and response.json()["error"]["message"].count("bytes") == 8


async def test_a_large_body_is_read_like_a_small_one(post, scripted):
    response = await post(scripted(), "/v1/completions", completion(prompt="x" * 100_000))
    assert response.json()["error"]["code"] == "context_length_exceeded"
    response = await post(scripted(), "/v1/completions", b"{" + b" " * 100_000)
    assert response.json()["error"]["param"] == "body"
