"""OpenAI's own client for Python."""

import pytest

from crossdock.client import Client, Generation
from gateway import api_keys
from service.config import DEFAULT_MODEL
from tests.e2e.conftest import running_stack

pytestmark = pytest.mark.timeout(900)

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def openai(environment):
    return environment("openai", "openai==3.57.0")


@pytest.fixture(scope="module")
def said(openai, exact_stack):
    return openai.ask("openai_session.py", f"{exact_stack.http}/v1", PROMPT)


@pytest.fixture(scope="module")
def refused(openai, tmp_path_factory):
    """By a stack that asks for keys and takes one request at a time."""
    keys = tmp_path_factory.mktemp("keys") / "api-keys"
    key = api_keys.make(keys, "acme")
    with running_stack("--api-keys", str(keys), "--queue-requests-max", "1") as stack:
        return openai.ask("openai_guarded.py", f"{stack.http}/v1", key)


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


def test_choices_of_a_streamed_completion_are_the_whole_ones_and_every_chunk_says_what_was_used(said):
    streamed = said["streamed"]
    assert streamed["streamed"] == streamed["whole"] and all(streamed["whole"])
    assert streamed["finish_reasons"] == [0, 1] and streamed["choices_of_last"] == 0
    used = streamed["used"]
    assert used == sorted(used) and used[0] >= 1 and used[-2:] == [streamed["usage_of_whole"]] * 2


def test_an_echo_is_the_same_of_a_text_and_of_its_token_ids_and_every_token_has_its_place(said, ours):
    as_text, as_ids = said["echoed"]
    assert as_text == as_ids
    text, token_ids, logprobs = as_text
    assert text.startswith(PROMPT) and token_ids == list(ours.choices[0].token_ids[:4])
    assert logprobs["token_logprobs"][0] is None
    assert all(logprob < 0 for logprob in logprobs["token_logprobs"][1:])
    assert all(map(text.startswith, logprobs["tokens"], logprobs["text_offset"]))


def test_logprobs_of_a_chat_are_of_the_tokens_of_its_text(said):
    told = said["chat_logprobs"]
    assert "".join(each["token"] for each in told["content"]) == told["text"]
    for each in told["content"]:
        assert bytes(each["bytes"]).decode() == each["token"]
        assert len(each["top_logprobs"]) == 2
        assert each["logprob"] == each["top_logprobs"][0]["logprob"], "greedy takes the likeliest"


def test_a_stream_that_cannot_go_on_is_an_error_of_the_library(said):
    kind, code, param, seen = said["broken_off"]
    assert (kind, code, param) == ("APIError", "guide_failed", "structured_outputs.regex") and seen


def test_a_key_that_nobody_has_is_an_authentication_error_with_the_name_of_the_request(refused):
    stranger = refused["stranger"]
    assert (stranger["kind"], stranger["status"]) == ("AuthenticationError", 401) and stranger["request_id"]


def test_whoever_comes_when_all_is_full_hears_when_to_come_again(refused):
    second = refused["second"]
    assert (second["kind"], second["status"], second["code"]) == ("RateLimitError", 429, "queue_full")
    assert int(second["retry_after"]) >= 1 and second["request_id"] == "second"
    assert refused["later"] == 1


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
    assert found["model"][:3] == ["NotFoundError", 404, "model"]
    assert found["length"][:3] == ["BadRequestError", 400, "max_tokens"]


def test_the_model_is_listed_and_found_by_its_name(said):
    assert said["models"] == [DEFAULT_MODEL, DEFAULT_MODEL]


def test_streams_side_by_side_are_each_what_they_are_alone(said):
    together, alone = said["crowd"]
    assert together == alone and all(alone)
