"""Workers hold orders to the limits that the contracts declare, as gateways do what clients ask."""

import pytest

from crossdock.worker.v1.worker_pb2 import SequenceSpec
from service.errors import InvalidRequest
from service.orders import from_spec, to_spec
from tests.fakes.borders import borders, declared, fields, needs_limits, put
from tests.service.test_orders import LIMITS, ORDER

WITHOUT = {
    "choices.index": "less than there may be answers: a rule between fields",
    "choices.seed": "any number is a seed",
    "guide.text": "as the public field that the kind names",
}
# Where nothing was emitted so far, and where a search goes on.
COMPANY = {
    "max_tokens": {"prompt_tokens": 4},
    "prompt_logprobs": {"prompt_tokens": 4},
    "beam.length_penalty": {"prompt_tokens": 4, "beam.width": 2},
}
BETWEEN_FIELDS = {
    ("prompt_tokens", LIMITS.tokens_max): "there are fewer tokens",
    ("max_tokens", LIMITS.tokens_max): "the prompt takes a token",
    ("min_tokens", LIMITS.tokens_max): "more than max_tokens",
}
MEASURES = {"VOCAB_SIZE": LIMITS.vocab_size, "MAX_MODEL_LEN": LIMITS.tokens_max}


def test_each_number_and_each_length_in_an_order_has_limits_or_a_reason_to_have_none():
    found = {path: field for path, field in fields(SequenceSpec.DESCRIPTOR) if needs_limits(field)}
    assert {path for path, field in found.items() if not declared(field).ListFields()} == set(WITHOUT)


@pytest.mark.parametrize("border", borders(SequenceSpec.DESCRIPTOR, MEASURES), ids=str)
def test_an_order_is_taken_up_to_each_border_and_refused_beyond_it(border):
    spec = to_spec(ORDER)
    for path, value in {**COMPANY.get(border.path, {}), border.path: border.value}.items():
        put(spec, path, value)
    try:
        from_spec(spec, LIMITS)
        refused = set()
    except InvalidRequest as refusal:
        refused = {violation.field for violation in refusal.violations}
    if not (border.inside and (border.path, border.number) in BETWEEN_FIELDS):
        assert (border.path in refused) is not border.inside
