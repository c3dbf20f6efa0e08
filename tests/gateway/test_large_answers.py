"""Answers near the size that a message may have, over a real server."""

from dataclasses import replace

import grpc
import pytest
from google.rpc import error_details_pb2

from crossdock.v1 import inference_pb2 as pb
from gateway import messages
from gateway.prompt import SCORES_MAX
from tests.gateway.test_servicer import details_of, refusal_of, serving, stub_of

MIB = 1 << 20
ALTERNATIVES = 20


@pytest.fixture
def large(card):
    return replace(card, max_model_len=500_000)


def asked(n=1, logprobs=ALTERNATIVES, **sampling):
    return pb.GenerationSpec(
        text="The capital of France is",
        sampling=pb.SamplingParams(n=n, **sampling),
        output=pb.OutputOptions(logprobs=logprobs),
        stop=pb.StopConditions(ignore_eos=True),
    )


def answers(batches, n, tokens, **named):
    """Of n choices, each in one piece."""
    ids = [48_000 + position % 1000 for position in range(tokens)]
    return [
        batch._replace(choice=choice)
        for choice in range(n)
        for batch in batches(ids, size=tokens, alternatives=ALTERNATIVES, **named)
    ]


@pytest.mark.parametrize("n", [1, 16])
async def test_the_longest_answer_in_one_message_is_read_by_a_client_with_grpcs_own_limit(
    n, large, frontend_over, scripted, batches
):
    most = SCORES_MAX // (n * (1 + ALTERNATIVES))
    frontend = frontend_over(scripted(*answers(batches, n, most)), card=lambda: large)
    async with serving(frontend) as channel:
        answer = await stub_of(channel).Generate(pb.GenerateRequest(spec=asked(n, max_tokens=most)))
    assert [len(output.token_ids) for output in answer.outputs] == [most] * n
    assert MIB < answer.ByteSize() < 4 * MIB


async def test_one_token_more_is_refused_before_anything_is_computed(large, frontend_over, scripted):
    source = scripted()
    async with serving(frontend_over(source, card=lambda: large)) as channel:
        spec = asked(max_tokens=SCORES_MAX // (1 + ALTERNATIVES) + 1)
        error = await refusal_of(stub_of(channel).Generate(pb.GenerateRequest(spec=spec)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and source.requests == []
    (violation,) = details_of(error)[error_details_pb2.BadRequest].field_violations
    assert violation.field == "sampling.max_tokens"


async def test_much_that_comes_together_is_streamed_in_messages_of_a_mebibyte_at_most(
    large, frontend_over, scripted, batches
):
    tokens, n = 9000, 2
    frontend = frontend_over(scripted(*answers(batches, n, tokens, cached_tokens=3)), card=lambda: large)
    async with serving(frontend) as channel:
        call = stub_of(channel).GenerateStream(pb.GenerateStreamRequest(spec=asked(n, max_tokens=tokens)))
        parts = [part async for part in call]
    assert max(part.ByteSize() for part in parts) < MIB
    for choice in range(n):
        deltas = [delta for part in parts for delta in part.deltas if delta.index == choice]
        ids = [token for delta in deltas for token in delta.token_ids]
        assert ids == [48_000 + position % 1000 for position in range(tokens)] and len(deltas) > 1
        assert sum(len(delta.logprobs.top_token_ids) for delta in deltas) == tokens * ALTERNATIVES
        starts = [delta.first_position for delta in deltas]
        assert starts == [sum(len(each.token_ids) for each in deltas[:at]) for at in range(len(deltas))]
        assert [delta.HasField("finish") for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert parts[-1].usage.completion_tokens == n * tokens and parts[0].prompt_info.cached_tokens == 3


async def test_more_text_than_a_message_holds_ends_the_work_and_says_so(
    frontend_over, scripted, batches, monkeypatch
):
    monkeypatch.setattr(messages, "WHOLE_TEXT_BYTES_MAX", 40)
    source = scripted(*batches([500] * 400))
    async with serving(frontend_over(source)) as channel:
        spec = pb.GenerationSpec(text="x", stop=pb.StopConditions(ignore_eos=True))
        error = await refusal_of(stub_of(channel).Generate(pb.GenerateRequest(spec=spec)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and source.closed.is_set()
    assert details_of(error)[error_details_pb2.ErrorInfo].reason == "ANSWER_TOO_LARGE"
