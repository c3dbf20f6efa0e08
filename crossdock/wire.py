"""Between the client's values and the messages of crossdock.v1. Decides nothing: limits are the server's."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar, cast

import grpc

from crossdock.v1 import inference_pb2 as pb
from crossdock.values import (
    Answer,
    Choice,
    Delta,
    FinishReason,
    Generation,
    Message,
    Model,
    Prompt,
    RequestError,
    TokenLogprob,
    Usage,
    Violation,
)

_Message = TypeVar("_Message")
_DETAILS_KEY = "grpc-status-details-bin"


def spec(prompt: Prompt, how: Generation) -> pb.GenerationSpec:
    """A request's body. A prompt of messages is a conversation, one of numbers is token ids."""
    text, token_ids, chat = None, None, None
    if isinstance(prompt, str):
        text = prompt
    elif prompt and isinstance(prompt[0], Message):
        chat = _chat(prompt)
    else:
        token_ids = _filled(pb.TokenIds, ids=[token for token in prompt if not isinstance(token, Message)])
    return _filled(
        pb.GenerationSpec,
        model=how.model,
        text=text,
        token_ids=token_ids,
        chat=chat,
        sampling=_filled(
            pb.SamplingParams,
            temperature=how.temperature,
            top_p=how.top_p,
            top_k=how.top_k,
            min_p=how.min_p,
            seed=how.seed,
            max_tokens=how.max_tokens,
            min_tokens=how.min_tokens,
            n=how.n,
            best_of=how.best_of,
            beam_width=how.beam_width,
            length_penalty=how.length_penalty,
            early_stopping=how.early_stopping,
            presence_penalty=how.presence_penalty,
            frequency_penalty=how.frequency_penalty,
            repetition_penalty=how.repetition_penalty,
            logit_bias=how.logit_bias,
        ),
        stop=_filled(
            pb.StopConditions,
            strings=_strings("stop", how.stop),
            token_ids=how.stop_token_ids,
            ignore_eos=how.ignore_eos,
            include_stop_string=how.include_stop_string,
        ),
        output=_filled(
            pb.OutputOptions,
            logprobs=how.logprobs,
            include_special_tokens=how.include_special_tokens,
            prompt_logprobs=how.prompt_logprobs,
        ),
        request_id=how.request_id,
        cache_salt=how.cache_salt,
        guide=_guide(how),
        priority=how.priority,
        truncate_prompt_tokens=how.truncate_prompt_tokens,
    )


def _guide(how: Generation) -> pb.Guide | None:
    """Raises RequestError for more than one rule, of which a message holds one only."""
    given = {
        "json_schema": _schema_text(how.json_schema),
        "json_object": how.json_object or None,
        "regex": how.regex,
        "choice": None
        if how.choice is None
        else _filled(pb.Guide.Choices, strings=_strings("choice", how.choice)),
        "grammar": how.grammar,
    }
    asked = {name: rule for name, rule in given.items() if rule is not None}
    if len(asked) > 1:
        raise RequestError("INVALID_ARGUMENT", f"{', '.join(asked)}: only one of them")
    return _filled(pb.Guide, **asked) if asked else None


def _schema_text(schema: str | Mapping[str, object] | None) -> str | None:
    if schema is None or isinstance(schema, str):
        return schema
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError):
        raise RequestError("INVALID_ARGUMENT", "json_schema: not what JSON can say") from None


def seconds(timeout_s: float | None) -> float | None:
    """A time limit that can be kept. Raises RequestError."""
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise RequestError("INVALID_ARGUMENT", "timeout_s: must be a positive number of seconds")
    return timeout_s


def _filled(message: Callable[..., _Message], **values: object) -> _Message:
    """The message with these fields. Raises RequestError for what its field cannot hold."""
    with suppress(ValueError, TypeError):
        return message(**values)
    for name, value in values.items():
        try:
            message(**{name: value})
        except UnicodeError:
            raise RequestError("INVALID_ARGUMENT", f"{name}: is not valid Unicode") from None
        except (ValueError, TypeError):
            text = f"{name}: {value!r} is nothing that this field can hold"
            raise RequestError("INVALID_ARGUMENT", text) from None
    raise AssertionError("each field by itself can be held")


def _strings(name: str, given: Sequence[str]) -> Sequence[str]:
    """Raises RequestError for a string, whose characters would pass for so many strings."""
    if isinstance(given, str):
        raise RequestError("INVALID_ARGUMENT", f"{name}: must be a sequence of strings, not one string")
    return given


def tokenize_request(prompt: str | Sequence[Message], model: str) -> pb.TokenizeRequest:
    if isinstance(prompt, str):
        return _filled(pb.TokenizeRequest, model=model, text=prompt)
    return pb.TokenizeRequest(model=model, chat=_chat(prompt))


def deltas(response: pb.GenerateStreamResponse) -> Iterator[Delta]:
    """What one message of a stream brings. The usage goes with the message's last delta."""
    usage = _usage(response.usage) if response.HasField("usage") else None
    for number, delta in enumerate(response.deltas, start=1):
        yield Delta(
            text=delta.text,
            token_ids=tuple(delta.token_ids),
            first_position=delta.first_position,
            logprobs=_logprobs(delta.token_ids, delta.logprobs),
            finish=FinishReason(delta.finish.reason) if delta.HasField("finish") else None,
            usage=usage if number == len(response.deltas) else None,
            choice=delta.index,
            prompt_logprobs=_prompt_logprobs(response.prompt_info) if number == 1 else (),
        )


def answer(response: pb.GenerateResponse) -> Answer:
    choices = tuple(
        Choice(
            text=output.text,
            token_ids=tuple(output.token_ids),
            logprobs=_logprobs(output.token_ids, output.logprobs),
            finish=FinishReason(output.finish.reason),
            seed=seed,
        )
        for output, seed in zip(response.outputs, response.prompt_info.choice_seeds, strict=True)
    )
    first = choices[0]
    return Answer(
        request_id=response.request_id,
        text=first.text,
        token_ids=first.token_ids,
        logprobs=first.logprobs,
        finish=first.finish,
        usage=_usage(response.usage),
        seed=response.prompt_info.seed,
        choices=choices,
        prompt_logprobs=_prompt_logprobs(response.prompt_info),
    )


def models(response: pb.ListModelsResponse) -> tuple[Model, ...]:
    return tuple(
        Model(
            name=model.name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=tuple(model.eos_token_ids),
            digest=model.digest,
        )
        for model in response.models
    )


def request_error(error: grpc.RpcError) -> RequestError:
    """The error of a failed call, with the google.rpc details if their types are importable here."""
    code, text = error.code().name, error.details() or ""
    try:
        from google.rpc import error_details_pb2, status_pb2
    except ImportError:
        return RequestError(code, text)
    metadata = dict(cast(Iterable[tuple[str, bytes]], error.trailing_metadata() or ()))
    rich = status_pb2.Status.FromString(metadata.get(_DETAILS_KEY, b""))
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    bad = error_details_pb2.BadRequest()
    for detail in rich.details:
        for into in (info, retry, bad):
            if detail.Is(into.DESCRIPTOR):
                detail.Unpack(into)
    return RequestError(
        code,
        text,
        reason=info.reason,
        violations=tuple(Violation(field=v.field, description=v.description) for v in bad.field_violations),
        retry_after_ms=retry.retry_delay.ToMilliseconds() if retry.HasField("retry_delay") else None,
    )


def _chat(messages: Sequence[object]) -> pb.ChatPrompt:
    return pb.ChatPrompt(
        messages=[
            _filled(pb.ChatMessage, role=message.role, content=message.content)
            for message in messages
            if isinstance(message, Message)
        ]
    )


def _usage(usage: pb.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _prompt_logprobs(info: pb.PromptInfo) -> tuple[TokenLogprob, ...]:
    return _logprobs(info.token_ids[1:], info.prompt_logprobs)


def _logprobs(token_ids: Sequence[int], logprobs: pb.Logprobs) -> tuple[TokenLogprob, ...]:
    wide = logprobs.top_count
    top = list(zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True))
    return tuple(
        TokenLogprob(token_id=token, logprob=logprob, top=tuple(top[i * wide : (i + 1) * wide]))
        for i, (token, logprob) in enumerate(zip(token_ids, logprobs.token_logprobs, strict=False))
    )
