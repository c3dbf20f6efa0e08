"""Answers of ours as messages of crossdock.v1.

The servicer calls it. It translates values, keeps no state, and reads no requests.
"""

from collections.abc import Sequence

from crossdock.v1 import inference_pb2
from gateway.generation import Delta, EndOfSequence, Finish, StopString, StopToken
from gateway.request import EndReason, ModelCard, Request, Token
from service.scores import Scores

_REASONS = {
    EndReason.STOP: inference_pb2.FINISH_REASON_STOP,
    EndReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


def part(
    request: Request, delta: Delta, *, first: bool, usage: inference_pb2.Usage | None
) -> inference_pb2.GenerateStreamResponse:
    """One message of a stream: prompt_info in the first, usage in the last."""
    return inference_pb2.GenerateStreamResponse(
        deltas=[
            inference_pb2.SequenceDelta(
                index=delta.choice,
                text=delta.text,
                token_ids=[token.token_id for token in delta.tokens],
                logprobs=_logprobs(request, delta.tokens),
                finish=None if delta.finish is None else _finish(delta.finish),
                first_position=delta.first_position,
            )
        ],
        prompt_info=_first_info(request, delta) if first else None,
        usage=usage,
    )


def whole(request: Request, deltas: Sequence[Delta]) -> inference_pb2.GenerateResponse:
    """A complete answer. deltas: of all choices; the last one of each has its finish."""
    by_choice = [[delta for delta in deltas if delta.choice == choice] for choice in range(request.n)]
    total = Total(request)
    for delta in deltas:
        total.add(delta)
    usage = total.usage()
    assert usage is not None, "every choice has ended"
    return inference_pb2.GenerateResponse(
        request_id=request.id,
        prompt_info=_prompt_info(
            request, usage.cached_tokens, [each[-1].seed for each in by_choice], by_choice[0][0].scores
        ),
        outputs=[_output(request, each) for each in by_choice],
        usage=usage,
    )


class Total:
    """What a request's choices have cost together, so far; the prompt counts once."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._generated = 0
        self._cached = 0
        self._ended = 0

    def add(self, delta: Delta) -> None:
        self._generated += len(delta.tokens) + delta.unseen_tokens
        self._cached = max(self._cached, delta.cached_tokens)
        self._ended += delta.finish is not None

    def usage(self) -> inference_pb2.Usage | None:
        """None before every choice has ended."""
        if self._ended < self._request.n:
            return None
        return inference_pb2.Usage(
            prompt_tokens=len(self._request.prompt_token_ids),
            completion_tokens=self._generated,
            cached_tokens=self._cached,
        )


def model(card: ModelCard) -> inference_pb2.Model:
    return inference_pb2.Model(
        name=card.name,
        max_model_len=card.tokens_max(),
        vocab_size=card.vocab_size,
        eos_token_ids=card.eos_token_ids,
        digest=card.digest,
    )


def _output(request: Request, deltas: Sequence[Delta]) -> inference_pb2.SequenceOutput:
    """The whole of one choice."""
    last = deltas[-1]
    assert last.finish is not None, "an answer ends with its finish"
    tokens = [token for delta in deltas for token in delta.tokens]
    return inference_pb2.SequenceOutput(
        index=last.choice,
        text="".join(delta.text for delta in deltas),
        token_ids=[token.token_id for token in tokens],
        logprobs=_logprobs(request, tokens),
        finish=_finish(last.finish),
    )


def _first_info(request: Request, delta: Delta) -> inference_pb2.PromptInfo:
    """With the first delta of a stream; every choice has its number and its seed by then."""
    return _prompt_info(
        request, delta.cached_tokens, [request.seed_of(choice) for choice in range(request.n)], delta.scores
    )


def _prompt_info(
    request: Request, cached_tokens: int, seeds: Sequence[int], scores: Scores | None
) -> inference_pb2.PromptInfo:
    return inference_pb2.PromptInfo(
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=cached_tokens,
        seed=request.sampling.seed,
        choice_seeds=seeds,
        prompt_logprobs=None if scores is None else _prompt_logprobs(scores),
        token_ids=None if scores is None else request.prompt_token_ids,
    )


def _prompt_logprobs(scores: Scores) -> inference_pb2.Logprobs:
    return inference_pb2.Logprobs(
        token_logprobs=scores.logprobs,
        top_count=scores.width,
        top_token_ids=scores.top_ids,
        top_logprobs=scores.top_logprobs,
    )


def _logprobs(request: Request, tokens: Sequence[Token]) -> inference_pb2.Logprobs | None:
    """Parallel arrays; every token brings as many alternatives as were asked for."""
    count = request.sampling.logprobs
    if count is None:
        return None
    assert all(token.logprob is not None and len(token.top) == count for token in tokens)
    return inference_pb2.Logprobs(
        token_logprobs=[token.logprob for token in tokens if token.logprob is not None],
        top_count=count,
        top_token_ids=[token_id for token in tokens for token_id, _ in token.top],
        top_logprobs=[logprob for token in tokens for _, logprob in token.top],
    )


def _finish(finish: Finish) -> inference_pb2.Finish:
    reason = _REASONS[finish.reason]
    match finish.matched:
        case EndOfSequence(token_id=token_id):
            return inference_pb2.Finish(reason=reason, eos_token_id=token_id)
        case StopToken(token_id=token_id):
            return inference_pb2.Finish(reason=reason, stop_token_id=token_id)
        case StopString(text=text):
            return inference_pb2.Finish(reason=reason, stop_string=text)
        case None:
            return inference_pb2.Finish(reason=reason)
