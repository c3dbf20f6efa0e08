"""What a request may cost at most, known before anything is done for it. Pure arithmetic."""

from dataclasses import dataclass

from gateway.request import Request

TOKEN_BYTES = 36
"""Of a token in a prompt, as Python holds it."""
SCORE_BYTES = 68
"""Of the logprob of a token in a prompt, or of one of its alternatives."""


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


def cost_of(request: Request) -> Cost:
    """Of one request with all its choices."""
    prompt, branches = len(request.prompt_token_ids), request.best_of
    if request.beam is not None:
        branches = max(branches, request.beam.width)
    texts = sum(len(string) for string in request.stop.strings) + len(request.cache_salt)
    texts += 0 if request.guide is None else len(request.guide.text)
    tokens = prompt + branches * request.stop.max_tokens
    scores = 0 if request.prompt_logprobs is None else prompt * (1 + request.prompt_logprobs)
    return Cost(
        requests=1,
        tokens=tokens,
        prompt_tokens=prompt,
        branches=branches,
        bytes=TOKEN_BYTES * tokens + SCORE_BYTES * scores + texts,
    )
