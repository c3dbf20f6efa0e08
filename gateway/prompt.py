"""Prompts as clients give them: which sizes are taken, and the token ids they stand for.

Validation and the Tokenize calls use it. What is too large is refused before it is tokenised; texts of a
refusal name fields and limits, never contents.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime

from crossdock.v1 import inference_pb2
from gateway import choices
from gateway.chat import ChatMessage
from gateway.tokenizer import Tokenizer
from service.errors import FieldViolation, InvalidRequest
from service.orders import SCORES_MAX, prompt_alternatives_max
from service.ranges import Measures, range_of

_CHARACTERS = range_of(inference_pb2.GenerationSpec, "text", "characters")
# A text with more characters for each token that may come of it is refused unread.
CHARACTERS_PER_TOKEN_MAX = int(_CHARACTERS.high)
# A prompt of which the last tokens are kept may be so many times as long as one that is taken whole.
TRUNCATED_TIMES_MAX = 8
ALL_THAT_FIT = -1


def refuse(broken: Iterable[FieldViolation]) -> None:
    """Raises InvalidRequest for everything at once."""
    violations = tuple(broken)
    if violations:
        raise InvalidRequest(*violations)


def given_max(spec: inference_pb2.GenerationSpec, tokens_max: int) -> int:
    """Tokens that a prompt may have as it is given. spec: or another message with such a truncate_prompt_tokens."""
    return tokens_max * (TRUNCATED_TIMES_MAX if spec.HasField("truncate_prompt_tokens") else 1)


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


def scores_violations(
    spec: inference_pb2.GenerationSpec, prompt_tokens: int, sharing: int
) -> Iterator[FieldViolation]:
    """What is said of a whole prompt is said in one message, which so many prompts share."""
    alternatives_max = prompt_alternatives_max(prompt_tokens * sharing)
    if not spec.output.HasField("prompt_logprobs") or spec.output.prompt_logprobs <= alternatives_max:
        return
    prompts = f"a prompt of {prompt_tokens} tokens" + (
        f", one of {sharing} in a message" if sharing > 1 else ""
    )
    rule = f"at most {alternatives_max} for {prompts}" if alternatives_max >= 0 else f"not for {prompts}"
    yield FieldViolation(field="output.prompt_logprobs", description=rule)


def whole_max(spec: inference_pb2.GenerationSpec, sharing: int) -> int:
    """Tokens that each answer may have where all of them, and those to so many prompts, come in one message."""
    return SCORES_MAX // (sharing * choices.number(spec.sampling) * (1 + spec.output.logprobs))


def chat_violations(
    chat: inference_pb2.ChatPrompt, tokenizer: Tokenizer, measures: Measures
) -> Iterator[FieldViolation]:
    """What no range says. Of more messages than could be taken, only as many are looked at."""
    if tokenizer.chat is None:
        yield FieldViolation(field="chat", description="the model has no chat template")
    looked_at = chat.messages[: measures.prompt_tokens]
    characters = sum(len(message.role) + len(message.content) for message in looked_at)
    yield from _CHARACTERS.violations("chat.messages", characters, measures)


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
