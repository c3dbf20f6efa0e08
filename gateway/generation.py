"""One answer as a stream of deltas: token batches in, certain text and the reason of the end out.

The frontend calls `generate`; the source below it routes, journals and retries. It decides only what text
decides: stop strings. It knows no wire, no worker and no retry.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from gateway.request import EndReason, Request, Token, TokenBatch
from gateway.text import TextFold
from gateway.tokenizer import Tokenizer
from service.errors import InternalFault


class TokenSource(Protocol):
    """Who gets tokens for a request. run raises ServiceError; closing its generator cancels the work on both
    workers."""

    def run(self, request: Request) -> AsyncGenerator[TokenBatch, None]: ...


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """text: became certain with these tokens. first_position: of tokens[0] in the answer, from 0; consecutive
    over an answer. cached_tokens: prompt tokens found in a cache, known from the first delta on. finish: in
    the last delta only."""

    text: str
    tokens: tuple[Token, ...]
    first_position: int
    cached_tokens: int
    finish: Finish | None


async def generate(
    request: Request, source: TokenSource, tokenizer: Tokenizer
) -> AsyncGenerator[Delta, None]:
    """Deltas up to the one with the finish. Raises what the source raises. The source is closed before the
    last delta is handed out, and whenever this generator is closed."""
    telling = _Telling(request, tokenizer)
    async with aclosing(source.run(request)) as batches:
        async for batch in batches:
            delta = telling.tell(batch)
            if delta.finish is not None:
                break
            yield delta
        else:
            raise InternalFault("the answer stopped without an end")
    yield delta


class _Telling:
    """Where one answer stands."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
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
            text=text, tokens=tokens, first_position=first, cached_tokens=self._cached_tokens, finish=finish
        )
