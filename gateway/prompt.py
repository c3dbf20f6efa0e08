"""Prompts as clients give them: which sizes are taken, and the token ids they stand for.

Validation and the Tokenize calls use it. What is too large is refused before it is tokenised; texts of a
refusal name fields and limits, never contents.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime

from crossdock.v1 import inference_pb2
from gateway.chat import ChatMessage
from gateway.tokenizer import Tokenizer
from service.errors import FieldViolation, InvalidRequest

CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
ROLE_BYTES_MAX = 64
# A text with more characters for each token that may come of it is refused unread.
CHARACTERS_PER_TOKEN_MAX = 16
# A prompt of which the last tokens are kept may be so many times as long as one that is taken whole.
TRUNCATED_TIMES_MAX = 8
ALL_THAT_FIT = -1
# Logprobs of a prompt's tokens and of their alternatives, in all: 3 MiB at seven bytes each.
SCORES_MAX = 400_000


def refuse(broken: Sequence[FieldViolation], too_long: Sequence[FieldViolation] = ()) -> None:
    """Raises InvalidRequest for everything at once; its reason says so when length alone is wrong."""
    if broken:
        raise InvalidRequest(*broken, *too_long)
    if too_long:
        raise InvalidRequest(*too_long, reason=CONTEXT_LENGTH_EXCEEDED)


def given_max(spec: inference_pb2.GenerationSpec, tokens_max: int) -> int:
    """Tokens that a prompt may have as it is given. spec: or another message with such a truncate_prompt_tokens."""
    return tokens_max * (TRUNCATED_TIMES_MAX if spec.HasField("truncate_prompt_tokens") else 1)


def truncation_violations(spec: inference_pb2.GenerationSpec, tokens_max: int) -> Iterator[FieldViolation]:
    kept = spec.truncate_prompt_tokens
    if spec.HasField("truncate_prompt_tokens") and kept != ALL_THAT_FIT and not 1 <= kept < tokens_max:
        rule = f"must be in [1, {tokens_max - 1}], or {ALL_THAT_FIT}"
        yield FieldViolation(field="truncate_prompt_tokens", description=rule)


def truncated(
    token_ids: tuple[int, ...], spec: inference_pb2.GenerationSpec, tokens_max: int
) -> tuple[int, ...]:
    """What is taken of a prompt: its last tokens, where only so many are wanted."""
    if not spec.HasField("truncate_prompt_tokens"):
        return token_ids
    kept = spec.truncate_prompt_tokens
    if kept == ALL_THAT_FIT:
        kept = max(1, tokens_max - max(1, spec.sampling.max_tokens))
    return token_ids[-kept:]


def scores_violations(spec: inference_pb2.GenerationSpec, prompt_tokens: int) -> Iterator[FieldViolation]:
    """What is said of a whole prompt is said in one message."""
    alternatives_max = SCORES_MAX // max(1, prompt_tokens) - 1
    if spec.output.HasField("prompt_logprobs") and spec.output.prompt_logprobs > alternatives_max:
        rule = f"at most {max(0, alternatives_max)} for a prompt of {prompt_tokens} tokens"
        yield FieldViolation(field="output.prompt_logprobs", description=rule)


def text_too_long(text: str, tokens_max: int) -> Iterator[FieldViolation]:
    yield from _too_many_characters("text", len(text), tokens_max)


def chat_too_long(chat: inference_pb2.ChatPrompt, tokens_max: int) -> Iterator[FieldViolation]:
    if len(chat.messages) > tokens_max:
        yield FieldViolation(field="chat.messages", description=f"at most {tokens_max} messages")
        return
    characters = sum(len(message.role) + len(message.content) for message in chat.messages)
    yield from _too_many_characters("chat.messages", characters, tokens_max)


def ids_too_long(field: str, count: int, tokens_max: int) -> Iterator[FieldViolation]:
    if count > tokens_max:
        yield FieldViolation(field=field, description=f"at most {tokens_max} tokens; {count} were given")


def chat_violations(
    chat: inference_pb2.ChatPrompt, tokenizer: Tokenizer, tokens_max: int
) -> Iterator[FieldViolation]:
    """Of more messages than could be taken, only as many are looked at."""
    if tokenizer.chat is None:
        yield FieldViolation(field="chat", description="the model has no chat template")
    if not chat.messages:
        yield FieldViolation(field="chat.messages", description="at least one message")
    for index, message in enumerate(chat.messages[:tokens_max]):
        if not 1 <= len(message.role.encode()) <= ROLE_BYTES_MAX:
            field = f"chat.messages[{index}].role"
            yield FieldViolation(field=field, description=f"1 to {ROLE_BYTES_MAX} bytes")


def ids_violations(field: str, token_ids: Sequence[int], vocab_size: int) -> Iterator[FieldViolation]:
    """token_ids: not more than could be taken, since each is looked at."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        yield FieldViolation(field=field, description=f"each must be in [0, {vocab_size})")


def encode_chat(
    chat: inference_pb2.ChatPrompt, tokenizer: Tokenizer, *, tokens_max: int, today: datetime
) -> tuple[int, ...]:
    """Raises InvalidRequest when the template refuses the messages, or makes too much of them."""
    ids = tokenizer.encode_chat(
        [ChatMessage(role=message.role, content=message.content) for message in chat.messages],
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
        now=today,
        characters_max=tokens_max * CHARACTERS_PER_TOKEN_MAX,
    )
    return tuple(ids)


def _too_many_characters(field: str, characters: int, tokens_max: int) -> Iterator[FieldViolation]:
    characters_max = tokens_max * CHARACTERS_PER_TOKEN_MAX
    if characters > characters_max:
        limit = f"at most {characters_max} characters for at most {tokens_max} tokens"
        yield FieldViolation(field=field, description=limit)
