"""One attempt at a sequence, as it is told between our processes, and its translation to and from the wire.

The gateway makes orders; workers check them again, since a worker does not trust its gateway's arithmetic. Knows
no engine and no ticket.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from crossdock.worker.v1 import worker_pb2 as pb
from service.errors import FieldViolation, InvalidRequest

LOGPROBS_MAX = 20
CACHE_SCOPE_BYTES_MAX = 64
PRIORITY_MAX = 100
PRIORITY_S = 5.0
"""How many seconds of waiting one step of priority is worth."""
AGE_MS_MAX = 86_400_000
PREEMPTIONS_MAX = 2
"""A request that was given up so often is promised all its blocks, and is not given up again."""
STOP_TOKENS_MAX = 128
REQUEST_ID_BYTES_MAX = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptKey:
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
class SequenceOrder:
    """token_ids: prompt and what was already emitted; prompt_tokens: how many of them are the prompt.

    max_tokens, min_tokens: of the whole answer, counted from the prompt's end. time_left_ms: None for no deadline.
    cache_scope: orders of one scope share cached prefixes; empty for none. preemptions: how often a worker gave the
    request up. age_ms: since it was accepted. priority: in [-PRIORITY_MAX, PRIORITY_MAX], lower first.
    The other fields are as in engine.sequence.SamplingParams.
    """

    key: AttemptKey
    choice: int
    token_ids: tuple[int, ...]
    prompt_tokens: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    logprobs: int | None
    time_left_ms: int | None
    cache_scope: bytes = b""
    preemptions: int = 0
    age_ms: int = 0
    priority: int = 0

    def arrived(self, now: float) -> float:
        """When it counts as having come, in seconds on the clock of `now`: whoever came first goes first. What has
        waited elsewhere keeps its place, and a priority is so many seconds, so that nobody waits for ever."""
        return now - self.age_ms / 1000 + self.priority * PRIORITY_S

    def length_limit(self) -> int:
        """Tokens in all at which the answer is complete."""
        return self.prompt_tokens + self.max_tokens

    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.length_limit() - len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderLimits:
    """vocab_size: ids are below it. tokens_max: tokens in all that fit this worker for one sequence."""

    vocab_size: int
    tokens_max: int


def to_spec(order: SequenceOrder) -> pb.SequenceSpec:
    """The order on the wire."""
    return pb.SequenceSpec(
        request_id=order.key.request_id,
        attempt=order.key.attempt,
        choice=order.choice,
        token_ids=order.token_ids,
        prompt_tokens=order.prompt_tokens,
        max_tokens=order.max_tokens,
        min_tokens=order.min_tokens,
        stop_token_ids=sorted(order.stop_token_ids),
        temperature=order.temperature,
        top_p=order.top_p,
        top_k=order.top_k,
        min_p=order.min_p,
        seed=order.seed,
        logprobs=order.logprobs,
        time_left_ms=order.time_left_ms or 0,
        cache_scope=order.cache_scope,
        preemptions=order.preemptions,
        age_ms=order.age_ms,
        priority=order.priority,
    )


def from_spec(spec: pb.SequenceSpec, limits: OrderLimits) -> SequenceOrder:
    """The order, checked against what this worker can do. Raises InvalidRequest with every violation."""
    order = SequenceOrder(
        key=AttemptKey(request_id=spec.request_id, attempt=spec.attempt),
        choice=spec.choice,
        token_ids=tuple(spec.token_ids),
        prompt_tokens=spec.prompt_tokens,
        max_tokens=spec.max_tokens,
        min_tokens=spec.min_tokens,
        stop_token_ids=frozenset(spec.stop_token_ids),
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        seed=spec.seed,
        logprobs=spec.logprobs if spec.HasField("logprobs") else None,
        time_left_ms=spec.time_left_ms or None,
        cache_scope=spec.cache_scope,
        preemptions=spec.preemptions,
        age_ms=spec.age_ms,
        priority=spec.priority,
    )
    violations = _violations(order, limits)
    if violations:
        raise InvalidRequest(*violations)
    return order


def _violations(order: SequenceOrder, limits: OrderLimits) -> list[FieldViolation]:
    known, vocab = len(order.token_ids), limits.vocab_size
    id_bytes = len(order.key.request_id.encode())
    rules = (
        ("request_id", 1 <= id_bytes <= REQUEST_ID_BYTES_MAX, f"1 to {REQUEST_ID_BYTES_MAX} bytes"),
        ("attempt", order.key.attempt >= 1, "at least 1"),
        ("token_ids", known >= 1, "at least one"),
        ("token_ids", max(order.token_ids, default=0) < vocab, f"each in [0, {vocab})"),
        ("prompt_tokens", 1 <= order.prompt_tokens <= known, "in [1, number of token_ids]"),
        ("max_tokens", order.remaining() >= 1, "more than what was already emitted"),
        (
            "max_tokens",
            order.length_limit() <= limits.tokens_max,
            f"with the prompt at most {limits.tokens_max}",
        ),
        ("min_tokens", order.min_tokens <= order.max_tokens, "at most max_tokens"),
        ("stop_token_ids", len(order.stop_token_ids) <= STOP_TOKENS_MAX, f"at most {STOP_TOKENS_MAX}"),
        ("stop_token_ids", len(order.stop_token_ids) < vocab, "not every token"),
        ("stop_token_ids", max(order.stop_token_ids, default=0) < vocab, f"each in [0, {vocab})"),
        ("temperature", _within(order.temperature, 0.0, 2.0), "in [0, 2]"),
        ("top_p", _within(order.top_p, 0.0, 1.0) and order.top_p > 0, "in (0, 1]"),
        ("top_k", order.top_k <= vocab, f"in [0, {vocab}]"),
        ("min_p", _within(order.min_p, 0.0, 1.0), "in [0, 1]"),
        (
            "cache_scope",
            len(order.cache_scope) <= CACHE_SCOPE_BYTES_MAX,
            f"at most {CACHE_SCOPE_BYTES_MAX} bytes",
        ),
        ("preemptions", order.preemptions <= PREEMPTIONS_MAX, f"at most {PREEMPTIONS_MAX}"),
        ("age_ms", order.age_ms <= AGE_MS_MAX, f"at most {AGE_MS_MAX}"),
        ("priority", abs(order.priority) <= PRIORITY_MAX, f"in [-{PRIORITY_MAX}, {PRIORITY_MAX}]"),
        ("logprobs", (order.logprobs or 0) <= LOGPROBS_MAX, f"in [0, {LOGPROBS_MAX}]"),
    )
    return [FieldViolation(field=field, description=rule) for field, holds, rule in rules if not holds]


def _within(value: float, low: float, high: float) -> bool:
    return math.isfinite(value) and low <= value <= high
