"""Prompts of which the last tokens are taken: as text, ids and chat, and which are too long even so."""

from dataclasses import replace

import pytest

from crossdock.v1 import inference_pb2
from gateway.prompt import CHARACTERS_PER_TOKEN_MAX, TRUNCATED_TIMES_MAX
from tests.gateway.test_validation import LENGTH, ids, refused, spec, take

__all__ = ["take"]

LONG = [n % 1000 for n in range(LENGTH * TRUNCATED_TIMES_MAX)]
TURN = inference_pb2.ChatMessage(role="user", content="so many words " * LENGTH)


def truncated(asked, kept, **sampling):
    asked.truncate_prompt_tokens = kept
    asked.sampling.MergeFrom(inference_pb2.SamplingParams(**sampling))
    return asked


def test_of_ids_the_last_ones_are_kept(take):
    assert take(truncated(ids(LONG), 3)).prompt_token_ids == tuple(LONG[-3:])
    assert take(truncated(ids([1, 2]), 3)).prompt_token_ids == (1, 2)


def test_of_a_text_the_last_tokens_are_kept(take, tokenizer):
    text = "one two three four " * LENGTH
    wanted = tokenizer.encode(text)[-(LENGTH - 1) :]
    request = take(truncated(spec(text=text), LENGTH - 1))
    assert request.prompt_token_ids == tuple(wanted) and request.stop.max_tokens == 1


def test_of_a_chat_the_last_tokens_are_kept(take, tokenizer):
    chat = inference_pb2.ChatPrompt(messages=[TURN])
    request = take(truncated(spec(chat=chat), 6))
    text = tokenizer.decode(request.prompt_token_ids, include_special=True)
    assert len(request.prompt_token_ids) == 6 and text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [({}, LENGTH - 1), ({"max_tokens": 1}, LENGTH - 1), ({"max_tokens": 100}, LENGTH - 100)],
)
def test_all_that_fit_leave_room_for_the_answer(take, sampling, kept):
    request = take(truncated(ids(LONG), -1, **sampling))
    assert request.prompt_token_ids == tuple(LONG[-kept:])


@pytest.mark.parametrize("kept", [0, -2, LENGTH, 2**31 - 1, -(2**31)])
def test_how_many_are_kept_is_held_to_its_range(take, kept):
    assert refused(take, truncated(ids([1, 2]), kept)) == {
        "truncate_prompt_tokens": f"must be in [1, {LENGTH}), or -1"
    }


def test_what_is_kept_must_leave_room_for_the_answer(take):
    asked = truncated(ids(LONG), LENGTH - 5, max_tokens=6)
    assert list(refused(take, asked)) == ["sampling.max_tokens"]


def test_even_a_prompt_that_is_to_be_truncated_has_a_limit(take):
    assert list(refused(take, truncated(ids([*LONG, 1]), 3))) == ["token_ids.ids"]
    characters = LENGTH * TRUNCATED_TIMES_MAX * CHARACTERS_PER_TOKEN_MAX
    assert list(refused(take, truncated(spec(text="x" * (characters + 1)), 3))) == ["text"]


def test_ids_that_are_dropped_must_be_tokens_too(take):
    assert list(refused(take, truncated(ids([*LONG[:-1], 49152]), 1))) == ["token_ids.ids"]
    assert list(refused(take, truncated(ids([49152, 1]), 1))) == ["token_ids.ids"]


def test_no_tokens_are_an_answer_only_where_the_prompts_logprobs_are_wanted(take):
    asked = ids([1, 2])
    asked.sampling.max_tokens = 0
    assert list(refused(take, asked)) == ["sampling.max_tokens"]
    asked.output.prompt_logprobs = 0
    request = take(asked)
    assert request.prompt_only and request.stop.max_tokens == 1 and request.prompt_logprobs == 0


def test_what_is_said_of_a_prompt_fits_into_a_message(take, card):
    long = replace(card, max_model_len=32_768)
    asked = ids([1] * 20_000)
    asked.output.prompt_logprobs = 19
    assert take(asked, card=long).prompt_logprobs == 19
    asked.output.prompt_logprobs = 20
    rule = "at most 19 for a prompt of 20000 tokens"
    assert refused(take, asked, card=long) == {"output.prompt_logprobs": rule}


def test_a_beam_search_brings_no_logprobs_of_the_prompt(take):
    asked = ids([1, 2])
    asked.sampling.beam_width = 2
    asked.output.prompt_logprobs = 1
    assert refused(take, asked) == {"output.prompt_logprobs": "not with beam search"}
