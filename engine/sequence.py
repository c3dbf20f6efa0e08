"""One choice's progress on one engine.

Owns the known tokens, how many of them are computed, the block table and the state. Called by the core alone;
everybody else sees frozen views. Never decides anything: what comes next is a policy's business.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from struct import Struct
from typing import NamedTuple, TypeAlias

from engine.adjustments import Adjustments, Biases, adjustments_of
from engine.cache.block_pool import Credit
from engine.cache.block_table import BlockTable
from engine.cache.prefix_chain import PrefixChain
from engine.constraint import Constraint
from engine.errors import IllegalTransition

SequenceId: TypeAlias = tuple[str, int, int]
"""(request id, attempt, choice)."""

_PACKED = Struct("=dddqQ")
_SEED_MASK = (1 << 64) - 1

NO_TOKENS: frozenset[int] = frozenset()

PREEMPTIONS_MAX = 2
"""A sequence that was given up this often is promised all blocks that it can ever need, and is not given up again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen.

    temperature: [0, 2], 0 is greedy. top_k: count, 0 is off. top_p: (0, 1], 1 is off. min_p: [0, 1], 0 is off.
    seed: any 64-bit integer; the noise of the token at position p is a function of (seed, p) alone. packed: these five,
    as compiled kernels take them.
    logprobs: number of alternatives per token, None for no logprobs at all. candidates: how many of the likeliest next
    tokens are told beside the one that is drawn, for whoever draws by itself.
    presence_penalty, frequency_penalty: [-2, 2], 0 is off. repetition_penalty: (0, 2], 1 is off. logit_bias: each in
    [-100, 100]. What these four do: `engine.adjustments`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    candidates: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Biases = ()
    packed: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        five = (self.temperature, self.top_p, self.min_p, self.top_k, self.seed & _SEED_MASK)
        object.__setattr__(self, "packed", _PACKED.pack(*five))


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """When a sequence ends by its tokens. Text rules are the gateway's.

    length_limit: tokens in all, prompt included, at which the sequence ends. min_length: tokens in all before
    which no stop token is sampled. stop_token_ids: end-of-sequence tokens included unless they are ignored.
    final_token_ids: of constrained sequences alone, what says that it is complete: drawn before its time only where the
    constraint allows nothing else, and the end at any length.
    """

    length_limit: int
    min_length: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    final_token_ids: frozenset[int] = frozenset()

    def banned_after(self, length: int) -> frozenset[int]:
        """What may not follow so many tokens."""
        banned = self.stop_token_ids if length < self.min_length else NO_TOKENS
        return banned | (self.final_token_ids - self.stop_token_ids) if self.final_token_ids else banned

    def ends(self) -> frozenset[int]:
        """Tokens that may be the last one."""
        return self.stop_token_ids | self.final_token_ids if self.final_token_ids else self.stop_token_ids

    def end_with(self, token: int, length: int) -> "EndReason | None":
        """Whether a run of so many tokens ends with this one."""
        if token in self.final_token_ids:
            return EndReason.STOP
        if token in self.stop_token_ids and length > self.min_length:
            return EndReason.STOP
        return EndReason.LENGTH if length >= self.length_limit else None


class State(Enum):
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    """Given up for want of blocks: it has none."""
    FINISHED = auto()
    DETACHED = auto()


class Event(Enum):
    START = auto()
    PREEMPT = auto()
    RESUME = auto()
    FINISH = auto()
    DETACH = auto()


TRANSITIONS: Mapping[tuple[State, Event], State] = {
    (State.WAITING, Event.START): State.RUNNING,
    (State.WAITING, Event.DETACH): State.DETACHED,
    (State.RUNNING, Event.PREEMPT): State.PREEMPTED,
    (State.PREEMPTED, Event.RESUME): State.RUNNING,
    (State.PREEMPTED, Event.DETACH): State.DETACHED,
    (State.RUNNING, Event.FINISH): State.FINISHED,
    (State.RUNNING, Event.DETACH): State.DETACHED,
    (State.FINISHED, Event.DETACH): State.DETACHED,
}
"""What may happen to a sequence; everything else raises."""


class EndReason(Enum):
    STOP = auto()
    LENGTH = auto()
    DEAD_END = auto()
    """Its constraint allowed no token. The last token that it has is an ordinary one."""


@dataclass(slots=True, kw_only=True)
class Sequence:
    """Known tokens, computed count, table, credit to grow by and state of one choice.

    computed: tokens whose KV is in the table, in [0, known()]. pending: tokens after the known ones that steps are
    drawing, of which nobody has read which they are. A sequence with one token left to compute
    generates; one with more is still reading its prompt. arrived: seconds on the engine's clock, in the past for one
    that has waited elsewhere; whoever arrived first goes first. chain: names its prefixes for the cache. cached: tokens
    that were found there when it started. row: of its table among those that run. preemptions: how often it was given
    up, here or elsewhere. twins: how further tokens are drawn from the row that its next one is drawn from, for other
    choices that begin with the same tokens, with the same penalties and biases. prompt_tokens: how many of the tokens
    that it was made with come before the answer; needed for penalties and biases only. adjustments: what these make of
    the known tokens, computed where it is not given. scored: alternatives of each known token after the first, None
    where nobody asks how likely these are; where somebody does, all of them are computed, whatever is cached.
    constraint: what its further tokens, and its twins' next ones, may be.
    """

    id: SequenceId
    tokens: list[int]
    sampling: SamplingParams
    stop: StopRules
    arrived: float
    prompt_tokens: int = 0
    chain: PrefixChain = field(default_factory=PrefixChain, compare=False)
    computed: int = 0
    pending: int = 0
    cached: int = 0
    preemptions: int = 0
    twins: tuple[SamplingParams, ...] = ()
    scored: int | None = None
    constraint: Constraint | None = None
    table: BlockTable | None = None
    row: int | None = None
    credit: Credit | None = None
    state: State = field(default=State.WAITING)
    end_reason: EndReason | None = None
    adjustments: Adjustments | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.adjustments is not None:
            return
        params = self.sampling
        self.adjustments = adjustments_of(
            self.tokens,
            self.prompt_tokens,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            repetition=params.repetition_penalty,
            biases=params.logit_bias,
        )

    def advance(self, event: Event) -> None:
        """Take one legal transition. Raises IllegalTransition, and changes nothing, for any other."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalTransition(f"sequence {self.id}: {event.name} in state {self.state.name}")
        self.state = target

    def positions_max(self) -> int:
        """Positions whose KV can ever be needed: the last token's never is, unless it was given."""
        return max(len(self.tokens), self.stop.length_limit - 1)

    def steadfast(self) -> bool:
        """It was given up often enough."""
        return self.preemptions >= PREEMPTIONS_MAX

    def known(self) -> int:
        """Tokens that are there to be computed, pending ones among them."""
        return len(self.tokens) + self.pending

    def uncomputed(self) -> int:
        """Tokens that are there but whose KV is not computed."""
        return len(self.tokens) + self.pending - self.computed

    def ruled(self) -> bool:
        """Whether what may follow depends on more than the model and the sampling parameters."""
        return (
            self.adjustments is not None
            or self.constraint is not None
            or len(self.tokens) < self.stop.min_length
        )

    def settle(self) -> None:
        """Note what its last token, which was just sampled, means for it. Where it is not ruled and the token is none
        that may end it, this changes nothing before its length limit."""
        token = self.tokens[-1]
        if self.adjustments is not None:
            self.adjustments = self.adjustments.after(token)
        self.end_reason = self.stop.end_with(token, len(self.tokens))
        if self.constraint is not None and self.end_reason is None:
            self.constraint.advance(token)


class Progress(NamedTuple):
    """A run of so many tokens of a sequence. Once it is computed, the sequence's `computed` is past it."""

    sequence: Sequence
    tokens: int
