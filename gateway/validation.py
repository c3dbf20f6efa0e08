"""Turns what a client asked into a Request, or refuses it with every broken rule at once.

The frontend calls `accept` before anything else is allocated for a request. It is pure: ids, seeds and clocks
are arguments. Ranges are those documented in protos/crossdock/v1/inference.proto; workers check again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime

from crossdock.v1 import inference_pb2
from gateway import choices, guides, prompt
from gateway.request import ModelCard, Request, Sampling, Stop
from gateway.tokenizer import Tokenizer
from service.errors import DeadlineExpired, FieldViolation, ModelNotFound
from service.orders import (
    BEAM_WIDTH_MAX,
    CHOICES_MAX,
    LENGTH_PENALTY_MAX,
    LOGIT_BIAS_MAX,
    LOGIT_BIASES_MAX,
    PENALTY_MAX,
    PRIORITY_MAX,
    REPETITION_PENALTY_MAX,
)

LOGPROBS_MAX = 20
MODEL_BYTES_MAX = 256
REQUEST_ID_CHARACTERS_MAX = 128
CACHE_SALT_BYTES_MAX = 256
STOP_STRINGS_MAX = 16
STOP_STRING_BYTES_MAX = 256
STOP_TOKEN_IDS_MAX = 64
_PROMPT_FIELDS = {"text": "text", "token_ids": "token_ids.ids", "chat": "chat.messages"}
"""By kind: where what a prompt is made of stands."""


def accept(
    spec: inference_pb2.GenerationSpec,
    card: ModelCard,
    tokenizer: Tokenizer,
    *,
    new_id: Callable[[], str],
    new_seed: Callable[[], int],
    now: float,
    today: datetime,
    time_left_s: float | None,
    tenant: str = "",
    streamed: bool = False,
) -> Request:
    """now: seconds on the gateway's monotonic clock. today: for chat templates that name the date. tenant: who asks.
    streamed: deltas are shown as they come.

    Raises ModelNotFound, InvalidRequest (reason CONTEXT_LENGTH_EXCEEDED when only length is wrong) or
    DeadlineExpired. Costs what tokenising the text costs.
    """
    check_model(spec.model, card)
    if time_left_s is not None and time_left_s <= 0:
        raise DeadlineExpired("the deadline had passed before the request was accepted")
    broken = [*_broken_rules(spec, card), *choices.violations(spec, streamed=streamed)]
    broken += guides.violations(spec)
    prompt.refuse([*broken, *_broken_prompt(spec, card, tokenizer)], _too_long(spec, card))
    token_ids = prompt.truncated(_prompt_token_ids(spec, card, tokenizer, today), spec, card.tokens_max())
    prompt.refuse(list(prompt.scores_violations(spec, len(token_ids))))
    max_tokens = _max_tokens(spec, len(token_ids), card)
    return Request(
        id=spec.request_id or new_id(),
        model=card.name,
        prompt_token_ids=token_ids,
        sampling=_sampling(spec, new_seed),
        stop=_stop(spec, card, max(1, max_tokens)),
        include_special_tokens=spec.output.include_special_tokens,
        deadline=None if time_left_s is None else now + time_left_s,
        tenant=tenant,
        cache_salt=spec.cache_salt,
        priority=spec.priority,
        n=choices.number(spec.sampling),
        best_of=choices.best_of(spec.sampling),
        beam=choices.beam(spec.sampling),
        guide=guides.guide(spec),
        prompt_logprobs=spec.output.prompt_logprobs if spec.output.HasField("prompt_logprobs") else None,
        prompt_only=max_tokens == 0,
    )


def check_model(name: str, card: ModelCard) -> None:
    """An empty name means the model that is served. Raises ModelNotFound or InvalidRequest."""
    if len(name.encode()) > MODEL_BYTES_MAX:
        prompt.refuse([FieldViolation(field="model", description=f"at most {MODEL_BYTES_MAX} bytes")])
    if name not in ("", card.name):
        raise ModelNotFound("model: no model of this name is served here")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    """What an optional number may be: [low, high], or (low, high]. NaN is in no range."""

    field: str
    low: float
    high: float
    without_low: bool = False

    def admits(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.without_low and value == self.low)

    def rule(self) -> str:
        if self.low == self.high:
            return f"must be {self.low}"
        return f"must be in {'(' if self.without_low else '['}{self.low}, {self.high}]"


def _ranges(spec: inference_pb2.GenerationSpec, card: ModelCard) -> tuple[_Range, ...]:
    """Every number that a client may set, except what depends on the prompt's length; a seed can be any."""
    least_tokens = 0 if spec.output.HasField("prompt_logprobs") else 1
    return (
        _Range(field="sampling.temperature", low=0, high=2),
        _Range(field="sampling.top_p", low=0, high=1, without_low=True),
        _Range(field="sampling.top_k", low=0, high=card.vocab_size),
        _Range(field="sampling.min_p", low=0, high=1),
        _Range(field="sampling.max_tokens", low=least_tokens, high=card.tokens_max()),
        _Range(field="sampling.min_tokens", low=0, high=card.tokens_max()),
        _Range(field="sampling.n", low=1, high=CHOICES_MAX),
        _Range(field="sampling.best_of", low=1, high=CHOICES_MAX),
        _Range(field="sampling.beam_width", low=2, high=BEAM_WIDTH_MAX),
        _Range(field="sampling.length_penalty", low=-LENGTH_PENALTY_MAX, high=LENGTH_PENALTY_MAX),
        _Range(field="sampling.presence_penalty", low=-PENALTY_MAX, high=PENALTY_MAX),
        _Range(field="sampling.frequency_penalty", low=-PENALTY_MAX, high=PENALTY_MAX),
        _Range(field="sampling.repetition_penalty", low=0, high=REPETITION_PENALTY_MAX, without_low=True),
        _Range(field="output.logprobs", low=0, high=LOGPROBS_MAX),
        _Range(field="output.prompt_logprobs", low=0, high=LOGPROBS_MAX),
    )


def _broken_rules(spec: inference_pb2.GenerationSpec, card: ModelCard) -> Iterator[FieldViolation]:
    for limits in _ranges(spec, card):
        group, _, name = limits.field.partition(".")
        holder = getattr(spec, group)
        if holder.HasField(name) and not limits.admits(getattr(holder, name)):
            yield FieldViolation(field=limits.field, description=limits.rule())
    if len(spec.request_id) > REQUEST_ID_CHARACTERS_MAX or not all(" " <= c <= "~" for c in spec.request_id):
        rule = f"at most {REQUEST_ID_CHARACTERS_MAX} printable ASCII characters"
        yield FieldViolation(field="request_id", description=rule)
    if len(spec.cache_salt.encode()) > CACHE_SALT_BYTES_MAX:
        yield FieldViolation(field="cache_salt", description=f"at most {CACHE_SALT_BYTES_MAX} bytes")
    if abs(spec.priority) > PRIORITY_MAX:
        yield FieldViolation(field="priority", description=f"must be in [-{PRIORITY_MAX}, {PRIORITY_MAX}]")
    yield from prompt.truncation_violations(spec, card.tokens_max())
    yield from _broken_biases(spec.sampling, card)
    yield from _broken_stops(spec.stop, card)


def _broken_biases(sampling: inference_pb2.SamplingParams, card: ModelCard) -> Iterator[FieldViolation]:
    field, given = "sampling.logit_bias", sampling.logit_bias
    if len(given) > LOGIT_BIASES_MAX:
        yield FieldViolation(field=field, description=f"at most {LOGIT_BIASES_MAX} tokens")
        return
    if max(given, default=0) >= card.vocab_size:
        yield FieldViolation(field=field, description=f"each token id must be in [0, {card.vocab_size})")
    limits = _Range(field=field, low=-LOGIT_BIAS_MAX, high=LOGIT_BIAS_MAX)
    if not all(limits.admits(bias) for bias in given.values()):
        yield FieldViolation(field=field, description=f"each bias {limits.rule()}")


def _broken_stops(stop: inference_pb2.StopConditions, card: ModelCard) -> Iterator[FieldViolation]:
    if len(stop.strings) > STOP_STRINGS_MAX:
        yield FieldViolation(field="stop.strings", description=f"at most {STOP_STRINGS_MAX} strings")
    for index, string in enumerate(stop.strings[:STOP_STRINGS_MAX]):
        if not 1 <= len(string.encode()) <= STOP_STRING_BYTES_MAX:
            rule = f"1 to {STOP_STRING_BYTES_MAX} bytes"
            yield FieldViolation(field=f"stop.strings[{index}]", description=rule)
    if len(stop.token_ids) > STOP_TOKEN_IDS_MAX:
        yield FieldViolation(field="stop.token_ids", description=f"at most {STOP_TOKEN_IDS_MAX} ids")
    given = stop.token_ids[:STOP_TOKEN_IDS_MAX]
    yield from prompt.ids_violations("stop.token_ids", given, card.vocab_size)


def _broken_prompt(
    spec: inference_pb2.GenerationSpec, card: ModelCard, tokenizer: Tokenizer
) -> Iterator[FieldViolation]:
    kind = spec.WhichOneof("prompt")
    if kind is None:
        yield FieldViolation(field="prompt", description="one of text, token_ids and chat is required")
    elif kind == "chat":
        yield from prompt.chat_violations(spec.chat, tokenizer, prompt.given_max(spec, card.tokens_max()))
    elif kind == "token_ids":
        if not spec.token_ids.ids:
            yield FieldViolation(field="token_ids.ids", description="at least one token")
        given = spec.token_ids.ids[: prompt.given_max(spec, card.tokens_max())]
        yield from prompt.ids_violations("token_ids.ids", given, card.vocab_size)
    elif not spec.text and not tokenizer.encode(""):
        yield FieldViolation(field="text", description="at least one token")


def _too_long(spec: inference_pb2.GenerationSpec, card: ModelCard) -> list[FieldViolation]:
    """What is over the limit whatever comes of tokenising it."""
    tokens_max = prompt.given_max(spec, card.tokens_max())
    kind = spec.WhichOneof("prompt")
    if kind == "chat":
        return list(prompt.chat_too_long(spec.chat, tokens_max))
    if kind == "token_ids":
        return list(prompt.ids_too_long("token_ids.ids", len(spec.token_ids.ids), tokens_max))
    return list(prompt.text_too_long(spec.text, tokens_max))


def _prompt_token_ids(
    spec: inference_pb2.GenerationSpec, card: ModelCard, tokenizer: Tokenizer, today: datetime
) -> tuple[int, ...]:
    kind = spec.WhichOneof("prompt")
    if kind == "chat":
        given_max = prompt.given_max(spec, card.tokens_max())
        return prompt.encode_chat(spec.chat, tokenizer, tokens_max=given_max, today=today)
    return tuple(spec.token_ids.ids) if kind == "token_ids" else tuple(tokenizer.encode(spec.text))


def _max_tokens(spec: inference_pb2.GenerationSpec, prompt_tokens: int, card: ModelCard) -> int:
    """Asked for, or what the context leaves. The prompt, the answer and their sum have to fit."""
    tokens_max = card.tokens_max()
    left = tokens_max - prompt_tokens
    field = _PROMPT_FIELDS[spec.WhichOneof("prompt") or "text"]
    if prompt_tokens == 0:
        prompt.refuse([FieldViolation(field=field, description="at least one token")])
    if left < 1:
        text = f"{prompt_tokens} tokens; at most {tokens_max}, of which one is left for the answer"
        prompt.refuse([], [FieldViolation(field=field, description=text)])
    asked = spec.sampling.max_tokens if spec.sampling.HasField("max_tokens") else left
    if asked > left:
        text = f"must be in [1, {left}]: the prompt has {prompt_tokens} of at most {tokens_max} tokens"
        prompt.refuse([], [FieldViolation(field="sampling.max_tokens", description=text)])
    if spec.sampling.min_tokens > asked:
        text = f"must be in [0, {asked}], at most max_tokens"
        prompt.refuse([FieldViolation(field="sampling.min_tokens", description=text)])
    return asked


def _sampling(spec: inference_pb2.GenerationSpec, new_seed: Callable[[], int]) -> Sampling:
    asked = spec.sampling
    return Sampling(
        temperature=asked.temperature if asked.HasField("temperature") else 1.0,
        top_p=asked.top_p if asked.HasField("top_p") else 1.0,
        top_k=asked.top_k,
        min_p=asked.min_p,
        seed=asked.seed if asked.HasField("seed") else new_seed(),
        logprobs=spec.output.logprobs if spec.output.HasField("logprobs") else None,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty if asked.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(sorted(asked.logit_bias.items())),
    )


def _stop(spec: inference_pb2.GenerationSpec, card: ModelCard, max_tokens: int) -> Stop:
    ends = () if spec.stop.ignore_eos else card.eos_token_ids
    return Stop(
        max_tokens=max_tokens,
        min_tokens=spec.sampling.min_tokens,
        token_ids=frozenset(spec.stop.token_ids) | frozenset(ends),
        strings=tuple(spec.stop.strings),
        include_string=spec.stop.include_stop_string,
        final_token_ids=frozenset(card.eos_token_ids if spec.HasField("guide") else ()),
    )
