"""A mistake is told by its kind and place; what a client wrote is never repeated."""

import pytest

from service.config import DEFAULT_MODEL
from service.guide_compiler import GuideCompiler
from service.guides import Guide, GuideKind, GuideRefused
from service.model_source import ModelFilesError, resolve_model
from service.read_vocabulary import read_vocabulary


@pytest.fixture(scope="module")
def told():
    """Time stands still: what is too much is told by other limits."""
    compiler = GuideCompiler(lambda: read_vocabulary(resolve_model(DEFAULT_MODEL)), clock=lambda: 0.0)

    def told(kind, text):
        with pytest.raises(GuideRefused) as refused:
            compiler.matcher(Guide(kind=kind, text=text)).try_out()
        return str(refused.value)

    return told


EXPRESSIONS = {
    "(zebra": "unclosed group (at character 1 of the expression)",
    "zebra)": "unopened group (at character 6 of the expression)",
    "[zebra": "unclosed character class (at character 1 of the expression)",
    "zebra{3,1}": "invalid repetition count range, the start must be <= the end (at character 6 of the expression)",
    "a/\n\\/\\\\zebra(": "unclosed group (at character 13 of the expression)",
    "(?=zebra)a": "look-around, including look-ahead and look-behind, is not supported "
    "(at character 1 of the expression)",
    "\\p{zebra}": "Unicode property not found (at character 1 of the expression)",
    "\\bzebra": "word boundaries, anchors of lines and look-around are not supported",
    "(zebra{1000}){1000}": "needs more work or memory than is allowed",
}
GRAMMARS = {
    'start: "a"\n   | zebra': "line 1, column 8: a name that is not defined",
    'start: zebra\nzebra: "a"\nzebra: "b"': "line 3, column 8: a name that is defined twice",
    "start: ZEBRA\nZEBRA: ZEBRA": "line 2, column 8: a terminal that needs itself",
    "start: <zebra>": "line 1, column 8: a special token that the model does not have",
    'start: ("zebra"': "line 1, column 16: expected ')'",
    'start: "a" }zebra': "line 1, column 12: unexpected here",
    'start: "zebra': "line 1, column 14: a string or an expression without its end, or a character that means nothing",
    "start: /(zebra/": "line 1, column 8: unclosed group (at character 1 of the expression)",
    'start: %json {"type": "zebra"}': "line 1, column 8: %json: type: one of null, boolean, integer, number, string, "
    "array and object",
    "%import common.ZEBRA\nstart: ZEBRA": "line 1, column 1: an import that is not known",
    "start: @zebra": "a grammar that is not known",
    'zebra: "a"': "has no rule named start",
    'zebra ::= "a"': "has no rule named root",
    'root ::= "a"\n  zebra': "line 2, column 8: expected ::=",
    "root ::= zebra": "line 1, column 10: a name that is not defined",
    'root ::= ("zebra"': "line 1, column 18: expected ')'",
    'root ::= "zebra': "line 1, column 16: unexpected end of input",
    'root ::= "zebra\\q"': "line 1, column 17: invalid escape sequence",
    'root ::= zebra{3,1}\nzebra ::= "x"': "a range that ends before it begins",
}
SCHEMAS = {
    '{"type": "zebra"}': "type: one of null, boolean, integer, number, string, array and object",
    '{"uniqueItems": true, "not": {"const": "zebra"}}': "not supported: not, uniqueItems",
    '{"properties": {"zebra": 5}}': "a schema must be an object or a boolean",
    '{"minimum": "zebra"}': "minimum: a value of the wrong type",
    '{"enum": "zebra"}': "enum: a value of the wrong type",
    '{"$ref": "#/zebra"}': "$ref, $id or $schema: leads to no place in the schema",
    '{"$ref": "http://zebra/x"}': "$ref, $id or $schema: leads to no place in the schema",
    '{"type": "string", "pattern": "a(zebra"}': "pattern: unclosed group (at character 2 of the expression)",
    '{"patternProperties": {"(zebra\\n": {}}}': "pattern: unclosed group (at character 1 of the expression)",
    '{"patternProperties": {"zebra": {}, "z": {}}}': "patternProperties: must not overlap",
    '{"type": "string", "minLength": 9, "maxLength": 2, "title": "zebra"}': "nothing "
    "matches it: minLength leaves nothing for maxLength",
    '{"type": "object", "properties": {"zebra": false}, "required": ["zebra"]}': "nothing "
    "matches it: required has what cannot be",
    '{"const": "zebra", "maxLength": 2}': "nothing matches it",
    '{"x-guidance": {"zebra": 1}}': "x-guidance: holds what is not known",
    '{"oneOf": [{"const": "zebra"}, {"type": "string"}]}': "oneOf: not where its alternatives may overlap, or it "
    "cannot be told; anyOf is",
    '{\n  "const": zebra}': "line 2, column 12: is not JSON",
    '["zebra"]': "must be an object or a boolean",
    '{"const": "zebra", "minimum": 1e999}': "has a number that is not JSON, or beyond all measure",
    '{"const": "zebra\\ud800"}': "an escape of half a character",
}
MISTAKES = [
    (kind, text, reason)
    for kind, texts in (
        (GuideKind.REGEX, EXPRESSIONS),
        (GuideKind.GRAMMAR, GRAMMARS),
        (GuideKind.JSON_SCHEMA, SCHEMAS),
    )
    for text, reason in texts.items()
]


@pytest.mark.parametrize(("kind", "text", "reason"), MISTAKES)
def test_a_mistake_is_told_by_its_kind_and_place(told, kind, text, reason):
    assert told(kind, text) == reason


@pytest.mark.parametrize(("kind", "text", "reason"), MISTAKES)
@pytest.mark.parametrize("word", ["error", "limit", "items", "regex"])
def test_what_is_told_does_not_depend_on_the_words_of_the_client(told, kind, text, reason, word):
    """Whatever llguidance makes of them."""
    assert told(kind, text.replace("zebra", word).replace("ZEBRA", word.upper())) == reason


def test_files_of_a_model_that_cannot_be_read_are_not_told_of():
    def read():
        raise ModelFilesError("tokenizer.json: secret")

    with pytest.raises(GuideRefused) as refused:
        GuideCompiler(read).matcher(Guide(kind=GuideKind.REGEX, text="a"))
    assert "secret" not in str(refused.value) and "json" not in str(refused.value)
