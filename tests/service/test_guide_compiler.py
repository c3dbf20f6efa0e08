"""Guides on the default model's vocabulary: what may follow, judged by others; and what strangers may write."""

import json
import random
import re
import sys

import numpy as np
import pytest

from service.config import DEFAULT_MODEL
from service.guide_compiler import NOT_INSTALLED, OPTIONAL_PROPERTIES_MAX, PATIENCE_S, GuideCompiler
from service.guides import Guide, GuideKind, GuideRefused, choice
from service.model_source import resolve_model
from service.pieces import Pieces
from service.read_vocabulary import read_vocabulary

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(text):
    value = json.loads(text)
    tags = value.pop("tags", [])
    assert set(value) == {"name", "age"} and len(value["name"]) <= 12
    assert type(value["age"]) is int and 0 <= value["age"] <= 150
    return len(tags) <= 3 and set(tags) <= {"a", "b"}


def is_tree(text):
    def depth(node):
        assert set(node) == {"left"} or node == {}
        return 1 + depth(node["left"]) if node else 0

    return depth(json.loads(text)) >= 0


def schema(value):
    return Guide(kind=GuideKind.JSON_SCHEMA, text=json.dumps(value))


def regex(text):
    return Guide(kind=GuideKind.REGEX, text=text)


def grammar(text):
    return Guide(kind=GuideKind.GRAMMAR, text=text)


TREE = {"type": "object", "properties": {"left": {"$ref": "#"}}, "additionalProperties": False}
STRINGS = ["yes", "no", 'it "depends"', "naïve 🦙", "a\nb"]
GUIDES = {
    "schema": (schema(PERSON), is_person),
    "recursive schema": (schema(TREE), is_tree),
    "object": (Guide(kind=GuideKind.JSON_OBJECT, text=""), lambda text: isinstance(json.loads(text), dict)),
    "regex": (regex(r"[A-Z][a-z]{2,5}-\d{3}(é|🦙)"), re.compile(r"[A-Z][a-z]{2,5}-\d{3}(é|🦙)").fullmatch),
    "choice": (choice(STRINGS), STRINGS.__contains__),
    "lark": (grammar('start: "(" start ")" | /[0-9]{1,3}/'), re.compile(r"\(*[0-9]{1,3}\)*").fullmatch),
    "gbnf": (grammar('root ::= "a" [0-9]+ ";"'), re.compile(r"a[0-9]+;").fullmatch),
}


@pytest.fixture(scope="module")
def vocabulary():
    return read_vocabulary(resolve_model(DEFAULT_MODEL))


@pytest.fixture(scope="module")
def pieces(vocabulary):
    return Pieces(vocabulary)


@pytest.fixture(scope="module")
def compiler(vocabulary):
    return GuideCompiler(lambda: vocabulary)


def allowed(matcher):
    return np.flatnonzero(np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")).tolist()


def walk(matcher, seed, closing, steps=400):
    """Tokens drawn at random from what is allowed, the short way out once it has been long enough; END included.
    closing: tokens that lead there, the shortest way first."""
    dice, tokens = random.Random(seed), []
    while not tokens or tokens[-1] not in matcher.ends:
        options = allowed(matcher)
        assert options and len(tokens) < steps
        endings = [token for token in options if token in matcher.ends]
        if len(tokens) > 60:
            endings += [token for token in closing if token in options]
        way_out = endings and (len(tokens) > 60 or dice.random() < 0.5)
        tokens.append(endings[0] if way_out else dice.choice(options[:2000]))
        matcher.advance(tokens[-1])
    return tokens


def text_of(pieces, tokens):
    return b"".join(pieces[token] for token in tokens).decode("utf-8")


@pytest.fixture(scope="module")
def closing(vocabulary):
    """Of JSON."""
    return [vocabulary.backend.token_to_id(each) for each in '"}]']


@pytest.mark.parametrize("name", GUIDES)
@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_drawn_of_what_is_allowed_is_what_was_asked_for(compiler, pieces, closing, name, seed):
    guide, judge = GUIDES[name]
    *tokens, _ = walk(compiler.matcher(guide), seed, closing)
    text = text_of(pieces, tokens)
    assert judge(text), text


@pytest.mark.parametrize("name", GUIDES)
def test_a_matcher_is_a_fold_over_the_tokens_of_the_answer(compiler, name):
    """What it allows does not depend on where it was begun, on forks, or on what it was asked before."""
    guide, _ = GUIDES[name]
    going, dice, tokens = compiler.matcher(guide), random.Random(name), []
    for _ in range(25):
        begun_here, forked = compiler.matcher(guide, tokens), going.fork()
        options = allowed(going)
        assert allowed(begun_here) == allowed(forked) == options
        token = dice.choice(options)
        if token in going.ends:
            break
        tokens.append(token)
        going.advance(token)


def test_a_special_token_is_never_a_way_to_write_its_text(compiler, vocabulary, pieces):
    forced = compiler.matcher(regex(r"<\|im_start\|>"))
    assert not pieces.special & set(allowed(forced))
    matcher = compiler.matcher(regex(r"<\|im_start\|>|<\|endoftext\|>|x"))
    specials = pieces.special - matcher.ends
    assert len(specials) > 10 and not specials & set(allowed(matcher))
    for character in vocabulary.backend.encode("<", add_special_tokens=False).ids:
        matcher.advance(character)
    assert not specials & set(allowed(matcher))


def test_tokens_beyond_the_vocabulary_are_never_allowed(vocabulary):
    padded = GuideCompiler(lambda: vocabulary, vocabulary.size + 100)
    matcher = padded.matcher(regex("(.|\n)*"))
    assert len(matcher.allowed()) == (vocabulary.size + 100 + 31) // 32
    assert max(allowed(matcher)) < vocabulary.size


def test_a_token_that_was_not_allowed_leaves_nothing_that_is(compiler):
    matcher = compiler.matcher(choice(["yes"]))
    matcher.advance(next(token for token in range(1000) if token not in allowed(matcher)))
    assert allowed(matcher) == [] and matcher.error()
    matcher.advance(5)
    assert allowed(matcher) == [] and allowed(matcher.fork()) == []


def optional(count):
    each = {f"property{number}": {"type": "integer"} for number in range(count)}
    return schema({"type": "object", "properties": each, "additionalProperties": False})


def test_any_of_the_many_optional_properties_of_an_object_can_be_said(vocabulary):
    """The first ones take the most work: all others may follow them. Time stands still here."""
    patient = GuideCompiler(lambda: vocabulary, clock=lambda: 0.0)
    matcher = patient.matcher(optional(OPTIONAL_PROPERTIES_MAX))
    matcher.fork().try_out()
    said = [*range(12), OPTIONAL_PROPERTIES_MAX // 2, OPTIONAL_PROPERTIES_MAX - 1]
    text = json.dumps({f"property{number}": number for number in said})
    for token in vocabulary.backend.encode(text, add_special_tokens=False).ids:
        assert matcher.allowed()[token // 32] >> token % 32 & 1, matcher.error()
        matcher.advance(token)
    assert set(allowed(matcher)) & matcher.ends


@pytest.mark.parametrize("more", [1, 400, 1400])
def test_an_object_of_more_optional_properties_is_refused_at_the_door(compiler, more):
    with pytest.raises(GuideRefused, match=r"optional properties|more work"):
        compiler.matcher(optional(OPTIONAL_PROPERTIES_MAX + more)).try_out()


@pytest.mark.parametrize(
    ("text", "ends_after"),
    [
        ('start: "a" <|im_end|>', {"": False, "a": True}),
        ('start: "a" (<|im_end|> | "b")', {"": False, "a": True, "ab": True}),
        ('start: "a" (<|im_end|>)? "b"', {"a": False, "ab": True}),
        ('start: "a" <[*]> "b"', {"a": False, "ax": False, "axb": True}),
    ],
)
def test_an_end_that_a_grammar_names_may_follow_only_where_the_answer_is_complete_with_it(
    compiler, vocabulary, text, ends_after
):
    """It ends the answer, whatever the grammar would have after it."""
    for said, ends in ends_after.items():
        tokens = [vocabulary.backend.encode(each, add_special_tokens=False).ids[0] for each in said]
        matcher = compiler.matcher(grammar(text), tokens)
        assert bool(set(allowed(matcher)) & matcher.ends) == ends, said


HOSTILE = {
    "an end in the midst": grammar('start: "a" <|im_end|> "b"'),
    "an ambiguous grammar": grammar('start: e\ne: e "+" e | e "*" e | e e | /[a-z0-9]/'),
    "not JSON": Guide(kind=GuideKind.JSON_SCHEMA, text="{"),
    "no schema": schema({"type": "person"}),
    "matches nothing": schema(False),
    "an empty language": grammar('start: "a" start'),
    "a keyword that is not done": schema(
        {"type": "array", "uniqueItems": True, "contains": {"type": "null"}}
    ),
    "a reference elsewhere": schema({"$ref": "http://127.0.0.1:9/schema.json"}),
    "a reference to a file": schema({"$ref": "file:///etc/passwd"}),
    "endless recursion": schema({"$ref": "#"}),
    "nested too deeply": Guide(kind=GuideKind.JSON_SCHEMA, text='{"items":' * 5000 + "{}" + "}" * 5000),
    "a regex in deep brackets": regex("(" * 20_000 + "a" + ")" * 20_000),
    "a grammar in deep brackets": grammar("start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "repetition of repetition": regex("(a{1000}){1000}"),
    "the same behind a beginning": regex("abc(a{1000}){1000}"),
    "the same in a grammar": grammar('start: a{1000}\na: b{1000}\nb: "x"{1000}'),
    "an unfinished regex": regex("(a"),
    "look-around": regex("(?=a)a"),
    "no such rule": grammar("start: other"),
    "no start": grammar('other: "a"'),
    "half a character": grammar('root ::= "a" ['),
    "an import": grammar('%import "/etc/passwd"\nstart: A'),
    "no strings": Guide(kind=GuideKind.CHOICE, text="{}"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_followed_is_refused_in_one_short_line(compiler, name):
    with pytest.raises(GuideRefused) as refused:
        compiler.matcher(HOSTILE[name]).try_out()
    reason = str(refused.value)
    assert 1 <= len(reason) <= 200 and reason.isprintable()
    assert compiler.matcher(choice(["yes"])).allowed().any(), "and the next one is not"


def test_an_answer_whose_masks_take_too_long_cannot_go_on_and_says_why(vocabulary):
    """Patience is processor time: a little for each token, and some at once."""
    times = iter(range(10**9))
    slow = GuideCompiler(lambda: vocabulary, clock=lambda: next(times) * PATIENCE_S / 4)
    matcher = slow.matcher(regex("a*"))
    for _ in range(5):
        if not matcher.allowed().any():
            break
        matcher.advance(allowed(matcher)[0])
    assert allowed(matcher) == [] and "too long" in matcher.error()


def test_usual_work_is_never_too_long(vocabulary):
    times = iter(range(10**9))
    usual = GuideCompiler(lambda: vocabulary, clock=lambda: next(times) * 0.001)
    matcher = usual.matcher(regex("(a|b)*"))
    for _ in range(2000):
        matcher.advance(allowed(matcher)[0] if matcher.allowed().any() else -1)
    assert matcher.allowed().any() and matcher.error() == ""


def test_without_llguidance_a_guide_is_refused_by_its_name(vocabulary, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GuideRefused, match="pip install"):
        GuideCompiler(lambda: vocabulary).matcher(regex("a"))
    assert "llguidance" in NOT_INSTALLED


def test_the_vocabulary_is_read_once_and_only_when_a_guide_comes(vocabulary):
    reads = []

    def read():
        reads.append(1)
        return vocabulary

    compiler = GuideCompiler(read)
    assert reads == []
    for text in ("a", "b", "a"):
        compiler.matcher(regex(text))
    assert reads == [1]
