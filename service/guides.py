"""What an answer must be: the rule as a value, how large it may be, and its wire form.

Gateways make guides of what clients ask; workers check them again. Compiles nothing and knows no compiler.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from crossdock.v1 import inference_pb2
from crossdock.worker.v1 import worker_pb2 as pb
from service.ranges import range_of

_TEXT_BYTES = range_of(inference_pb2.Guide, "grammar", "bytes")
_CHOICES = range_of(inference_pb2.Guide.Choices, "strings", "count")
_CHOICE_BYTES = range_of(inference_pb2.Guide.Choices, "strings", "bytes")
TEXT_BYTES_MAX, CHOICES_MAX, CHOICE_BYTES_MAX = _TEXT_BYTES.most(), _CHOICES.most(), _CHOICE_BYTES.most()
SCHEMA_DEPTH_MAX = 64

_JSON_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
"""Never looks at a character twice: a string without an end is one too."""


class GuideKind(Enum):
    JSON_SCHEMA = pb.GUIDE_KIND_JSON_SCHEMA
    JSON_OBJECT = pb.GUIDE_KIND_JSON_OBJECT
    REGEX = pb.GUIDE_KIND_REGEX
    CHOICE = pb.GUIDE_KIND_CHOICE
    GRAMMAR = pb.GUIDE_KIND_GRAMMAR


class GuideRefused(Exception):
    """A guide that cannot be followed here: why, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """text: a schema, an expression or a grammar; of a choice, its strings as a JSON list; of an object, empty."""

    kind: GuideKind
    text: str

    def field(self) -> str:
        """Its name in crossdock.v1.Guide."""
        return self.kind.name.lower()

    def choices(self) -> tuple[str, ...]:
        """Of a choice. Raises GuideRefused for another text than `choice` makes."""
        try:
            strings = json.loads(self.text)
        except (ValueError, RecursionError):
            strings = None
        if not isinstance(strings, list) or not all(isinstance(each, str) for each in strings):
            raise GuideRefused("must be a list of strings")
        return tuple(strings)

    def violation(self) -> str | None:
        """The rule on sizes that it breaks. Looks at no more than that."""
        if self.kind is GuideKind.JSON_OBJECT:
            return "has no text" if self.text else None
        size = len(self.text.encode())
        if self.kind is GuideKind.CHOICE and size <= 2 * TEXT_BYTES_MAX:
            try:
                return _choices_violation(self.choices())
            except GuideRefused as refused:
                return str(refused)
        for broken in _TEXT_BYTES.violations("text", size):
            return broken.description
        if self.kind is GuideKind.JSON_SCHEMA and _depth(self.text) > SCHEMA_DEPTH_MAX:
            return f"at most {SCHEMA_DEPTH_MAX} levels deep"
        return None


def choice(strings: Sequence[str]) -> Guide:
    """One of these. Of more than there may be, only as many are looked at as it takes to refuse them."""
    return Guide(kind=GuideKind.CHOICE, text=json.dumps(list(strings[: CHOICES_MAX + 1]), ensure_ascii=False))


def to_wire(guide: Guide) -> pb.Guide:
    message = pb.Guide(text=guide.text)
    message.kind = guide.kind.value
    return message


def from_wire(message: pb.Guide) -> Guide:
    """Raises GuideRefused for a kind that nobody here knows."""
    try:
        return Guide(kind=GuideKind(message.kind), text=message.text)
    except ValueError:
        raise GuideRefused("of an unknown kind") from None


def _choices_violation(strings: tuple[str, ...]) -> str | None:
    for broken in _CHOICES.violations("choice", len(strings)):
        return broken.description
    sizes = [len(each.encode(errors="replace")) for each in strings]
    for size in (min(sizes), max(sizes)):
        for broken in _CHOICE_BYTES.violations("choice", size):
            return f"each of {broken.description}"
    return None if sum(sizes) <= TEXT_BYTES_MAX else f"together at most {TEXT_BYTES_MAX} bytes"


def _depth(text: str) -> int:
    """Of the brackets outside of strings, whether they are JSON or not."""
    depth = deepest = 0
    for match in _JSON_BRACKETS.finditer(text):
        bracket = match.group()
        if bracket in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif bracket in "]}":
            depth -= 1
    return deepest
