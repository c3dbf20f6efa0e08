"""Answers that must be something, on the real model: what they are, whoever computes them, and whatever is killed."""

import asyncio
import json
import random
import re

import grpc
import httpx
import pytest

from crossdock.client import AsyncClient, Generation, RequestError
from crossdock.v1 import inference_pb2
from tests.e2e.conftest import crossdock, spec, stream, tokens_of, undisturbed
from tests.e2e.test_kills import PATIENCE_S, kill, ready, some_tokens

Guide = inference_pb2.Guide

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
NESTED = {
    "type": "object",
    "properties": {
        "point": {"type": "array", "prefixItems": [{"type": "number"}] * 2, "minItems": 2, "items": False}
    },
    "required": ["point"],
    "additionalProperties": False,
}


def is_person(text):
    value = json.loads(text)
    assert set(value) == {"name", "age", "tags"} and len(value["name"]) <= 16
    assert type(value["age"]) is int and 0 <= value["age"] <= 120
    return 1 <= len(value["tags"]) <= 3 and set(value["tags"]) <= {"new", "old"}


def is_nested(text):
    value = json.loads(text)
    return set(value) == {"point"} and [type(each) in (int, float) for each in value["point"]] == [True] * 2


DATE = r"(19|20)\d{2}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
JUDGED = {
    "person": (Guide(json_schema=json.dumps(PERSON)), is_person),
    "nested": (Guide(json_schema=json.dumps(NESTED)), is_nested),
    "enum": (
        Guide(json_schema='{"enum": [1, "two", null]}'),
        lambda text: json.loads(text) in (1, "two", None),
    ),
    "object": (Guide(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    "date": (Guide(regex=DATE), re.compile(DATE).fullmatch),
    "choice": (
        Guide(choice=Guide.Choices(strings=["positive", "negative"])),
        ["positive", "negative"].__contains__,
    ),
    "grammar": (
        Guide(grammar='start: NUMBER ("+" NUMBER)~1..3\nNUMBER: /[0-9]{1,3}/'),
        re.compile(r"\d{1,3}(\+\d{1,3}){1,3}").fullmatch,
    ),
}
GREEDY = {"max_tokens": 120}
SEEDED = {"max_tokens": 120, "temperature": 1.0, "seed": 3}


@pytest.fixture
async def channel(exact_stack):
    async with grpc.aio.insecure_channel(exact_stack.grpc) as channel:
        yield channel


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", JUDGED)
async def test_an_answer_is_what_its_guide_says_and_stops_there(channel, name, sampling):
    guide, judge = JUDGED[name]
    answer = await stream(channel, spec("Give an example: ", sampling=sampling, guide=guide))
    assert answer.finish.reason == inference_pb2.FINISH_REASON_STOP and answer.finish.eos_token_id == 2
    assert judge(answer.text), answer.text


async def test_each_of_three_choices_is_what_a_request_of_its_own_gets(exact_stack):
    async with AsyncClient(exact_stack.grpc) as client:
        how = {"json_schema": PERSON, "max_tokens": 120, "temperature": 1.2}
        answer = await client.generate("Somebody: ", Generation(n=3, seed=8, **how))
        for choice in answer.choices:
            single = await client.generate("Somebody: ", Generation(seed=choice.seed, **how))
            assert choice.token_ids == single.token_ids and is_person(choice.text)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": inference_pb2.StopConditions(ignore_eos=True)}, "aaa"),
        ({"sampling": {"min_tokens": 30, "max_tokens": 40}}, "aaa"),
        ({"stop": inference_pb2.StopConditions(strings=["aa"], include_stop_string=True)}, "aa"),
        ({"sampling": {"max_tokens": 1}}, None),
    ],
)
async def test_a_complete_answer_ends_whatever_puts_its_end_off(channel, fields, text):
    answer = await stream(channel, spec("x", **{"guide": Guide(regex="a{3}"), **fields}))
    if text is None:
        assert answer.finish.reason == inference_pb2.FINISH_REASON_LENGTH and "aaa".startswith(answer.text)
    else:
        assert answer.finish.reason == inference_pb2.FINISH_REASON_STOP and answer.text == text


async def test_a_special_token_cannot_be_written_as_text(channel):
    asked = spec(
        "x",
        sampling={"max_tokens": 40},
        guide=Guide(regex=r"<\|im_start\|>"),
        output=inference_pb2.OutputOptions(include_special_tokens=True),
    )
    answer = await stream(channel, asked)
    assert answer.text.removesuffix("<|endoftext|>") == "<|im_start|>" and len(answer.token_ids) > 1
    assert 1 not in answer.token_ids


HOSTILE = {
    "guide.json_schema": [
        '{"type": "integer", "multipleOf": 99999989}',
        '{"$ref": "http://127.0.0.1:9/schema"}',
        '{"$ref": "#"}',
        '{"items":' * 60 + "}" * 61,
        json.dumps(
            {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(9)]} for i in range(9)]}
        ),
        json.dumps({"enum": [f"{n:06}" * 3 for n in range(4000)]}),
        "false",
    ],
    "guide.regex": ["(a{1000}){1000}", "(" * 60_000, "(a"],
    "guide.grammar": ["start: " + "(" * 30_000, 'start: "a" start'],
}


@pytest.mark.timeout(240)
async def test_what_strangers_write_is_refused_or_answered_and_disturbs_nobody(exact_stack):
    async with undisturbed(exact_stack), AsyncClient(exact_stack.grpc) as client:
        for field, texts in HOSTILE.items():
            name = field.removeprefix("guide.")
            for text in texts:
                try:
                    await client.generate("x", Generation(max_tokens=4, **{name: text}))
                except RequestError as error:
                    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
                    assert [each.field for each in error.violations] == [field]
                    assert 1 <= len(error.violations[0].description) <= 256
        late = Generation(regex="[a-z ]{300}(a{1000}){1000}", max_tokens=200)
        with pytest.raises(RequestError) as caught:
            await client.generate("x", late)
        assert (caught.value.code, caught.value.reason) == ("INVALID_ARGUMENT", "GUIDE_FAILED")
    exact_stack.idle_ledgers()


async def test_beam_search_with_a_guide_is_refused_by_name(exact_stack):
    async with AsyncClient(exact_stack.grpc) as client:
        with pytest.raises(RequestError, match="guide: not with beam search"):
            await client.generate("x", Generation(beam_width=2, regex="a"))


async def test_openai_clients_get_json(exact_stack):
    body = {
        "messages": [{"role": "user", "content": "Describe somebody."}],
        "max_tokens": 120,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    }
    async with httpx.AsyncClient(base_url=exact_stack.http, timeout=60) as client:
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        assert is_person(answer["choices"][0]["message"]["content"])
        wrong = {"prompt": "x", "structured_outputs": {"regex": "(a"}}
        refused = await client.post("/v1/completions", json=wrong)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "structured_outputs.regex"


def test_the_command_takes_a_schema_from_a_file(exact_stack, tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(PERSON), encoding="utf-8")
    done = crossdock("generate", "Somebody: ", "--target", exact_stack.grpc, "--json-schema", str(path))
    assert done.returncode == 0 and is_person(done.stdout), done.stderr
    missing = crossdock(
        "generate", "x", "--target", exact_stack.grpc, "--json-schema", str(tmp_path / "none")
    )
    assert missing.returncode == 1 and "--json-schema" in missing.stderr


@pytest.mark.timeout(120)
async def test_an_answer_is_to_the_bit_the_same_handed_over_and_with_nobody_to_hand_it_over(narrow_stack):
    async with grpc.aio.insecure_channel(narrow_stack.grpc) as channel:
        await ready(narrow_stack, "prefill")
        specs = [killed_spec(0), killed_spec(1), killed_spec(2, LONG_TOKENS), killed_spec(3)]
        for each in specs:
            each.cache_salt = "what nobody has asked before"
        before = computed(narrow_stack)
        split = [await stream(channel, each) for each in specs]
        between = computed(narrow_stack)
        assert between["prefill-0"] - before["prefill-0"] >= LONG_TOKENS
        kill(narrow_stack.children()["prefill-0"])
        # It is started again, which takes seconds: what is asked now has only the other one.
        alone = await asyncio.gather(*(stream(channel, each) for each in specs))
        generated = sum(len(answer.token_ids) for answer in alone)
        after = computed(narrow_stack)
        assert after["decode-0"] - between["decode-0"] > generated, "it has computed prompts"
        for answer, expected in zip(alone, split, strict=True):
            assert (answer.token_ids, answer.logprobs) == (expected.token_ids, expected.logprobs)


def computed(stack):
    """Tokens, by worker."""
    return {ledger.worker_id: ledger.tokens.computed for ledger in stack.audit().ledgers}


KILLS = 6
STREAMS = 6
LONG_TOKENS = 800
"""A prompt that no decode worker computes beside its streams as long as it can be computed elsewhere."""


def killed_spec(number, length=None):
    sampling = (SEEDED | {"seed": number} if number % 2 else GREEDY) | {"max_tokens": 400}
    prompt = tokens_of(number, length or (5, 40, 200)[number % 3])
    guide = Guide(json_schema=json.dumps({"type": "array", "items": PERSON, "minItems": 2, "maxItems": 3}))
    return spec(prompt, sampling=sampling, guide=guide, output=inference_pb2.OutputOptions(logprobs=1))


@pytest.mark.timeout(900)
async def test_answers_whose_workers_are_killed_parse_and_are_to_the_bit_what_they_would_have_been(
    wide_stack,
):
    """Case 35."""
    async with grpc.aio.insecure_channel(wide_stack.grpc) as channel:
        specs = [killed_spec(number) for number in range(STREAMS)]
        golden = [await stream(channel, each) for each in specs]
        for answer in golden:
            assert answer.finish.reason == inference_pb2.FINISH_REASON_STOP
            assert all(is_person(json.dumps(each)) for each in json.loads(answer.text))
        for trial in range(KILLS):
            victim = ("decode-0", "prefill-0", "decode-1", "prefill-1")[trial % 4]
            await ready(wide_stack, victim.split("-")[0])
            streams = [asyncio.create_task(stream(channel, each, PATIENCE_S)) for each in specs]
            await some_tokens(channel, random.Random(trial).randrange(2, 30))
            kill(wide_stack.children()[victim])
            answers = await asyncio.gather(*streams)
            for answer, expected in zip(answers, golden, strict=True):
                assert (answer.token_ids, answer.logprobs) == (expected.token_ids, expected.logprobs), trial
        await ready(wide_stack, "prefill", "decode")
    wide_stack.idle_ledgers()
