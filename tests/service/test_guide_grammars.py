"""What clients write is read as they mean it: texts that llguidance would take for others, or not at all."""

import json

import pytest

from service.config import DEFAULT_MODEL
from service.guide_compiler import GuideCompiler
from service.guide_grammars import FORMATS, is_gbnf
from service.guides import Guide, GuideKind, GuideRefused, choice
from service.model_source import resolve_model
from service.pieces import Pieces
from service.read_vocabulary import read_vocabulary


@pytest.fixture(scope="module")
def vocabulary():
    return read_vocabulary(resolve_model(DEFAULT_MODEL))


@pytest.fixture(scope="module")
def compiler(vocabulary):
    return GuideCompiler(lambda: vocabulary)


@pytest.fixture
def may_be(compiler, vocabulary):
    """Whether an answer may be this text, and end."""

    def may_be(guide, text):
        matcher = compiler.matcher(guide)
        for token in vocabulary.backend.encode(text, add_special_tokens=False).ids:
            if not matcher.allowed()[token // 32] >> token % 32 & 1:
                return False
            matcher.advance(token)
        return any(matcher.allowed()[end // 32] >> end % 32 & 1 for end in matcher.ends)

    return may_be


def schema(value):
    return Guide(kind=GuideKind.JSON_SCHEMA, text=json.dumps(value))


def grammar(text):
    return Guide(kind=GuideKind.GRAMMAR, text=text)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('?start: "a"', "a"),
        ('!start: "a"', "a"),
        ('start: "x ::= y"', "x ::= y"),
        ('start: "a"\n     | "root ::= b"', "root ::= b"),
        ('# root ::= "b"\nstart: "a"', "a"),
        ('// root ::= "b"\nstart: "a"', "a"),
        ('word: "a"\nstart: word', "a"),
        ("%import common.DIGIT\nstart: DIGIT  # x ::= y", "7"),
    ],
)
def test_lark_is_read_as_lark_whatever_is_in_its_strings_and_comments(may_be, text, answer):
    assert not is_gbnf(text) and may_be(grammar(text), answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('root ::= start\nstart ::= "a"', "a"),
        ('start ::= "a"\nroot ::= start', "a"),
        ('root ::= "start: b"', "start: b"),
        ('# start: b\n\n  root ::= "a"', "a"),
        ("root ::= [\"'] x [#{] # of\nx ::= [0-9]{2}", '"12{'),
        ('root ::= a-b a_b aB AB\na-b ::= "1"\na_b ::= "2"\naB ::= "3"\nAB ::= "4"', "1234"),
        ('root ::= naïve if\nnaïve ::= "a"\nif ::= "b"', "ab"),
        ('root ::= 1{2}\n1 ::= "x"', "xx"),
        ('root ::= "\\u0041\\U0001F999\\x42" [\\u0043]', "A\U0001f999BC"),
        ('root ::= "\\\\u0041\\"\\u0022" [\\u005d]', '\\u0041""]'),
        ('root ::= "a\tb\nc"', "a\tb\nc"),
    ],
)
def test_gbnf_is_read_as_gbnf_whatever_its_rules_are_named(may_be, text, answer):
    assert is_gbnf(text) and may_be(grammar(text), answer)


def test_any_character_that_the_model_can_write_may_be_in_a_choice(vocabulary, compiler, may_be):
    pieces = Pieces(vocabulary)
    written = {pieces[token] for token in range(vocabulary.size)}
    controls = [chr(number) for number in range(32) if bytes([number]) in written]
    assert len(controls) > 20
    for character in [*controls, *'"\\/\x7f\x80\x85\xa0é\u2028\ufeff\uffff🦙']:
        assert may_be(choice(["no", f"a{character}b"]), f"a{character}b"), repr(character)


MODEL = {
    "type": "object",
    "properties": {
        "format": {"type": "string", "format": "path"},
        "secret": {"anyOf": [{"type": "string", "format": "password"}, {"type": "null"}]},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/Part"}},
    },
    "required": ["format", "secret", "parts"],
    "additionalProperties": False,
    "$defs": {"Part": {"type": "string", "format": "binary", "minLength": 2}},
}


def test_a_format_that_nobody_knows_asks_for_nothing_and_all_else_is_kept(may_be):
    guide = schema(MODEL)
    assert may_be(guide, '{"format": "a/b", "secret": null, "parts": ["xy"]}')
    assert not may_be(guide, '{"format": "a/b", "secret": null, "parts": ["x"]}'), "too short"
    assert not may_be(guide, '{"secret": null, "parts": []}'), "a property may be named format"


def test_what_is_no_schema_keeps_its_format(may_be):
    for value in ({"const": {"format": "path"}}, {"enum": [{"format": "path"}]}):
        assert may_be(schema(value), '{"format": "path"}') and not may_be(schema(value), "{}")


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_that_is_known_is_followed(may_be, name):
    guide = schema({"type": "string", "format": name})
    assert not may_be(guide, '"? ?"')


def test_true_is_a_schema_of_anything_and_false_one_of_nothing(may_be):
    assert may_be(schema(True), '{"a": [1]}') and may_be(schema(True), "null")
    with pytest.raises(GuideRefused, match="matches nothing"):
        may_be(schema(False), "null")


def test_alternatives_of_which_only_one_can_match_may_be_oneof(may_be):
    guide = schema({"oneOf": [{"type": "integer"}, {"type": "boolean"}]})
    assert may_be(guide, "7") and may_be(guide, "true")
