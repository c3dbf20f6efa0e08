"""What a choice looks like in each of OpenAI's two answers: completions and chat.

`openai_answers` calls it for every delta. Pure translation; it keeps no state and knows no requests.
"""

from collections.abc import Sequence
from typing import Protocol

from gateway.generation import Finish, StopString, StopToken
from gateway.request import EndReason, Token
from gateway.tokenizer import Tokenizer

# JSON has no infinity; clients know this number as "practically impossible".
_LOGPROB_MIN = -9999.0
_REASONS = {EndReason.STOP: "stop", EndReason.LENGTH: "length"}

JsonDict = dict[str, object]


class Dialect(Protocol):
    """id_prefix, whole_object, chunk_object: OpenAI's words around an answer. prompt_in_choice: where vLLM
    puts what it says of the prompt, in the choice or beside it."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    prompt_in_choice: bool

    def opening(self) -> JsonDict | None:
        """What a choice says before its first token, if anything."""

    def part(self, text: str) -> JsonDict:
        """New text of a choice in a stream."""

    def whole(self, text: str) -> JsonDict:
        """A choice's complete text."""

    def logprobs(self, tokens: Sequence[Token], tokenizer: Tokenizer, offsets: Sequence[int]) -> JsonDict:
        """offsets: where each token begins in the choice's text. A token without a logprob is the first one of a
        prompt."""


class CompletionDialect:
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    prompt_in_choice = True

    def opening(self) -> JsonDict | None:
        return None

    def part(self, text: str) -> JsonDict:
        return {"text": text}

    def whole(self, text: str) -> JsonDict:
        return {"text": text}

    def logprobs(self, tokens: Sequence[Token], tokenizer: Tokenizer, offsets: Sequence[int]) -> JsonDict:
        return {
            "tokens": [token_text(token.token_id, tokenizer) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "text_offset": list(offsets),
            "top_logprobs": [_by_text(token, tokenizer) for token in tokens],
        }


class ChatDialect:
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_in_choice = False

    def opening(self) -> JsonDict | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def part(self, text: str) -> JsonDict:
        return {"delta": {"content": text}}

    def whole(self, text: str) -> JsonDict:
        return {"message": {"role": "assistant", "content": text}}

    def logprobs(self, tokens: Sequence[Token], tokenizer: Tokenizer, offsets: Sequence[int]) -> JsonDict:
        return {
            "content": [
                {
                    **_chat_logprob(token.token_id, token.logprob, tokenizer),
                    "top_logprobs": [_chat_logprob(*alternative, tokenizer) for alternative in token.top],
                }
                for token in tokens
            ]
        }


def finish_fields(finish: Finish | None) -> JsonDict:
    """stop_reason as vLLM has it: the stop string or token id, null for the model's own end."""
    if finish is None:
        return {"finish_reason": None}
    matched = finish.matched
    if isinstance(matched, StopString):
        return {"finish_reason": _REASONS[finish.reason], "stop_reason": matched.text}
    stop_reason = matched.token_id if isinstance(matched, StopToken) else None
    return {"finish_reason": _REASONS[finish.reason], "stop_reason": stop_reason}


def token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """A token alone; one that is part of a character is written as its bytes, as OpenAI does."""
    piece = tokenizer.piece(token_id, include_special=True)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return _as_bytes(piece)


def _as_bytes(piece: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _by_text(token: Token, tokenizer: Tokenizer) -> JsonDict | None:
    """What could stand in a token's place. The text of the token itself is its own; another token of a text that is
    taken is written as its bytes, so that no likelier one is hidden."""
    if token.logprob is None:
        return None
    own, told = token_text(token.token_id, tokenizer), JsonDict()
    for token_id, logprob in _ranked(token):
        text = token_text(token_id, tokenizer)
        if token_id != token.token_id and (text == own or text in told):
            text = _as_bytes(tokenizer.piece(token_id, include_special=True))
        told.setdefault(text, finite(logprob))
    return told


def _ranked(token: Token) -> list[tuple[int, float]]:
    """The alternatives and, where it is none of them, the token itself."""
    ranked = list(token.top)
    if token.logprob is not None and token.token_id not in dict(ranked):
        ranked.append((token.token_id, token.logprob))
    return ranked


def _chat_logprob(token_id: int, logprob: float | None, tokenizer: Tokenizer) -> JsonDict:
    piece = tokenizer.piece(token_id, include_special=True)
    return {"token": token_text(token_id, tokenizer), "logprob": finite(logprob), "bytes": list(piece)}


def finite(logprob: float | None) -> float | None:
    """As JSON can say it."""
    return None if logprob is None else max(logprob, _LOGPROB_MIN)
