"""One call's answer in the making, whole or as chunks, in either dialect.

The HTTP routes feed it deltas and send what it returns. It sends nothing, waits for nothing, and validates
nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from crossdock.v1.inference_pb2 import GenerationSpec
from gateway.generation import Delta, Finish
from gateway.json_fields import JsonObject
from gateway.openai_dialects import Dialect, JsonDict, finish_fields
from gateway.openai_offsets import Offsets, answer_offsets, shown_pieces
from gateway.openai_prompt import echoed_offsets, echoed_text, echoed_tokens, prompt_logprobs
from gateway.openai_schema import Call
from gateway.request import Request, Token
from gateway.tokenizer import Tokenizer
from service.scores import Scores


@dataclass(slots=True, kw_only=True)
class _Choice:
    """How far one choice is. offsets: of the answer's tokens, from the first one on. generated: tokens, with those that
    are not shown. scores: of its prompt, when asked for."""

    spec: GenerationSpec
    request: Request
    begun: bool = False
    generated: int = 0
    cached: int = 0
    offsets: Offsets = field(default_factory=Offsets)
    texts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish: Finish | None = None
    scores: Scores | None = None


class Answer:
    """requests: one per prompt, at least one. id: without the dialect's prefix. created: seconds since 1970."""

    def __init__(
        self,
        call: Call,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        dialect: Dialect,
        *,
        id: str,
        created: int,
    ) -> None:
        self.names = call.names[0]
        self._call = call
        self._requests = requests
        self._choices = [
            _Choice(spec=spec, request=request)
            for spec, request in zip(call.specs, requests, strict=True)
            for _ in range(request.n)
        ]
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._head: JsonDict = {
            "id": dialect.id_prefix + id,
            "object": dialect.chunk_object if call.stream else dialect.whole_object,
            "created": created,
            "model": requests[0].model,
        }

    def chunks(self, number: int, delta: Delta) -> Iterator[JsonObject]:
        """What a stream says of one delta of one of a request's choices. number: of the request."""
        index = self._index(number, delta)
        choice = self._choices[index]
        self._begin(choice, delta)
        opening = None if choice.begun else self._dialect.opening()
        extra = {} if choice.begun else self._about_prompt(choice)
        text, echoed = ("", ()) if choice.begun else self._echo(choice)
        if opening is not None:
            yield self._chunk({"index": index, **opening, "logprobs": None, **finish_fields(None)}, extra)
            extra = {}
        said: JsonDict = {
            "index": index,
            **self._dialect.part(text + delta.text),
            "logprobs": self._logprobs(choice, echoed, delta.tokens),
            **finish_fields(delta.finish),
            **self._token_ids(delta.tokens),
        }
        self._count(choice, delta)
        yield self._chunk(said, extra)

    def closing(self) -> Iterator[JsonObject]:
        """What a stream says after every choice has ended."""
        if self._call.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    def keep(self, number: int, delta: Delta) -> None:
        """Takes a delta of a request's choice for `whole`."""
        choice = self._choices[self._index(number, delta)]
        self._begin(choice, delta)
        choice.texts.append(delta.text)
        choice.tokens.extend(delta.tokens)
        choice.finish = delta.finish
        self._count(choice, delta)

    def whole(self) -> JsonObject:
        """The complete answer, from what was kept."""
        choices: list[JsonDict] = []
        extra: JsonDict = {}
        for index, choice in enumerate(self._choices):
            assert choice.finish is not None, "a complete answer has ended"
            text, echoed = self._echo(choice)
            said = {
                "index": index,
                **self._dialect.whole(text + "".join(choice.texts)),
                "logprobs": self._logprobs(choice, echoed, choice.tokens),
                **finish_fields(choice.finish),
                **self._token_ids(choice.tokens),
            }
            about_prompt = self._about_prompt(choice)
            choices.append(said | about_prompt if self._dialect.prompt_in_choice else said)
            extra |= {} if self._dialect.prompt_in_choice else about_prompt
        return {**self._head, "choices": choices, "usage": self._usage(), **extra}

    def _chunk(self, said: JsonDict, extra: JsonDict) -> JsonObject:
        if self._dialect.prompt_in_choice:
            said, extra = said | extra, {}
        chunk: JsonDict = {**self._head, "choices": [said], **extra}
        if self._call.continuous_usage:
            chunk["usage"] = self._usage()
        elif self._call.include_usage:
            chunk["usage"] = None
        return chunk

    def _index(self, number: int, delta: Delta) -> int:
        return number * self._requests[0].n + delta.choice

    def _begin(self, choice: _Choice, delta: Delta) -> None:
        choice.cached = delta.cached_tokens
        if delta.scores is not None:
            choice.scores = delta.scores

    def _count(self, choice: _Choice, delta: Delta) -> None:
        choice.begun = True
        choice.generated += len(delta.tokens) + delta.unseen_tokens

    def _logprobs(self, choice: _Choice, echoed: Sequence[Token], tokens: Sequence[Token]) -> JsonDict | None:
        request = choice.request
        if request.sampling.logprobs is None:
            return None
        offsets = echoed_offsets(choice.spec, request, self._tokenizer) if echoed else []
        shown = shown_pieces([token.token_id for token in tokens], request, self._tokenizer)
        offsets += choice.offsets.of(shown)
        return self._dialect.logprobs((*echoed, *tokens), self._tokenizer, offsets)

    def _token_ids(self, tokens: Sequence[Token]) -> JsonDict:
        return {"token_ids": [token.token_id for token in tokens]} if self._call.return_token_ids else {}

    def _echo(self, choice: _Choice) -> tuple[str, tuple[Token, ...]]:
        """What of the prompt comes before the answer, whose offsets begin behind it."""
        text = ""
        tokens: tuple[Token, ...] = ()
        if self._call.echo:
            text = echoed_text(choice.spec, choice.request, self._tokenizer)
            tokens = echoed_tokens(choice.request, choice.scores)
        choice.offsets = answer_offsets(choice.request, self._tokenizer, len(text))
        return text, tokens

    def _about_prompt(self, choice: _Choice) -> JsonDict:
        told: JsonDict = {}
        if self._call.return_token_ids:
            told["prompt_token_ids"] = choice.request.prompt_token_ids
        if self._call.prompt_logprobs is not None and choice.scores is not None:
            told["prompt_logprobs"] = prompt_logprobs(
                choice.request, choice.scores, self._call.prompt_logprobs, self._tokenizer
            )
        return told

    def _usage(self) -> JsonDict:
        """Of all choices, up to here."""
        prompt_tokens = sum(len(request.prompt_token_ids) for request in self._requests)
        generated = sum(choice.generated for choice in self._choices)
        wide = self._requests[0].n
        groups = [self._choices[first : first + wide] for first in range(0, len(self._choices), wide)]
        cached = sum(max(choice.cached for choice in group) for group in groups)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
