"""What a client says and hears, as frozen values. They know no protobuf object and no connection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from crossdock.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How to answer. None leaves a value to the server; ranges and defaults as in
    crossdock.v1.SamplingParams.

    timeout_s: for the whole answer, None for none. logit_bias: by token id. json_schema, json_object, regex, choice,
    grammar: what the answer must be, one of them at most, as in crossdock.v1.Guide; a schema is JSON text or what
    `json` makes such text of.
    """

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_string: bool = False
    logprobs: int | None = None
    include_special_tokens: bool = False
    request_id: str = ""
    cache_salt: str = ""
    priority: int = 0
    timeout_s: float | None = None
    n: int | None = None
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    json_schema: str | Mapping[str, object] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None


class FinishReason(Enum):
    """STOP: an end-of-sequence token, a stop token or a stop string. LENGTH: max_tokens or the context's
    end."""

    STOP = pb.FINISH_REASON_STOP
    LENGTH = pb.FINISH_REASON_LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural logarithms. top: (token id, logprob), most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of tokens. cached_tokens: of the prompt, found in a prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What is new in one choice. first_position: of token_ids[0] in it. finish: with the choice's last delta; usage:
    with the last one of all. prompt_logprobs: with the first one of all, when asked for; as in Answer."""

    text: str
    token_ids: tuple[int, ...]
    first_position: int
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason | None
    usage: Usage | None
    choice: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of several answers. seed: a request with this seed and n = 1 gets the same one."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The whole of an answer. seed: the one that it is a function of. text, token_ids, logprobs, finish: of the first
    of its choices. prompt_logprobs: of the prompt's tokens but the first, when asked for."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason
    usage: Usage
    seed: int
    choices: tuple[Choice, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """max_model_len: tokens of a request, prompt and answer together."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A field of the request, and the rule it breaks."""

    field: str
    description: str


class RequestError(Exception):
    """The server's refusal, or its absence. code: gRPC status code's name. reason: UPPER_SNAKE, "" if
    unknown. retry_after_ms: when the server named a delay."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        reason: str = "",
        violations: tuple[Violation, ...] = (),
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.violations = violations
        self.retry_after_ms = retry_after_ms
