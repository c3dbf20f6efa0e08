"""A stranger that speaks the workers' own language: orders no gateway would give, and tickets it cannot have. It has
stolen the proof that lets a gateway attach; without it, it gets nowhere.

Workers check again what the gateway has checked, so that whoever reaches their ports reaches nobody's memory.
"""

import asyncio
import itertools
import math

import grpc
import pytest

from crossdock.worker.v1 import worker_pb2 as pb
from crossdock.worker.v1 import worker_pb2_grpc as pb_grpc
from service.worker_rim import PROTOCOL_VERSION
from tests.e2e.conftest import undisturbed
from tests.e2e.listening import listeners

VOCAB = 49152
HELLO = pb.Hello(protocol_version=PROTOCOL_VERSION, gateway_id="stranger", gateway_epoch=1)
FINE = {
    "request_id": "r",
    "attempt": 1,
    "token_ids": [5, 6, 7],
    "prompt_tokens": 3,
    "max_tokens": 4,
    "temperature": 1.0,
    "top_p": 1.0,
    "choices": [pb.SequenceChoice(index=0, seed=0)],
}
WILD = [
    {"choices": []},
    {"choices": [pb.SequenceChoice(index=number) for number in range(1000)]},
    {"choices": [pb.SequenceChoice(index=1)] * 2},
    {"choices": [pb.SequenceChoice(index=2**32 - 1)]},
    {"beam": pb.BeamSearch(width=2**32 - 1)},
    {"beam": pb.BeamSearch(width=2, length_penalty=math.nan)},
    {"cache_scope": bytes(100_000)},
    {"preemptions": 2**32 - 1},
    {"age_ms": 2**64 - 1},
    {"priority": 2**31 - 1},
    {"guide": pb.Guide()},
    {"guide": pb.Guide(kind=77, text="a")},
    {"guide": pb.Guide(kind=pb.GUIDE_KIND_REGEX, text="")},
    {"guide": pb.Guide(kind=pb.GUIDE_KIND_REGEX, text="a" * 100_000)},
    {"guide": pb.Guide(kind=pb.GUIDE_KIND_JSON_SCHEMA, text="[" * 65)},
    {"guide": pb.Guide(kind=pb.GUIDE_KIND_CHOICE, text="{}")},
    {"guide": pb.Guide(kind=pb.GUIDE_KIND_REGEX, text="a"), "beam": pb.BeamSearch(width=2)},
    {"token_ids": []},
    {"token_ids": [5, VOCAB, 7]},
    {"token_ids": [5, 2**31 - 1, 7]},
    {"token_ids": [5, 2**32 - 1, 7]},
    {"token_ids": [5] * 100_000, "prompt_tokens": 100_000},
    {"prompt_tokens": 0},
    {"prompt_tokens": 4},
    {"prompt_tokens": 2**32 - 1},
    {"max_tokens": 0},
    {"max_tokens": 2**32 - 1},
    {"min_tokens": 5},
    {"stop_token_ids": [VOCAB]},
    {"stop_token_ids": [2**32 - 1]},
    {"stop_token_ids": range(10_000)},
    *({"temperature": bad} for bad in (-1, 2.1, math.nan, math.inf)),
    *({"top_p": bad} for bad in (0, 1.1, math.nan)),
    *({"min_p": bad} for bad in (-1, 1.1, math.nan)),
    *({"presence_penalty": bad} for bad in (-2.1, 2.1, math.nan)),
    *({"frequency_penalty": bad} for bad in (-2.1, 2.1, math.inf)),
    *({"repetition_penalty": bad} for bad in (0, -1, 2.1, math.nan)),
    *({"logit_bias": bad} for bad in ({VOCAB: 1}, {2**32 - 1: 1}, {5: math.nan}, {5: 101})),
    {"logit_bias": dict.fromkeys(range(301), 1)},
    {"logit_bias": dict.fromkeys(range(100_000), 1)},
    {"top_k": VOCAB + 1},
    {"top_k": 2**32 - 1},
    {"logprobs": 21},
    {"logprobs": VOCAB},
    {"prompt_logprobs": 21},
    {"prompt_logprobs": 2**32 - 1},
    {"attempt": 0},
    {"request_id": ""},
    {"request_id": "r" * 10_000},
]
UNFOLLOWED = [
    {"guide": pb.Guide(kind=pb.GUIDE_KIND_REGEX, text="(a")},
    {"guide": pb.Guide(kind=pb.GUIDE_KIND_JSON_SCHEMA, text="false")},
    {"guide": pb.Guide(kind=pb.GUIDE_KIND_REGEX, text="a"), "token_ids": [5, 6, 7, 8], "max_tokens": 9},
]
"""Guides that cannot be compiled, and one that the answer so far is not of."""
TICKETS = [b"x", bytes(96), b"x" * 100_000]
NO_TICKET = b""
"""With it an order is for the worker by itself."""
ROLES = {
    "submit": (pb_grpc.PrefillServiceStub, pb.PrefillServiceAttachRequest, pb.SubmitPrompt),
    "reserve": (pb_grpc.DecodeServiceStub, pb.DecodeServiceAttachRequest, pb.Reserve),
}
ABOUT_THE_WORKER = ("welcome", "load", "audit", "cache")


async def answer_to(channel, proof, verb, ticket, fields):
    """The first message about the order, or the error that the stream ended with."""
    stub, request, submission = ROLES[verb]
    over = asyncio.Event()

    async def say():
        yield request(hello=HELLO)
        sequence = pb.SequenceSpec(**FINE | fields)
        yield request(**{verb: submission(sequence=sequence, ticket=ticket, **ELSEWHERE[verb])})
        await over.wait()

    call = stub(channel).Attach(say(), timeout=30, metadata=proof)
    try:
        async for message in call:
            if message.WhichOneof("message") not in ABOUT_THE_WORKER:
                return message
    except grpc.aio.AioRpcError as error:
        return error
    finally:
        over.set()
        call.cancel()


ELSEWHERE = {"submit": {"target_endpoints": ["tcp://127.0.0.1:1"]}, "reserve": {}}


def worker_targets(stack):
    """verb -> gRPC target of the worker that has it."""
    pids = stack.children()
    names = {"submit": "prefill-0", "reserve": "decode-0"}
    return {
        verb: next(
            each.grpc_target() for each in listeners([pids[name]]) if str(each.address).endswith(".grpc")
        )
        for verb, name in names.items()
    }


@pytest.mark.parametrize("verb", ROLES)
async def test_wild_orders_and_forged_tickets_are_refused_and_nobody_else_notices(exact_stack, verb):
    pids, proof = exact_stack.children(), exact_stack.worker_credential()
    async with (
        undisturbed(exact_stack),
        grpc.aio.insecure_channel(worker_targets(exact_stack)[verb]) as channel,
    ):
        for fields, ticket in itertools.product(WILD, (b"x", NO_TICKET)):
            answer = await answer_to(channel, proof, verb, ticket, fields)
            assert refused(answer, pb.END_CAUSE_INVALID), (fields, ticket, answer)
        for fields in UNFOLLOWED:
            answer = await answer_to(channel, proof, verb, NO_TICKET, fields)
            assert refused(answer, pb.END_CAUSE_GUIDE_FAILED), (fields, answer)
        for ticket in TICKETS:
            answer = await answer_to(channel, proof, verb, ticket, {})
            assert refused(answer, pb.END_CAUSE_TICKET_REFUSED), answer
    assert exact_stack.children() == pids
    exact_stack.idle_ledgers()


@pytest.mark.parametrize("verb", ROLES)
async def test_a_stream_of_nonsense_is_cut_at_once_each_time(exact_stack, verb):
    """Often: the cut comes while the worker still writes its welcome."""
    stub, request, _ = ROLES[verb]
    nonsense = [request(hello=HELLO), request(cancel=pb.Cancel(request_id="r" * 1000, attempt=1))]

    async def say():
        for each in nonsense:
            yield each
        await over.wait()

    over = asyncio.Event()
    async with grpc.aio.insecure_channel(worker_targets(exact_stack)[verb]) as channel:
        for _ in range(40):
            call = stub(channel).Attach(say(), timeout=30, metadata=exact_stack.worker_credential())
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _ in call:
                    continue
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert raised.value.details() == "request_id: at most 128 bytes"
    over.set()


@pytest.mark.parametrize("verb", ROLES)
async def test_only_a_gateway_that_says_hello_in_our_version_is_heard(exact_stack, verb):
    stub, request, _ = ROLES[verb]
    older = pb.Hello(protocol_version=PROTOCOL_VERSION + 1, gateway_id="stranger", gateway_epoch=1)
    async with grpc.aio.insecure_channel(worker_targets(exact_stack)[verb]) as channel:
        for first in (request(), request(cancel=pb.Cancel(request_id="r")), request(hello=older)):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                proof = exact_stack.worker_credential()
                await stub(channel).Attach(iter([first]), timeout=30, metadata=proof).read()
            assert raised.value.code() in (
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.FAILED_PRECONDITION,
            )


def refused(answer, cause):
    if isinstance(answer, grpc.aio.AioRpcError):
        return answer.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
    return answer is not None and answer.WhichOneof("message") == "ended" and answer.ended.cause == cause
