"""OpenAI's own client for Python."""

import pytest

from crossdock.client import Client, Generation
from service.config import DEFAULT_MODEL

pytestmark = pytest.mark.timeout(900)

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def said(environment, exact_stack):
    openai = environment("openai", "openai==3.57.0")
    return openai.ask("openai_session.py", f"{exact_stack.http}/v1", PROMPT)


@pytest.fixture(scope="module")
def ours(exact_stack):
    """The same, by our own client."""
    with Client(exact_stack.grpc) as client:
        return client.generate(PROMPT, Generation(temperature=0.0, max_tokens=12, logprobs=2))


def test_a_completion_is_the_one_that_a_stub_gets(said, ours):
    (choice,) = ours.choices
    answer = said["completion"]
    assert answer["text"] == choice.text
    assert answer["token_logprobs"] == pytest.approx([token.logprob for token in choice.logprobs], abs=1e-6)
    assert answer["alternatives"] == [2] * len(choice.token_ids)
    assert answer["usage"]["completion_tokens"] == len(answer["tokens"]) == len(choice.token_ids)


def test_a_streamed_chat_is_the_whole_one(said):
    chat = said["chat"]
    assert chat["streamed"] == chat["whole"] != ""
    assert (chat["roles"], len(chat["finish_reasons"])) == (["assistant"], 1)
    assert (chat["usages"], chat["usage_of_last"]["completion_tokens"]) == (
        1,
        chat["usage_of_whole"]["completion_tokens"],
    )


def test_seeded_choices_come_again(said):
    choices = said["choices"]
    assert choices["indices"] == [0, 1, 2] and choices["texts"] == choices["again"]
    assert len(set(choices["texts"])) > 1


def test_an_answer_is_of_the_class_that_describes_it(said):
    reply = said["parsed"]
    assert reply["colour"] in ("red", "green", "blue") and isinstance(reply["certain"], bool)
    assert len(reply["places"]) == 2


def test_a_bias_steers_every_token(said):
    free, biased = said["steered"]
    assert biased == [500] * 4 != free


def test_a_stream_that_its_reader_closes_leaves_nothing_behind(said, exact_stack):
    assert said["left_early"]
    exact_stack.idle_ledgers()


def test_refusals_are_the_exceptions_that_callers_catch(said):
    found = said["refusals"]
    assert found["range"][:3] == ["BadRequestError", 400, "temperature"]
    assert found["type"][:3] == ["BadRequestError", 400, "max_tokens"]
    assert found["model"][:2] == ["NotFoundError", 404]
    assert found["length"][:3] == ["BadRequestError", 400, "max_tokens"]


def test_the_model_is_listed_and_found_by_its_name(said):
    assert said["models"] == [DEFAULT_MODEL, DEFAULT_MODEL]


def test_streams_side_by_side_are_each_what_they_are_alone(said):
    together, alone = said["crowd"]
    assert together == alone and all(alone)
