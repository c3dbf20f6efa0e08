"""The answers to a request as a stream of deltas: token batches in, certain text and the reason of the end out.

The frontend calls `generate`; the source below it routes, journals and retries. It decides only what text
decides, stop strings, and which answers are the best. It knows no wire, no worker and no retry.
"""

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from gateway.request import EndReason, Request, Token, TokenBatch
from gateway.text import TextFold
from gateway.tokenizer import Tokenizer
from service.errors import InternalFault
from service.scores import Scores

PIECE_MAX = 16_384
"""Tokens of a delta and their alternatives, in all: an eighth of a MiB at eight bytes each, and the text."""


class TokenSource(Protocol):
    """Who gets tokens for a request. run raises ServiceError; closing its generator cancels the work on both
    workers. unread: choices that the caller wants no more of, which it adds to between two batches."""

    def run(self, request: Request, unread: Collection[int]) -> AsyncGenerator[TokenBatch, None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfSequence:
    token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopToken:
    token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopString:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """matched: what ended the answer, None for LENGTH."""

    reason: EndReason
    matched: EndOfSequence | StopToken | StopString | None


class Delta(NamedTuple):
    """Of one choice. text: became certain with these tokens. first_position: of tokens[0] in the answer, from 0;
    consecutive over an answer. cached_tokens: prompt tokens found in a cache, known from the first delta on. finish: in
    the choice's last delta only. seed: what the choice is a function of. unseen_tokens: of answers that were generated
    and are not shown. scores: of the prompt without its first token, with the first delta of each choice, when asked
    for."""

    text: str
    tokens: tuple[Token, ...]
    first_position: int
    cached_tokens: int
    finish: Finish | None
    choice: int = 0
    seed: int = 0
    unseen_tokens: int = 0
    scores: Scores | None = None


async def generate(
    request: Request, source: TokenSource, tokenizer: Tokenizer
) -> AsyncGenerator[Delta, None]:
    """Deltas up to the last choice's finish; where the best of more are wanted, one for each of them, the best first.
    Raises what the source raises. The source is closed before the last delta is handed out, and whenever this generator
    is closed."""
    if request.best_of == request.n:
        async with aclosing(_all(request, source, tokenizer)) as deltas:
            async for delta in deltas:
                yield delta
        return
    answers = [_Whole() for _ in range(request.best_of)]
    async with aclosing(_all(request, source, tokenizer)) as deltas:
        async for delta in deltas:
            answers[delta.choice].add(delta)
    for delta in _best(request, answers):
        yield delta


async def _all(request: Request, source: TokenSource, tokenizer: Tokenizer) -> AsyncGenerator[Delta, None]:
    """Deltas of every choice as they come."""
    tellings = [_Telling(request, tokenizer, choice) for choice in range(request.best_of)]
    ended: set[int] = set()
    async with aclosing(_pieces(request, source.run(request, ended))) as batches:
        async for batch in batches:
            if batch.choice in ended:
                continue
            delta = tellings[batch.choice].tell(batch)._replace(scores=batch.scores)
            if delta.finish is not None:
                ended.add(batch.choice)
                if len(ended) == len(tellings):
                    break
            yield delta
        else:
            raise InternalFault("the answer stopped without an end")
    yield delta


async def _pieces(
    request: Request, batches: AsyncGenerator[TokenBatch, None]
) -> AsyncGenerator[TokenBatch, None]:
    """The same, none longer than a message should be: where a client reads late, much comes together."""
    size = PIECE_MAX // (1 + (request.sampling.logprobs or 0))
    async with aclosing(batches):
        async for batch in batches:
            *firsts, last = range(0, max(1, len(batch.tokens)), size)
            for start in firsts:
                tokens = batch.tokens[start : start + size]
                yield batch._replace(tokens=tokens, end=None, scores=None if start else batch.scores)
            yield batch._replace(tokens=batch.tokens[last:], scores=None) if last else batch


def _best(request: Request, answers: Sequence["_Whole"]) -> list[Delta]:
    """The answers with the highest sum of logprobs, whole, numbered from the best; the earlier one of two equals."""
    whole = [answer.delta() for answer in answers]
    ranked = sorted(whole, key=lambda answer: -sum(token.logprob or 0.0 for token in answer.tokens))
    best, others = ranked[: request.n], ranked[request.n :]
    shown = [answer._replace(choice=number) for number, answer in enumerate(best)]
    return [*shown[:-1], shown[-1]._replace(unseen_tokens=sum(len(each.tokens) for each in others))]


class _Whole:
    """All of one choice as one delta."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._tokens: list[Token] = []
        self._scores: Scores | None = None
        self._last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._tokens += delta.tokens
        self._scores = self._scores or delta.scores
        self._last = delta

    def delta(self) -> Delta:
        assert self._last is not None, "every choice has ended"
        return self._last._replace(
            text="".join(self._texts), tokens=tuple(self._tokens), first_position=0, scores=self._scores
        )


class _Telling:
    """Where one choice stands."""

    def __init__(self, request: Request, tokenizer: Tokenizer, choice: int) -> None:
        self._choice = choice
        self._seed = request.seed_of(choice)
        self._prompt_only = request.prompt_only
        self._stop = request.stop
        self._eos_token_ids = tokenizer.eos_token_ids
        self._position = 0
        self._cached_tokens = 0
        self._fold = TextFold(
            tokenizer,
            request.prompt_token_ids,
            stop_strings=request.stop.strings,
            include_stop_string=request.stop.include_string,
            include_special=request.include_special_tokens,
            min_tokens=request.stop.min_tokens,
        )

    def tell(self, batch: TokenBatch) -> Delta:
        first = self._position
        for offset, token in enumerate(batch.tokens):
            assert token.position == first + offset, "positions are consecutive"
        self._cached_tokens = max(self._cached_tokens, batch.cached_tokens)
        if self._prompt_only:
            return self._delta("", (), Finish(reason=EndReason.LENGTH, matched=None))
        shown = self._shown(batch)
        pushed = self._fold.push([token.token_id for token in shown])
        if pushed.stop_string is not None:
            matched = StopString(text=pushed.stop_string)
            tokens = shown[: pushed.tokens_used]
            return self._delta(pushed.text, tokens, Finish(reason=EndReason.STOP, matched=matched))
        if batch.end is None:
            return self._delta(pushed.text, batch.tokens, None)
        return self._delta(pushed.text + self._fold.finish(), batch.tokens, self._finish(batch))

    def _shown(self, batch: TokenBatch) -> tuple[Token, ...]:
        """The token that ends an answer is a sign, not a word, unless the client wants to see it."""
        if batch.end is EndReason.STOP and not self._stop.include_string:
            return batch.tokens[:-1]
        return batch.tokens

    def _finish(self, batch: TokenBatch) -> Finish:
        if batch.end is not EndReason.STOP:
            return Finish(reason=EndReason.LENGTH, matched=None)
        assert batch.tokens, "a stop has its token in the batch"
        token_id = batch.tokens[-1].token_id
        if token_id in self._eos_token_ids:
            return Finish(reason=EndReason.STOP, matched=EndOfSequence(token_id=token_id))
        return Finish(reason=EndReason.STOP, matched=StopToken(token_id=token_id))

    def _delta(self, text: str, tokens: tuple[Token, ...], finish: Finish | None) -> Delta:
        first = self._position
        self._position += len(tokens)
        return Delta(
            text=text,
            tokens=tokens,
            first_position=first,
            cached_tokens=self._cached_tokens,
            finish=finish,
            choice=self._choice,
            seed=self._seed,
        )
