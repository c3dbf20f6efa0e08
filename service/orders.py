"""One attempt at a sequence, as it is told between our processes, and its translation to and from the wire.

The gateway makes orders; workers check them again, since a worker does not trust its gateway's arithmetic: ranges by
the table that the gateway has too (service/ranges.py), rules between fields here. Knows no engine and no ticket.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from crossdock.v1 import inference_pb2
from crossdock.worker.v1 import worker_pb2 as pb
from service import guides, ranges
from service.errors import FieldViolation, InvalidRequest
from service.guides import Guide, GuideRefused
from service.ranges import Measures, range_of

CHOICES_MAX = range_of(inference_pb2.SamplingParams, "n", "value").most()
PRIORITY_S = 5.0
"""How many seconds of waiting one step of priority is worth."""
AGE_MS_MAX = range_of(pb.SequenceSpec, "age_ms", "value").most()
PREEMPTIONS_MAX = range_of(pb.SequenceSpec, "preemptions", "value").most()
"""A request that was given up so often is promised all its blocks, and is not given up again."""
REQUEST_ID_BYTES_MAX = range_of(pb.SequenceSpec, "request_id", "bytes").most()
SCORES_MAX = 400_000
"""Logprobs of a prompt's tokens and of their alternatives, in all: 3 MiB at seven bytes each."""

_Params = TypeVar("_Params")


class AttemptKey(NamedTuple):
    """Names one try at a request. attempt: from 1; a newer one makes all older ones void."""

    request_id: str
    attempt: int


class AttemptRefused(Exception):
    """An attempt that must not begin beside what is live. One line."""


def superseded(gateway: str, key: AttemptKey, live: Iterable[tuple[str, AttemptKey]]) -> list[AttemptKey]:
    """The older attempts at the same request, which this one makes void. live: (gateway, attempt) pairs of a worker.

    Raises AttemptRefused when a newer attempt is live, or when the request is another gateway's: whoever asks for a
    request is the only one who may end it.
    """
    rivals = [(owner, other) for owner, other in live if other.request_id == key.request_id]
    if any(owner != gateway for owner, _ in rivals):
        raise AttemptRefused("another gateway has a request of this name")
    if any(other.attempt > key.attempt for _, other in rivals):
        raise AttemptRefused("a newer attempt is live")
    return [other for _, other in rivals if other.attempt < key.attempt]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the answers to a request. index: its number there, from 0. seed: what its tokens are drawn with."""

    index: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """Answers by beam search. width: hypotheses that are followed at once. length_penalty: a hypothesis scores the sum
    of its logprobs divided by its length to this power. early_stopping: end with the first `width` complete ones."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOrder:
    """token_ids: prompt and what was already emitted; prompt_tokens: how many of them are the prompt. choices: the
    answers that go on from these tokens, each by itself. beam: they are the best of a search, None for sampled ones.
    guide: what the text after the prompt must be.

    max_tokens, min_tokens: of the whole answer, counted from the prompt's end. cache_scope: orders of one scope share
    cached prefixes; empty for none. preemptions: how often a worker gave the request up. age_ms: since it was accepted.
    priority: lower first. prompt_logprobs: alternatives of each token of the prompt, None where nobody asks how likely
    these are; nothing of a prompt of which somebody does comes from a cache. logit_bias: (token id, bias) by ascending
    id. The other fields are as in engine.sequence.SamplingParams.
    """

    key: AttemptKey
    choices: tuple[Choice, ...]
    token_ids: tuple[int, ...]
    prompt_tokens: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    logprobs: int | None
    cache_scope: bytes = b""
    beam: Beam | None = None
    guide: Guide | None = None
    preemptions: int = 0
    age_ms: int = 0
    priority: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: int | None = None

    def sampling(self, choice: Choice, make: Callable[..., _Params]) -> _Params:
        """How the tokens of one of the choices are drawn. make: engine.sequence.SamplingParams, which is not known
        here."""
        return make(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=choice.seed,
            logprobs=self.logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
        )

    def stop_rules(self, make: Callable[..., _Params], ends: frozenset[int]) -> _Params:
        """When an answer ends by its tokens. make: engine.sequence.StopRules. ends: what says that its guide is
        complete."""
        return make(
            length_limit=self.length_limit(),
            min_length=self.prompt_tokens + self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            final_token_ids=ends,
        )

    def arrived(self, now: float) -> float:
        """When it counts as having come, in seconds on the clock of `now`: whoever came first goes first. What has
        waited elsewhere keeps its place, and a priority is so many seconds, so that nobody waits for ever."""
        return now - self.age_ms / 1000 + self.priority * PRIORITY_S

    def answered(self) -> tuple[int, ...]:
        """What was already emitted."""
        return self.token_ids[self.prompt_tokens :]

    def comes_back(self) -> bool:
        """Whether workers have served it before and it was given up or lost: to refuse it would end an answer that has
        begun."""
        return self.preemptions > 0 or len(self.token_ids) > self.prompt_tokens

    def length_limit(self) -> int:
        """Tokens in all at which the answer is complete."""
        return self.prompt_tokens + self.max_tokens

    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.length_limit() - len(self.token_ids)

    def goes_on(self) -> bool:
        """Whether it needs a worker that generates: an answer of one token ends where its prompt is computed."""
        return self.remaining() > 1 or self.beam is not None

    def branches(self) -> int:
        """Sequences that may run at once: one as long as all choices stand at the same tokens."""
        if self.beam is not None:
            return self.beam.width
        return len(self.choices) if self.goes_on() else 1

    def common_tokens(self) -> int:
        """Tokens from the start whose KV no branch writes: a search computes the last token of the prompt again."""
        return len(self.token_ids) - (self.beam is not None)

    def branch_blocks(self, block_size: int) -> int:
        """Blocks that one branch can ever need, those that it has in common with others among them."""
        return -(-max(len(self.token_ids), self.length_limit() - 1) // block_size)

    def blocks(self, block_size: int) -> int:
        """Blocks that all branches together can ever need. Each copies the block that the common tokens end in before
        it goes on in it."""
        branches, full = self.branches(), self.common_tokens() // block_size
        copied = branches > 1 and (self.beam is not None or self.common_tokens() % block_size > 0)
        return full + copied + branches * (self.branch_blocks(block_size) - full)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderLimits:
    """vocab_size: ids are below it. tokens_max: tokens in all that fit this worker for one sequence."""

    vocab_size: int
    tokens_max: int


def prompt_alternatives_max(prompt_tokens: int) -> int:
    """How many alternatives of each of its tokens are told; below 0 where not even the tokens' own logprobs are."""
    return SCORES_MAX // max(1, prompt_tokens) - 1


def to_spec(order: SequenceOrder) -> pb.SequenceSpec:
    """The order on the wire."""
    return pb.SequenceSpec(
        request_id=order.key.request_id,
        attempt=order.key.attempt,
        choices=[pb.SequenceChoice(index=each.index, seed=each.seed) for each in order.choices],
        token_ids=order.token_ids,
        prompt_tokens=order.prompt_tokens,
        max_tokens=order.max_tokens,
        min_tokens=order.min_tokens,
        stop_token_ids=sorted(order.stop_token_ids),
        temperature=order.temperature,
        top_p=order.top_p,
        top_k=order.top_k,
        min_p=order.min_p,
        logprobs=order.logprobs,
        cache_scope=order.cache_scope,
        preemptions=order.preemptions,
        age_ms=order.age_ms,
        priority=order.priority,
        prompt_logprobs=order.prompt_logprobs,
        beam=None if order.beam is None else _to_beam(order.beam),
        presence_penalty=order.presence_penalty,
        frequency_penalty=order.frequency_penalty,
        repetition_penalty=order.repetition_penalty,
        logit_bias=dict(order.logit_bias),
        guide=None if order.guide is None else guides.to_wire(order.guide),
    )


def from_spec(spec: pb.SequenceSpec, limits: OrderLimits) -> SequenceOrder:
    """The order, checked against what this worker can do. Raises InvalidRequest with every violation."""
    order = SequenceOrder(
        key=AttemptKey(request_id=spec.request_id, attempt=spec.attempt),
        choices=tuple(Choice(index=each.index, seed=each.seed) for each in spec.choices),
        token_ids=tuple(spec.token_ids),
        prompt_tokens=spec.prompt_tokens,
        max_tokens=spec.max_tokens,
        min_tokens=spec.min_tokens,
        stop_token_ids=frozenset(spec.stop_token_ids),
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        logprobs=spec.logprobs if spec.HasField("logprobs") else None,
        cache_scope=spec.cache_scope,
        preemptions=spec.preemptions,
        age_ms=spec.age_ms,
        priority=spec.priority,
        prompt_logprobs=spec.prompt_logprobs if spec.HasField("prompt_logprobs") else None,
        beam=_from_beam(spec.beam) if spec.HasField("beam") else None,
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        repetition_penalty=spec.repetition_penalty if spec.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(sorted(spec.logit_bias.items())),
        guide=_from_guide(spec.guide) if spec.HasField("guide") else None,
    )
    broken = ranges.violations(spec, _measures(limits))
    named = {violation.field for violation in broken}
    broken += [each for each in _broken_rules(order, limits) if each.field not in named]
    if broken:
        raise InvalidRequest(*broken)
    return order


def _to_beam(beam: Beam) -> pb.BeamSearch:
    return pb.BeamSearch(
        width=beam.width, length_penalty=beam.length_penalty, early_stopping=beam.early_stopping
    )


def _from_beam(beam: pb.BeamSearch) -> Beam:
    return Beam(width=beam.width, length_penalty=beam.length_penalty, early_stopping=beam.early_stopping)


def _from_guide(message: pb.Guide) -> Guide:
    try:
        return guides.from_wire(message)
    except GuideRefused as refused:
        raise InvalidRequest(FieldViolation(field="guide", description=str(refused))) from None


def _measures(limits: OrderLimits) -> Measures:
    tokens = limits.tokens_max
    return Measures(vocab_size=limits.vocab_size, max_model_len=tokens, prompt_tokens=tokens)


def _broken_rules(order: SequenceOrder, limits: OrderLimits) -> list[FieldViolation]:
    """Of those between fields."""
    indices = {each.index for each in order.choices}
    rules = (
        ("prompt_tokens", order.prompt_tokens <= len(order.token_ids), "in [1, number of token_ids]"),
        ("max_tokens", order.remaining() >= 1, "more than what was already emitted"),
        (
            "max_tokens",
            order.length_limit() <= limits.tokens_max,
            f"with the prompt at most {limits.tokens_max}",
        ),
        ("min_tokens", order.min_tokens <= order.max_tokens, "at most max_tokens"),
        ("stop_token_ids", len(order.stop_token_ids) < limits.vocab_size, "not every token"),
        ("choices", len(indices) == len(order.choices), "each index once"),
        ("choices", max(indices, default=0) < CHOICES_MAX, f"indices below {CHOICES_MAX}"),
        *_score_rules(order),
        *_beam_rules(order, order.beam),
        *_guide_rules(order, order.guide),
    )
    return [FieldViolation(field=field, description=rule) for field, holds, rule in rules if not holds]


def _score_rules(order: SequenceOrder) -> tuple[tuple[str, bool, str], ...]:
    """They come before the first token, once."""
    if order.prompt_logprobs is None:
        return ()
    at_its_end = len(order.token_ids) == order.prompt_tokens
    alternatives_max = prompt_alternatives_max(order.prompt_tokens)
    return (
        ("prompt_logprobs", order.prompt_logprobs <= alternatives_max, f"at most {alternatives_max}"),
        ("prompt_logprobs", order.beam is None, "not of a search"),
        ("prompt_logprobs", at_its_end, "only before the first token"),
    )


def _beam_rules(order: SequenceOrder, beam: Beam | None) -> tuple[tuple[str, bool, str], ...]:
    if beam is None:
        return ()
    return (
        ("choices", len(order.choices) <= beam.width, "at most beam.width"),
        ("token_ids", len(order.token_ids) == order.prompt_tokens, "a search begins at the prompt's end"),
    )


def _guide_rules(order: SequenceOrder, guide: Guide | None) -> tuple[tuple[str, bool, str], ...]:
    if guide is None:
        return ()
    violation = guide.violation()
    return (
        ("guide", order.beam is None, "not with a beam search"),
        ("guide.text", violation is None, violation or ""),
    )
