"""OpenAI's JSON requests as crossdock.v1 messages, so that both faces have one validation.

The HTTP routes call it. Fields that nobody here knows are ignored, as clients expect; fields that are known
but not offered are refused by name unless they say what is done anyway. Types are checked here, ranges in
validation. References: https://platform.openai.com/docs/api-reference, and vLLM's extra parameters.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from crossdock.v1 import inference_pb2
from gateway import choices
from gateway.json_fields import JsonFields, JsonObject, is_ids, is_texts
from gateway.openai_guides import guide_of
from gateway.openai_names import FieldNames
from service.orders import CHOICES_MAX

CHOICES_OF_A_CALL_MAX = 256
"""Of all its prompts together, with those that are generated and not shown."""
COMPLETION_TOKENS_DEFAULT = 16

_Neutral: TypeAlias = Mapping[str, Collection[object]]
"""What is known but not offered, with the values that say what is done anyway."""

_WORDS: _Neutral = {
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "structural_tag": (),
    "guided_whitespace_pattern": (),
    "repetition_detection": (),
    "thinking_token_budget": (),
}
_RENDERING: _Neutral = {
    "tools": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "continue_final_message": (False,),
}
_TOOLS: _Neutral = {
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
}
_SHOWN: _Neutral = {
    "detokenize": (True,),
    "return_tokens_as_token_ids": (False,),
    "logprob_token_ids": ([],),
    "modalities": (["text"],),
    "audio": (),
}
_OTHERS: _Neutral = {
    "suffix": ("",),
    "prompt_embeds": (),
    "truncation_side": ("left",),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
}
_NOT_OFFERED = {**_WORDS, **_RENDERING, **_TOOLS, **_SHOWN, **_OTHERS}
_NOT_OFFERED_OF_A_MESSAGE: _Neutral = {"tool_calls": ([],), "function_call": (), "audio": ()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a client wants. specs: one per prompt; the choices of each come before those of the next. names: what the
    client calls the fields of each. echo: the prompt comes before the answer. prompt_logprobs: alternatives of each
    token of the prompt, in vLLM's form, if wanted."""

    specs: tuple[inference_pb2.GenerationSpec, ...]
    names: tuple[FieldNames, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    prompt_logprobs: int | None = None
    echo: bool = False


def completion_call(body: JsonObject, request_id: str) -> Call:
    """/v1/completions. Raises InvalidRequest with every field of the wrong type, named as in the JSON."""
    fields = JsonFields(body)
    prompts = _prompts(fields)
    max_tokens = fields.integer("max_tokens")
    base = _base(fields, COMPLETION_TOKENS_DEFAULT if max_tokens is None else max_tokens, begins=True)
    base.output.MergeFrom(inference_pb2.OutputOptions(logprobs=fields.integer("logprobs")))
    echo = fields.flag("echo")
    asked = base.output.prompt_logprobs >= 0 and (base.output.HasField("logprobs") or max_tokens == 0)
    if echo and asked:
        if fields.raw("prompt_logprobs") is None:
            fields.written["output.prompt_logprobs"] = "echo"
        base.output.prompt_logprobs = max(base.output.prompt_logprobs, base.output.logprobs)
    wide = _wide(base.sampling)
    prompts_max = CHOICES_OF_A_CALL_MAX // wide
    if len(prompts) > prompts_max:
        rule = f"at most {CHOICES_OF_A_CALL_MAX} choices in all: {prompts_max} prompts with {wide} of each"
        fields.wrong("prompt", rule)
    specs = [_with_prompt(base, prompt) for prompt in prompts[:prompts_max]]
    call = _call(fields, specs, request_id, echo=echo)
    fields.refuse()
    return call


def chat_call(body: JsonObject, request_id: str) -> Call:
    """/v1/chat/completions. Raises InvalidRequest as completion_call."""
    fields = JsonFields(body)
    max_tokens, older_name = fields.integer("max_completion_tokens"), fields.integer("max_tokens")
    base = _base(fields, older_name if max_tokens is None else max_tokens, begins=False)
    fields.written["sampling.max_tokens"] = "max_tokens" if max_tokens is None else "max_completion_tokens"
    fields.written["output.logprobs"] = "top_logprobs"
    base.chat.CopyFrom(_chat(fields))
    fields.neutral_only("echo", (False,))
    wanted, alternatives = fields.flag("logprobs"), fields.integer("top_logprobs")
    if wanted:
        base.output.logprobs = alternatives or 0
    elif alternatives:
        fields.wrong("top_logprobs", "needs logprobs to be true")
    call = _call(fields, [base], request_id)
    fields.refuse()
    return call


def tokenize_request(body: JsonObject) -> inference_pb2.TokenizeRequest:
    """/tokenize, with a prompt or with messages."""
    fields = JsonFields(body)
    asked = inference_pb2.TokenizeRequest(model=fields.text("model") or "")
    _refuse_others(fields, {**_RENDERING, "return_token_strs": (False,)})
    if fields.raw("messages") is not None:
        asked.chat.CopyFrom(_chat(fields))
        fields.neutral_only("add_special_tokens", (False,))
    else:
        prompt = fields.text("prompt")
        if fields.raw("prompt") is None:
            fields.wrong("prompt", "a prompt or messages are required")
        asked.text = prompt or ""
        asked.add_special_tokens = fields.flag("add_special_tokens", default=True)
    fields.refuse()
    return asked


def detokenize_request(body: JsonObject) -> inference_pb2.DetokenizeRequest:
    """/detokenize."""
    fields = JsonFields(body)
    token_ids = fields.ids("tokens")
    if fields.raw("tokens") is None:
        fields.wrong("tokens", "is required")
    model = fields.text("model") or ""
    special = not fields.flag("skip_special_tokens", default=False)
    fields.refuse()
    return inference_pb2.DetokenizeRequest(model=model, token_ids=token_ids, include_special_tokens=special)


def _base(fields: JsonFields, max_tokens: int | None, *, begins: bool) -> inference_pb2.GenerationSpec:
    """Everything but the prompt and the logprobs. begins: whether the prompt gets a begin-of-sequence token
    from the server."""
    _refuse_others(fields, {**_NOT_OFFERED, "add_special_tokens": (begins,)})
    if isinstance(fields.raw("stop"), str):
        fields.written["stop.strings[0]"] = "stop"
    return inference_pb2.GenerationSpec(
        model=fields.text("model") or "",
        cache_salt=fields.text("cache_salt") or "",
        priority=fields.integer("priority") or 0,
        guide=guide_of(fields),
        truncate_prompt_tokens=fields.integer("truncate_prompt_tokens"),
        sampling=inference_pb2.SamplingParams(
            temperature=fields.number("temperature"),
            top_p=fields.number("top_p"),
            top_k=_top_k(fields),
            min_p=fields.number("min_p"),
            seed=fields.integer("seed", bits=64),
            max_tokens=max_tokens,
            min_tokens=fields.integer("min_tokens"),
            n=fields.integer("n"),
            presence_penalty=fields.number("presence_penalty"),
            frequency_penalty=fields.number("frequency_penalty"),
            repetition_penalty=fields.number("repetition_penalty"),
            logit_bias=fields.numbers_by_id("logit_bias"),
            **_choices(fields),
        ),
        stop=inference_pb2.StopConditions(
            strings=fields.texts("stop"),
            token_ids=fields.ids("stop_token_ids"),
            ignore_eos=fields.flag("ignore_eos"),
            include_stop_string=fields.flag("include_stop_str_in_output"),
        ),
        output=inference_pb2.OutputOptions(
            include_special_tokens=not fields.flag("skip_special_tokens", default=True),
            prompt_logprobs=fields.integer("prompt_logprobs"),
        ),
    )


def _refuse_others(fields: JsonFields, not_offered: _Neutral) -> None:
    for field, neutral in not_offered.items():
        fields.neutral_only(field, neutral)


def _choices(fields: JsonFields) -> dict[str, Any]:
    """best_of is the width of a beam search where one is wanted, as vLLM had it."""
    best_of = fields.integer("best_of")
    if not fields.flag("use_beam_search"):
        fields.neutral_only("length_penalty", (1,))
        fields.neutral_only("early_stopping", (False,))
        return {"best_of": best_of}
    if best_of is None and fields.raw("n") is not None:
        fields.written["sampling.beam_width"] = "n"
    return {
        "beam_width": (fields.integer("n") or 1) if best_of is None else best_of,
        "length_penalty": fields.number("length_penalty"),
        "early_stopping": fields.flag("early_stopping"),
    }


def _top_k(fields: JsonFields) -> int | None:
    """-1 is how vLLM's clients switch it off."""
    top_k = fields.integer("top_k")
    return 0 if top_k == -1 else top_k


def _prompts(fields: JsonFields) -> list[str | list[int]]:
    value = fields.raw("prompt")
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if is_ids(value):
            return [value]
        if is_texts(value) or all(is_ids(item) for item in value):
            return list(value)
    fields.wrong("prompt", "must be a string, a list of strings, token ids or a list of token id lists")
    return []


def _wide(sampling: inference_pb2.SamplingParams) -> int:
    """Choices of one prompt, at most as many as validation takes."""
    return min(CHOICES_MAX, max(1, choices.best_of(sampling), sampling.beam_width))


def _with_prompt(base: inference_pb2.GenerationSpec, prompt: str | list[int]) -> inference_pb2.GenerationSpec:
    spec = inference_pb2.GenerationSpec()
    spec.CopyFrom(base)
    if isinstance(prompt, str):
        spec.text = prompt
    else:
        spec.token_ids.ids.extend(prompt)
        spec.token_ids.SetInParent()
    return spec


def _call(
    fields: JsonFields,
    specs: list[inference_pb2.GenerationSpec],
    request_id: str,
    *,
    echo: bool = False,
) -> Call:
    for index, spec in enumerate(specs):
        spec.request_id = request_id if len(specs) == 1 else f"{request_id}-{index}"
    stream, options = fields.flag("stream"), JsonFields(fields.mapping("stream_options"))
    if fields.raw("stream_options") and not stream:
        fields.wrong("stream_options", "needs stream to be true")
    include_usage, continuous_usage = options.flag("include_usage"), options.flag("continuous_usage_stats")
    fields.take("stream_options.", options)
    return Call(
        specs=tuple(specs),
        names=tuple(_names(fields, None if len(specs) == 1 else index) for index in range(len(specs))),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=fields.flag("return_token_ids"),
        prompt_logprobs=fields.integer("prompt_logprobs"),
        echo=echo,
    )


def _names(fields: JsonFields, index: int | None) -> FieldNames:
    """index: of the prompt, among several."""
    prompt = {} if index is None else dict.fromkeys(("prompt", "text", "token_ids.ids"), f"prompt[{index}]")
    return FieldNames(fields.written | prompt)


def _chat(fields: JsonFields) -> inference_pb2.ChatPrompt:
    messages = []
    for index, given in enumerate(fields.mappings("messages")):
        inner = JsonFields(given)
        if inner.raw("content") is None and inner.raw("role") != "assistant":
            inner.wrong("content", "is required")
        message = inference_pb2.ChatMessage(role=_role(inner), content=_content(inner))
        _refuse_others(inner, _NOT_OFFERED_OF_A_MESSAGE)
        fields.take(f"messages[{index}].", inner)
        messages.append(message)
    opens = fields.flag("add_generation_prompt", default=True)
    return inference_pb2.ChatPrompt(messages=messages, add_generation_prompt=opens)


def _role(message: JsonFields) -> str:
    """OpenAI's newer name of the system is one that models do not know."""
    role = message.text("role") or ""
    return "system" if role == "developer" else role


def _content(message: JsonFields) -> str:
    """Text, or a list of text parts, which become lines."""
    content = message.raw("content")
    if not isinstance(content, list):
        return message.text("content") or ""
    parts = [JsonFields(part) for part in message.mappings("content")]
    if any(part.raw("type") != "text" or not isinstance(part.raw("text"), str) for part in parts):
        message.wrong("content", "only parts of type text are supported")
        return ""
    return "\n".join(part.text("text") or "" for part in parts)
