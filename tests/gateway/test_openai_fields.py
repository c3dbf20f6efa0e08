"""Which fields of OpenAI's requests are refused, and by which name."""

import pytest

PROMPT = "The capital of France is"
HELLO = [{"role": "user", "content": "hi"}]


def completion(**fields):
    return {"model": "smol", "prompt": PROMPT, **fields}


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


async def test_of_many_mistakes_the_first_are_named(post, scripted):
    body = {"messages": [{"role": "", "content": "x"}] * 100}
    response = await post(scripted(), "/v1/chat/completions", body)
    assert response.status_code == 400 and response.json()["error"]["message"].count("bytes") == 8
