"""What clients say an answer must be, from each face to the order that a worker gets."""

import functools
import json
from datetime import UTC, datetime

import pytest

from crossdock.v1.inference_pb2 import GenerationSpec, SamplingParams, StopConditions
from crossdock.v1.inference_pb2 import Guide as Asked
from gateway.journal import Divergence, Journal
from gateway.openai_schema import chat_call, completion_call
from gateway.request import EndReason
from gateway.validation import accept
from service.errors import InvalidRequest
from service.guides import Guide, GuideKind, choice
from service.orders import AttemptKey
from service.reports import TokenEnd, TokenReport

SCHEMA = {"type": "object", "properties": {"a": {"type": "null"}}}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))


@pytest.fixture
def take(card, tokenizer):
    def take(asked, **fields):
        return accept(
            GenerationSpec(text="hello", guide=asked, **fields),
            card,
            tokenizer,
            new_id=lambda: "made",
            new_seed=lambda: 7,
            now=0.0,
            today=datetime(2030, 1, 2, tzinfo=UTC),
            time_left_s=None,
        )

    return take


@pytest.mark.parametrize(
    ("asked", "guide"),
    [
        (Asked(json_schema="{}"), Guide(kind=GuideKind.JSON_SCHEMA, text="{}")),
        (Asked(json_object=True), Guide(kind=GuideKind.JSON_OBJECT, text="")),
        (Asked(regex="a+"), Guide(kind=GuideKind.REGEX, text="a+")),
        (Asked(choice=Asked.Choices(strings=["a", 'b"'])), choice(["a", 'b"'])),
        (Asked(grammar="start: X"), Guide(kind=GuideKind.GRAMMAR, text="start: X")),
    ],
)
def test_a_guide_is_taken_as_it_is_and_told_to_the_worker(take, asked, guide):
    request = take(asked)
    assert request.guide == guide
    assert Journal(request, "w").order(1).guide == guide


@pytest.mark.parametrize(
    ("asked", "fields", "field"),
    [
        (Asked(), {}, "guide"),
        (Asked(json_object=False), {}, "guide.json_object"),
        (Asked(regex=""), {}, "guide.regex"),
        (Asked(regex="a" * 65_537), {}, "guide.regex"),
        (Asked(grammar="a" * 65_537), {}, "guide.grammar"),
        (Asked(json_schema="[" * 65), {}, "guide.json_schema"),
        (Asked(choice=Asked.Choices()), {}, "guide.choice.strings"),
        (Asked(choice=Asked.Choices(strings=["x"] * 257)), {}, "guide.choice.strings"),
        (Asked(choice=Asked.Choices(strings=["x" * 4097])), {}, "guide.choice.strings[0]"),
        (Asked(choice=Asked.Choices(strings=["x" * 4096] * 17)), {}, "guide.choice"),
        (Asked(regex="a"), {"sampling": SamplingParams(beam_width=2)}, "guide"),
    ],
)
def test_what_breaks_a_limit_is_refused_by_its_field(take, asked, fields, field):
    with pytest.raises(InvalidRequest) as caught:
        take(asked, **fields)
    assert [violation.field for violation in caught.value.violations] == [field]


def report(token_id, end):
    key = AttemptKey(request_id="w", attempt=1)
    return TokenReport(key=key, position=0, token_id=token_id, logprob=None, top=(), end=end)


def test_a_complete_answer_may_stop_at_the_models_end_though_the_client_ignores_it(take):
    ignoring = {"stop": StopConditions(ignore_eos=True)}
    guided = take(Asked(regex="a"), **ignoring)
    assert guided.stop.token_ids == frozenset()
    assert Journal(guided, "w").take(report(2, TokenEnd.STOP)).end is EndReason.STOP
    with pytest.raises(Divergence):
        Journal(guided, "w").take(report(3, TokenEnd.STOP))


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"response_format": {"type": "json_object"}}, Asked(json_object=True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            Asked(json_schema=SCHEMA_TEXT),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, Asked(json_schema=SCHEMA_TEXT)),
        ({"structured_outputs": {"json": SCHEMA_TEXT}}, Asked(json_schema=SCHEMA_TEXT)),
        ({"structured_outputs": {"json_object": True}}, Asked(json_object=True)),
        ({"structured_outputs": {"regex": "a", "disable_fallback": False}}, Asked(regex="a")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Asked(choice=Asked.Choices(strings=["a", "b"]))),
        ({"structured_outputs": {"grammar": "g"}}, Asked(grammar="g")),
        ({"guided_json": SCHEMA}, Asked(json_schema=SCHEMA_TEXT)),
        ({"guided_json": True}, Asked(json_schema="true")),
        ({"guided_json_object": True}, Asked(json_object=True)),
        ({"guided_regex": "a"}, Asked(regex="a")),
        ({"guided_choice": ["a", "b"]}, Asked(choice=Asked.Choices(strings=["a", "b"]))),
        ({"guided_grammar": "g"}, Asked(grammar="g")),
    ],
)
def test_each_way_that_clients_know_says_the_same(fields, asked):
    for call in (completion_call({"prompt": "x", **fields}, "r"), chat_call({**CHAT, **fields}, "r")):
        assert call.specs[0].guide == asked


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "structured_outputs": {}, "guided_json": None},
        {"structured_outputs": {"regex": None, "json_object": False}},
    ],
)
def test_what_asks_for_nothing_is_no_guide(fields):
    assert not chat_call({**CHAT, **fields}, "r").specs[0].HasField("guide")


def test_a_schema_that_is_nested_beyond_all_measure_is_refused_by_its_field():
    schema = functools.reduce(lambda inner, _: {"not": inner}, range(900), {})
    with pytest.raises(InvalidRequest, match="guided_json: at most 64 levels"):
        completion_call({"prompt": "x", "guided_json": schema}, "r")
