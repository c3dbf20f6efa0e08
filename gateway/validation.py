"""Turns what a client asked into a Request, or refuses it with every broken rule at once.

The frontend calls `accept` before anything else is allocated for a request. It is pure: ids, seeds and clocks
are arguments. Ranges are those that the contracts give each field (service/ranges.py), by which workers check
again; what stands here are rules between fields.
"""

from collections.abc import Callable, Iterator
from datetime import datetime

from crossdock.v1 import inference_pb2
from gateway import choices, guides, prompt
from gateway.request import ModelCard, Request, Sampling, Stop
from gateway.tokenizer import Tokenizer
from service import ranges
from service.errors import DeadlineExpired, Excess, FieldViolation, ModelNotFound
from service.ranges import Measures, range_of

_MODEL_BYTES = range_of(inference_pb2.GenerationSpec, "model", "bytes")
REQUEST_ID_CHARACTERS_MAX = range_of(inference_pb2.GenerationSpec, "request_id", "characters").most()
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
    sharing: int = 1,
) -> Request:
    """now: seconds on the gateway's monotonic clock. today: for chat templates that name the date. tenant: who asks.
    streamed: deltas are shown as they come. sharing: requests whose answers come in one message, unless streamed.

    Raises ModelNotFound, InvalidRequest (reason CONTEXT_LENGTH_EXCEEDED when only length is wrong) or
    DeadlineExpired. Costs what tokenising the text costs.
    """
    check_model(spec.model, card)
    if time_left_s is not None and time_left_s <= 0:
        raise DeadlineExpired("the deadline had passed before the request was accepted")
    measures = _measures(spec, card)
    broken = ranges.violations(spec, measures)
    too_large = any(each.field.startswith("guide.") for each in broken)
    broken += [*choices.violations(spec, streamed=streamed), *guides.violations(spec, too_large=too_large)]
    prompt.refuse([*broken, *_broken_rules(spec), *_broken_prompt(spec, tokenizer, measures)])
    token_ids = prompt.truncated(_prompt_token_ids(spec, card, tokenizer, today), spec, card.tokens_max())
    prompt.refuse(prompt.scores_violations(spec, len(token_ids), 1 if streamed else sharing))
    whole_max = card.tokens_max() if streamed else prompt.whole_max(spec, sharing)
    max_tokens = _max_tokens(spec, len(token_ids), card, whole_max)
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
    if name not in ("", card.name):
        prompt.refuse(_MODEL_BYTES.violations("model", len(name.encode())))
        raise ModelNotFound("model: no model of this name is served here")


def check_tokenize(asked: inference_pb2.TokenizeRequest, card: ModelCard, tokenizer: Tokenizer) -> None:
    """Raises ModelNotFound or InvalidRequest."""
    check_model(asked.model, card)
    measures = _measures_of_any(card)
    broken = ranges.violations(asked, measures)
    if asked.WhichOneof("input") == "chat":
        broken += prompt.chat_violations(asked.chat, tokenizer, measures)
    prompt.refuse(broken)


def check_detokenize(asked: inference_pb2.DetokenizeRequest, card: ModelCard) -> None:
    """Raises ModelNotFound or InvalidRequest."""
    check_model(asked.model, card)
    prompt.refuse(ranges.violations(asked, _measures_of_any(card)))


def _measures(spec: inference_pb2.GenerationSpec, card: ModelCard) -> Measures:
    tokens_max = card.tokens_max()
    return Measures(
        vocab_size=card.vocab_size,
        max_model_len=tokens_max,
        prompt_tokens=prompt.given_max(spec, tokens_max),
    )


def _measures_of_any(card: ModelCard) -> Measures:
    """Of what is not computed, whether it would fit the workers or not."""
    length = card.max_model_len
    return Measures(vocab_size=card.vocab_size, max_model_len=length, prompt_tokens=length)


def _broken_rules(spec: inference_pb2.GenerationSpec) -> Iterator[FieldViolation]:
    if not all(" " <= c <= "~" for c in spec.request_id[: REQUEST_ID_CHARACTERS_MAX + 1]):
        yield FieldViolation(field="request_id", description="printable ASCII characters only")
    sampling = spec.sampling
    if (
        sampling.HasField("max_tokens")
        and sampling.max_tokens == 0
        and not spec.output.HasField("prompt_logprobs")
    ):
        yield FieldViolation(field="sampling.max_tokens", description="at least 1 without prompt_logprobs")


def _broken_prompt(
    spec: inference_pb2.GenerationSpec, tokenizer: Tokenizer, measures: Measures
) -> Iterator[FieldViolation]:
    kind = spec.WhichOneof("prompt")
    if kind is None:
        yield FieldViolation(field="prompt", description="one of text, token_ids and chat is required")
    elif kind == "chat":
        yield from prompt.chat_violations(spec.chat, tokenizer, measures)
    elif kind == "text" and not spec.text and not tokenizer.encode(""):
        yield FieldViolation(field="text", description="at least one token")


def _prompt_token_ids(
    spec: inference_pb2.GenerationSpec, card: ModelCard, tokenizer: Tokenizer, today: datetime
) -> tuple[int, ...]:
    kind = spec.WhichOneof("prompt")
    if kind == "chat":
        given_max = prompt.given_max(spec, card.tokens_max())
        return prompt.encode_chat(spec.chat, tokenizer, tokens_max=given_max, today=today)
    return tuple(spec.token_ids.ids) if kind == "token_ids" else tuple(tokenizer.encode(spec.text))


def _max_tokens(
    spec: inference_pb2.GenerationSpec, prompt_tokens: int, card: ModelCard, whole_max: int
) -> int:
    """Asked for, or what the context and a message leave. The prompt, the answer and their sum have to fit. whole_max:
    of one answer that is said at once."""
    tokens_max = card.tokens_max()
    left = tokens_max - prompt_tokens
    field = _PROMPT_FIELDS[spec.WhichOneof("prompt") or "text"]
    if prompt_tokens == 0:
        prompt.refuse([FieldViolation(field=field, description="at least one token")])
    if left < 1:
        text = f"{prompt_tokens} tokens; at most {tokens_max}, of which one is left for the answer"
        excess = Excess(most=tokens_max - 1, got=prompt_tokens, unit="token")
        prompt.refuse([FieldViolation(field=field, description=text, excess=excess)])
    asked = spec.sampling.max_tokens if spec.sampling.HasField("max_tokens") else min(left, whole_max)
    if asked > left:
        text = f"must be in [1, {left}]: the prompt has {prompt_tokens} of at most {tokens_max} tokens"
        excess = Excess(most=left, got=asked, unit="token")
        prompt.refuse([FieldViolation(field="sampling.max_tokens", description=text, excess=excess)])
    if asked > whole_max:
        text = f"at most {whole_max} for so many answers and logprobs in one message; more can be streamed"
        prompt.refuse([FieldViolation(field="sampling.max_tokens", description=text)])
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
