"""Guides as the texts that llguidance takes, and what of them it would take amiss.

`guide_compiler` calls it. Knows how llguidance reads strings, JSON schemas and GBNF, and compiles nothing. Says where a
mistake is, and never repeats what a client wrote.
"""

import json
import re
from typing import TypeAlias

from service.guides import Guide, GuideKind, GuideRefused

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Of JSON schemas. All others are annotations: they ask for nothing."""

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

_WHITESPACE = r"\x20|\x0A[\x20\x09]{0,32}"
"""Between the parts of JSON: a space, or a new line and its indentation. Small models never end what is free here."""
_NO_SCHEMAS = frozenset({"const", "enum", "default", "examples"})
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})

_GBNF = re.compile(r"(?:\s|#[^\r\n]*[\r\n])*[\w-]+[ \t]*::=")
_GBNF_PARTS = re.compile(
    r"""(?P<quoted>"(?:[^"\\]|\\.)*+"?|\[(?:[^\]\\]|\\.)*+\]?)|(?P<skipped>\#[^\r\n]*|\{[^}]*\}?)|(?P<name>[\w-]+)""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)|([\x00-\x1f\x7f])", re.DOTALL)
_GBNF_SYNTAX = re.compile(r"Expected [^\w\s].*|Expected (?:name|integer)|Unexpected end of input")


def grammar(guide: Guide) -> str:
    """As llguidance takes it; it may still find mistakes. Raises GuideRefused."""
    import llguidance

    make = llguidance.LLMatcher
    match guide.kind:
        case GuideKind.JSON_SCHEMA | GuideKind.JSON_OBJECT:
            schema = _schema(guide.text or '{"type": "object"}')
            return make.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE})
        case GuideKind.REGEX:
            return make.grammar_from_regex(guide.text)
        case GuideKind.CHOICE:
            return make.grammar_from_lark(f"start: {' | '.join(map(_string, guide.choices()))}")
        case GuideKind.GRAMMAR:
            return make.grammar_from_lark(_lark(guide.text) if is_gbnf(guide.text) else guide.text)


def is_gbnf(text: str) -> bool:
    """Whether a grammar begins with a rule of GBNF. Lark has no "::=" there; within it, strings may have any."""
    return _GBNF.match(text) is not None


def place(text: str, index: int) -> str:
    """Of this character, for people."""
    line, column = text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index)
    return f"line {line}, column {column}"


def _string(value: str) -> str:
    """In Lark, whose strings hold no control characters, DEL among them."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _schema(text: str) -> str:
    try:
        schema = json.loads(text)
        if schema is False:
            raise GuideRefused("matches nothing")
        if schema is not True and not isinstance(schema, dict):
            raise GuideRefused("must be an object or a boolean")
        return json.dumps({} if schema is True else _without_annotations(schema), allow_nan=False)
    except json.JSONDecodeError as error:
        raise GuideRefused(f"{place(text, error.pos)}: is not JSON") from None
    except RecursionError:
        raise GuideRefused("is nested too deeply") from None
    except ValueError:
        raise GuideRefused("has a number that is not JSON, or beyond all measure") from None


def _without_annotations(schema: Json) -> Json:
    """Without the formats that nobody here knows; llguidance would refuse them."""
    if isinstance(schema, list):
        return [_without_annotations(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Json] = {}
    for key, value in schema.items():
        if key in _NO_SCHEMAS:
            kept[key] = value
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            kept[key] = {name: _without_annotations(each) for name, each in value.items()}
        elif key != "format" or not isinstance(value, str) or value in FORMATS:
            kept[key] = _without_annotations(value)
    return kept


def _lark(gbnf: str) -> str:
    """The same in Lark. llguidance translates it once its names are none that Lark, or the translation, would take for
    others, and its escapes are those that the translation keeps."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, GrammarParser, gbnf_to_lark

    try:
        rules = GrammarParser().parse(gbnf)
    except GbnfToLarkError as error:
        said = _GBNF_SYNTAX.match(str(error).partition(" at line")[0])
        what = said.group() if said else "Invalid escape sequence"
        raise GuideRefused(f"{place(gbnf, error.pos.pos)}: {what[0].lower()}{what[1:]}") from None
    except IndexError:
        raise GuideRefused(f"{place(gbnf, len(gbnf))}: unexpected end of input") from None
    except RecursionError:
        raise GuideRefused("is nested too deeply") from None
    if "root" not in rules:
        raise GuideRefused("has no rule named root")
    names = {name: f"r{number}" for number, name in enumerate(rules)} | {"root": "root"}

    def translatable(part: re.Match[str]) -> str:
        if part["quoted"]:
            return _ESCAPE.sub(_plain, part["quoted"])
        if part["skipped"]:
            return part["skipped"]
        if part["name"] not in names:
            raise GuideRefused(f"{place(gbnf, part.start())}: a name that is not defined")
        return names[part["name"]]

    return gbnf_to_lark(_GBNF_PARTS.sub(translatable, gbnf))


def _plain(escape: re.Match[str]) -> str:
    """A character instead of its number, but for control characters and those that mean something."""
    digits = escape[1] or escape[2]
    if not digits and not escape[3]:
        return escape[0]
    number = int(digits, 16) if digits else ord(escape[3])
    return chr(number) if number > 0x7F else f"\\x{number:02x}"
