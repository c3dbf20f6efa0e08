"""Answers of ours as messages of crossdock.v1.

The servicer calls it. It translates values, keeps no state, and reads no requests.
"""

from collections.abc import Sequence

from crossdock.v1 import inference_pb2
from gateway.generation import Delta, EndOfSequence, Finish, StopString, StopToken
from gateway.request import EndReason, ModelCard, Request, Token
from service.errors import FieldViolation, InvalidRequest
from service.scores import Scores

WHOLE_TEXT_BYTES_MAX = 8 << 20
"""Of all answers in one message. What else is in it is bounded before anything is computed."""

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


class Whole:
    """A complete answer in the making: what is in its message is kept nowhere else."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._total = Total(request)
        self._texts: list[list[str]] = [[] for _ in range(request.n)]
        self._text_bytes = 0
        self._seeds = [0] * request.n
        self._scores: Scores | None = None
        outputs = [inference_pb2.SequenceOutput(index=choice) for choice in range(request.n)]
        self._message = inference_pb2.GenerateResponse(request_id=request.id, outputs=outputs)

    def add(self, delta: Delta) -> None:
        """Raises InvalidRequest when it has become larger than a message may be."""
        self._text_bytes += len(delta.text.encode())
        if self._text_bytes > WHOLE_TEXT_BYTES_MAX:
            rule = f"the answers have more than {WHOLE_TEXT_BYTES_MAX} bytes of text; they can be streamed"
            violation = FieldViolation(field="sampling.max_tokens", description=rule)
            raise InvalidRequest(violation, reason="ANSWER_TOO_LARGE")
        self._total.add(delta)
        self._seeds[delta.choice] = delta.seed
        self._scores = self._scores or delta.scores
        self._texts[delta.choice].append(delta.text)
        more = inference_pb2.SequenceOutput(
            token_ids=[token.token_id for token in delta.tokens],
            logprobs=_logprobs(self._request, delta.tokens),
            finish=None if delta.finish is None else _finish(delta.finish),
        )
        self._message.outputs[delta.choice].MergeFrom(more)

    def message(self) -> inference_pb2.GenerateResponse:
        """After the last delta of each choice, which has its finish."""
        usage, message = self._total.usage(), self._message
        assert usage is not None, "every choice has ended"
        for output, texts in zip(message.outputs, self._texts, strict=True):
            output.text = "".join(texts)
        message.usage.CopyFrom(usage)
        info = _prompt_info(self._request, usage.cached_tokens, self._seeds, self._scores)
        message.prompt_info.CopyFrom(info)
        return message


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
