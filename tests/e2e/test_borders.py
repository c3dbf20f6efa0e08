"""Each limit that the contracts declare holds over the wire, and limits that an operator raises are raised."""

import re

import grpc
import httpx

from crossdock.v1 import inference_pb2
from tests.e2e import attacks
from tests.e2e.conftest import spec, stream, undisturbed
from tests.e2e.test_bad_input import (
    EXHAUSTED,
    INVALID,
    JSON,
    LENGTH,
    METHODS,
    VOCAB,
    computed,
    cost,
    explained,
    refusal,
)
from tests.fakes.borders import borders, put
from tests.fakes.raw_peer import raw_peer
from tests.gateway.test_ranges import COMPANY

MEASURES = {"VOCAB_SIZE": VOCAB, "MAX_MODEL_LEN": LENGTH, "PROMPT_TOKENS": 8 * LENGTH}
BEYOND = [
    border for border in borders(inference_pb2.GenerationSpec.DESCRIPTOR, MEASURES) if not border.inside
]


def asked(border):
    """What has nothing wrong but that."""
    made = inference_pb2.GenerationSpec()
    if not border.path.startswith(("text", "token_ids", "chat")):
        made.token_ids.ids.append(1)
    for path, value in {**COMPANY.get(border.path, {}), border.path: border.value}.items():
        put(made, path, value)
    return made


async def test_what_is_beyond_a_border_of_the_contract_is_refused_by_name_over_the_wire(exact_stack):
    """SEC-13, SEC-17."""
    before = computed(exact_stack)
    async with undisturbed(exact_stack) as answers, grpc.aio.insecure_channel(exact_stack.grpc) as channel:
        for border in BEYOND:
            request = METHODS["GenerateStream"](spec=asked(border))
            fields = explained(await refusal(channel, "GenerateStream", request), INVALID)
            assert border.path in {re.sub(r"\[\d+\]", "", field) for field in fields}, (border, fields)
    assert computed(exact_stack) == before + sum(map(cost, answers)), "the neighbour's, and no other"


def filler(size):
    """A field that no contract has."""
    return attacks.unknown_field(1000, bytes(size))


async def test_a_limit_of_messages_that_was_raised_is_the_limit_and_far_above_it_nothing_is_read(small_stack):
    """Case 80: 8 MiB pass, over both faces, and are read; 13 MiB and a GiB are refused."""
    large = inference_pb2.GenerationSpec.FromString(
        spec("hi", sampling={"max_tokens": 2}).SerializeToString() + filler(8 << 20)
    )
    ids = spec([5] * (8 << 20))
    async with grpc.aio.insecure_channel(small_stack.grpc) as channel:
        assert (await stream(channel, large)).usage.completion_tokens == 2
        fields = explained(await refusal(channel, "Generate", METHODS["Generate"](spec=ids)), INVALID)
        assert "at most 640" in fields["token_ids.ids"]
        more = explained(await refusal(channel, "Generate", filler(13 << 20)), EXHAUSTED)
        assert str(12 << 20) in more["request"]
    async with httpx.AsyncClient(base_url=small_stack.http, timeout=60) as client:
        for size, status in ((8 << 20, 200), (13 << 20, 413)):
            body = b'{"prompt": "hi", "max_tokens": 2}' + b" " * size
            assert (await client.post("/v1/completions", content=body, headers=JSON)).status_code == status
    async with raw_peer(int(small_stack.grpc.rpartition(":")[2])) as peer:
        peer.leave_unfinished("/crossdock.v1.InferenceService/Generate", length=1 << 30, sent=60_000)
        await peer.until(lambda: peer.ended)
