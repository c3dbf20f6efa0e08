"""A conversation as the text the model was trained on, by the chat template from the model's own files.

`Tokenizer.encode_chat` calls it. It takes no template from a request, lets a template see messages only, and
bounds what one may write, and how often it may turn and call. Semantics are those of Hugging Face transformers'
`apply_chat_template` (https://huggingface.co/docs/transformers/chat_templating_writing).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from service.errors import FieldViolation, InvalidRequest
from service.model_source import ModelFilesError

FIELD = "chat.messages"
TURNS_MAX, TURNS_PER_MESSAGE_MAX = 10_000, 50
"""Of loops, and calls: for any conversation, and besides for each of its messages."""

_turns: ContextVar[Iterator[int]] = ContextVar("turns")
"""That are left to the template that is rendered."""

# What a template can raise when a conversation is not of the shape it expects.
_REFUSALS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RecursionError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """role: for example "system", "user" or "assistant"."""

    role: str
    content: str


class ChatTemplate:
    """One compiled template. special_tokens: what it may name, for example "bos_token" -> "<s>"."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ModelFilesError for a template that does not compile."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelFilesError(f"the chat template does not compile: {error}") from None
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        now: datetime,
        characters_max: int,
    ) -> str:
        """Raises InvalidRequest when the template refuses the messages or does too much with them, or the text is over
        the limit."""
        _turns.set(iter(range(TURNS_MAX + TURNS_PER_MESSAGE_MAX * len(messages))))
        try:
            pieces = self._template.generate(
                **self._special_tokens,
                messages=[{"role": message.role, "content": message.content} for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                strftime_now=now.strftime,
            )
            return _joined(pieces, characters_max)
        except _TooLong:
            text = f"at most {characters_max} characters once the chat template is applied"
            raise _refusal(text, "CONTEXT_LENGTH_EXCEEDED") from None
        except _REFUSALS:
            raise _refusal("the model's chat template does not take this conversation") from None


class _TooLong(Exception):
    """The text is over the limit."""


def _joined(pieces: Iterable[str], characters_max: int) -> str:
    taken: list[str] = []
    left = characters_max
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise _TooLong
        taken.append(piece)
    return "".join(taken)


def _refusal(description: str, reason: str | None = None) -> InvalidRequest:
    return InvalidRequest(FieldViolation(field=FIELD, description=description), reason=reason)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters[_COUNTED] = _counted
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["namespace"] = _PlainNamespace
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter it escapes nothing for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _PlainNamespace(Namespace):
    """A namespace without names that could reach Python's internals."""

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise SecurityError("a namespace takes no name that starts with an underscore")
        super().__setitem__(name, value)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """In which nothing goes on for ever: every loop and every call, macros and recursive loops among them, counts."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        return tree

    def call(*args: Any, **kwargs: Any) -> Any:
        """As jinja2's: this environment, a context, what is called, its arguments."""
        _turn()
        return ImmutableSandboxedEnvironment.call(*args, **kwargs)


_COUNTED = "counted turns"
"""No template can name a filter like that."""
Item = TypeVar("Item")


def _counted(items: Iterable[Item]) -> Iterator[Item]:
    for item in items:
        _turn()
        yield item


def _turn() -> None:
    if next(_turns.get(), None) is None:
        raise SecurityError("a template goes on and on")


class _GenerationBlock(Extension):
    """{% generation %} marks the assistant's words for training; serving renders its body as it is."""

    tags = {"generation"}  # noqa: RUF012 - how jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
