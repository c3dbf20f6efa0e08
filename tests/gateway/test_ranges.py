"""Each number and each length that a client may send has limits in the contracts, and is held to them."""

import re

import pytest

from crossdock.v1 import control_pb2, inference_pb2
from gateway import validation
from service.errors import InvalidRequest, ModelNotFound
from tests.fakes.borders import borders, declared, fields, needs_limits, put
from tests.gateway.test_validation import LENGTH, VOCAB, take

__all__ = ["take"]

REQUESTS = [
    method.input_type
    for service in (
        inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
        control_pb2.DESCRIPTOR.services_by_name["ControlService"],
    )
    for method in service.methods
]
WITHOUT = {
    "SamplingParams.seed": "any number is a seed",
    "ChatMessage.content": "counted with the other texts of its conversation",
    "DrainWorkerRequest.worker_id": "only compared with the names of workers",
}
# What goes with a field, so that its own range is all that can be wrong.
COMPANY = {
    "sampling.length_penalty": {"sampling.beam_width": 2},
    "sampling.max_tokens": {"output.prompt_logprobs": 0},
    "text": {"truncate_prompt_tokens": 1},
    "token_ids.ids": {"truncate_prompt_tokens": 1},
    "chat.messages": {"truncate_prompt_tokens": 1},
}
# Within its range, and too much of it all the same.
BETWEEN_FIELDS = {
    ("sampling.max_tokens", LENGTH): "the prompt takes a token",
    ("sampling.min_tokens", LENGTH): "the prompt takes a token",
    ("chat.messages", 8 * LENGTH): "the template puts more around so many than their text may have",
}


def test_each_number_and_each_length_in_a_request_has_limits_or_a_reason_to_have_none():
    found = {
        f"{field.containing_type.name}.{field.name}": field
        for request in REQUESTS
        for _, field in fields(request)
        if needs_limits(field)
    }
    assert {name for name, field in found.items() if not declared(field).ListFields()} == set(WITHOUT)


def named(check, message):
    """The fields that are refused, without places in lists."""
    try:
        check(message)
    except ModelNotFound:
        return set()
    except InvalidRequest as refusal:
        return {re.sub(r"\[\d+\]", "", violation.field) for violation in refusal.violations}
    return set()


MEASURES = {"VOCAB_SIZE": VOCAB, "MAX_MODEL_LEN": LENGTH, "PROMPT_TOKENS": 8 * LENGTH}


@pytest.mark.parametrize("border", borders(inference_pb2.GenerationSpec.DESCRIPTOR, MEASURES), ids=str)
def test_what_is_asked_is_taken_up_to_each_border_and_refused_beyond_it(take, border):
    asked = inference_pb2.GenerationSpec()
    if not border.path.startswith(("text", "token_ids", "chat")):
        asked.token_ids.ids.append(1)
    for path, value in {**COMPANY.get(border.path, {}), border.path: border.value}.items():
        put(asked, path, value)
    if not (border.inside and (border.path, border.number) in BETWEEN_FIELDS):
        assert (border.path in named(take, asked)) is not border.inside


ANYTHING = {"VOCAB_SIZE": VOCAB, "MAX_MODEL_LEN": LENGTH, "PROMPT_TOKENS": LENGTH}


@pytest.mark.parametrize("border", borders(inference_pb2.TokenizeRequest.DESCRIPTOR, ANYTHING), ids=str)
def test_what_is_to_become_tokens_is_held_to_its_limits(card, tokenizer, border):
    asked = inference_pb2.TokenizeRequest()
    put(asked, border.path, border.value)
    refused = named(lambda asked: validation.check_tokenize(asked, card, tokenizer), asked)
    assert (border.path in refused) is not border.inside


@pytest.mark.parametrize("border", borders(inference_pb2.DetokenizeRequest.DESCRIPTOR, ANYTHING), ids=str)
def test_what_is_to_become_text_is_held_to_its_limits(card, border):
    asked = inference_pb2.DetokenizeRequest()
    put(asked, border.path, border.value)
    refused = named(lambda asked: validation.check_detokenize(asked, card), asked)
    assert (border.path in refused) is not border.inside
