"""What a request may cost at most, known before anything is done for it: of one that was read, and of one that was not.
Pure arithmetic."""

from collections.abc import Iterable
from dataclasses import dataclass

from crossdock.v1 import inference_pb2
from gateway import choices
from gateway.request import ModelCard, Request
from service.orders import CHOICES_MAX
from service.ranges import range_of

TOKEN_BYTES = 40
"""Of a token in a prompt, as Python holds it."""
SCORE_BYTES = 68
"""Of the logprob of a token in a prompt, or of one of its alternatives."""
ANSWER_TOKEN_BYTES, ALTERNATIVE_BYTES = 256, 128
"""Of a token in an answer and its text, and of each of its alternatives, until the client has them."""
BIAS_BYTES = 128
BEAM_WIDTH_MAX = range_of(inference_pb2.SamplingParams, "beam_width", "value").most()
LOGPROBS_MAX = range_of(inference_pb2.OutputOptions, "logprobs", "value").most()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """requests: 1 for one. tokens: of the prompt and of all answers at their longest; prompt_tokens: of the prompt
    alone. branches: sequences that may run at once. bytes: that the gateway keeps."""

    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    branches: int = 0
    bytes: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            requests=self.requests + other.requests,
            tokens=self.tokens + other.tokens,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            branches=self.branches + other.branches,
            bytes=self.bytes + other.bytes,
        )

    def __sub__(self, other: "Cost") -> "Cost":
        return Cost(
            requests=self.requests - other.requests,
            tokens=self.tokens - other.tokens,
            prompt_tokens=self.prompt_tokens - other.prompt_tokens,
            branches=self.branches - other.branches,
            bytes=self.bytes - other.bytes,
        )


NOTHING = Cost()
ONE = Cost(requests=1)
"""Of a call of which nothing is known yet, but that it is there."""


def total(costs: Iterable[Cost]) -> Cost:
    return sum(costs, NOTHING)


def cost_of(request: Request) -> Cost:
    """Of one request with all its choices, beside the message that it came in."""
    prompt, branches = len(request.prompt_token_ids), request.best_of
    if request.beam is not None:
        branches = max(branches, request.beam.width)
    texts = sum(len(string) for string in request.stop.strings) + len(request.cache_salt)
    texts += 0 if request.guide is None else len(request.guide.text)
    return _cost(
        prompt=prompt,
        branches=branches,
        max_tokens=request.stop.max_tokens,
        alternatives=request.sampling.logprobs or 0,
        scores=0 if request.prompt_logprobs is None else prompt * (1 + request.prompt_logprobs),
        others_bytes=texts + BIAS_BYTES * len(request.sampling.logit_bias),
    )


def most_of(spec: inference_pb2.GenerationSpec, card: ModelCard) -> Cost:
    """Of one that is not read yet: what comes of it is no more. What breaks a limit counts as the limit, since it is
    refused."""
    prompt = min(card.tokens_max(), _prompt_tokens_max(spec))
    given = spec.output.prompt_logprobs
    return _cost(
        prompt=prompt,
        branches=_branches(spec),
        max_tokens=_answer_tokens(spec, card, unsaid=card.tokens_max()),
        alternatives=_within(0, spec.output.logprobs, LOGPROBS_MAX),
        scores=prompt * (1 + _within(0, given, LOGPROBS_MAX))
        if spec.output.HasField("prompt_logprobs")
        else 0,
        others_bytes=spec.ByteSize() + BIAS_BYTES * len(spec.sampling.logit_bias),
    )


def least_of(spec: inference_pb2.GenerationSpec, card: ModelCard) -> Cost:
    """Of one that is not read yet: what comes of it is no less."""
    max_tokens = _answer_tokens(spec, card, unsaid=1)
    return _cost(prompt=1, branches=_branches(spec), max_tokens=max_tokens, alternatives=0)


def answer_bytes(tokens: int, alternatives: int) -> int:
    """Of so many tokens of answers, each with so many alternatives."""
    return (ANSWER_TOKEN_BYTES + ALTERNATIVE_BYTES * alternatives) * tokens


def _cost(
    *, prompt: int, branches: int, max_tokens: int, alternatives: int, scores: int = 0, others_bytes: int = 0
) -> Cost:
    answers = branches * max_tokens
    return Cost(
        requests=1,
        tokens=prompt + answers,
        prompt_tokens=prompt,
        branches=branches,
        bytes=TOKEN_BYTES * prompt
        + SCORE_BYTES * scores
        + answer_bytes(answers, alternatives)
        + others_bytes,
    )


def _prompt_tokens_max(spec: inference_pb2.GenerationSpec) -> int:
    """A text has no more tokens than bytes."""
    if spec.WhichOneof("prompt") == "token_ids":
        return len(spec.token_ids.ids)
    return spec.ByteSize()


def _branches(spec: inference_pb2.GenerationSpec) -> int:
    wanted = _within(1, choices.best_of(spec.sampling), CHOICES_MAX)
    return max(wanted, _within(0, spec.sampling.beam_width, BEAM_WIDTH_MAX))


def _answer_tokens(spec: inference_pb2.GenerationSpec, card: ModelCard, *, unsaid: int) -> int:
    if not spec.sampling.HasField("max_tokens"):
        return unsaid
    return _within(1, spec.sampling.max_tokens, card.tokens_max())


def _within(low: int, value: int, high: int) -> int:
    return max(low, min(value, high))
