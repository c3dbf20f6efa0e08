"""What a client asked, after validation: immutable, tokenised, with id and seed fixed. Knows no protobuf."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from crossdock.seeds import choice_seed
from service.guides import Guide
from service.orders import Beam
from service.scores import Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What the gateway knows of the served model. capacity_tokens: of the longest sequence that every worker can
    hold, None while no worker has said."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    digest: str
    capacity_tokens: int | None

    def tokens_max(self) -> int:
        """Tokens that one request may have, prompt and answer together."""
        if self.capacity_tokens is None:
            return self.max_model_len
        return min(self.max_model_len, self.capacity_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Ranges as in crossdock.v1.SamplingParams; every default is resolved. logit_bias: by ascending token id."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    logprobs: int | None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """token_ids: what ends the answer, end-of-sequence tokens included unless they are ignored.
    strings: matched on the text, by the gateway. final_token_ids: what ends an answer anyway once its guide lets
    nothing else follow."""

    max_tokens: int
    min_tokens: int
    token_ids: frozenset[int]
    strings: tuple[str, ...]
    include_string: bool
    final_token_ids: frozenset[int] = frozenset()

    def ends(self, token_id: int) -> bool:
        """Whether an answer may stop with this token."""
        return token_id in self.token_ids or token_id in self.final_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """deadline: seconds on the gateway's monotonic clock, None for none. tenant: who asks, as the gateway knows it and
    not as the client says; cached prefixes are shared within a tenant and cache_salt only. priority: lower first. n:
    answers that the client gets, the best of so many that are generated. beam: they come from one search.
    prompt_logprobs: alternatives of each token of the prompt, None where nobody asks how likely these are. prompt_only:
    nothing else is wanted; what is generated, one token, is nobody's. guide: what the text of each answer must be."""

    id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    stop: Stop
    include_special_tokens: bool
    deadline: float | None
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    n: int = 1
    best_of: int = 1
    beam: Beam | None = None
    prompt_logprobs: int | None = None
    prompt_only: bool = False
    guide: Guide | None = None

    def seed_of(self, choice: int) -> int:
        """What a choice is a function of."""
        return choice_seed(self.sampling.seed, choice)

    def needed_logprobs(self) -> int | None:
        """Alternatives per token; what is the best of several is told from logprobs, whether the client sees them or
        not."""
        return 0 if self.best_of > self.n and self.sampling.logprobs is None else self.sampling.logprobs


class Token(NamedTuple):
    """One token of an answer. position: from 0. logprob, top: present when the request asked for logprobs;
    top holds (token id, logprob), most likely first."""

    position: int
    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class EndReason(Enum):
    STOP = auto()
    LENGTH = auto()


class TokenBatch(NamedTuple):
    """Tokens of one choice that arrived together, in order. end: set in its last batch; for STOP the last token is the
    match. scores: of the prompt without its first token, with the first batch of each choice, when asked for."""

    tokens: tuple[Token, ...]
    end: EndReason | None
    cached_tokens: int = 0
    choice: int = 0
    scores: Scores | None = None
