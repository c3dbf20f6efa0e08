"""vLLM's engine service on a real server, called with the stub that routers call it with."""

import asyncio
import threading
from contextlib import asynccontextmanager

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from gateway import vllm_engine, vllm_messages
from gateway.access import Access
from gateway.calls import no_trailer
from gateway.malformed import MalformedMessages
from gateway.request import EndReason
from service.errors import Exhausted, NotServed
from service.server import bind, create_server
from service.status import from_rpc_error

EVENT_S = 10.0


@asynccontextmanager
async def engine(frontend):
    server = create_server([MalformedMessages(100_000)])
    vllm_engine.register(server, frontend, Access(), no_trailer)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield vllm_engine_pb2_grpc.VllmEngineStub(channel)
    finally:
        await server.stop(None)


def asked(*, stream=False, ids=(5, 6, 7), request_id="r", **params):
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(original_text="?", input_ids=ids),
        sampling_params=pb.SamplingParams(**params),
        stream=stream,
    )


async def said(frontend, request):
    async with engine(frontend) as stub:
        return [part async for part in stub.Generate(request)]


async def test_an_answer_is_streamed_in_chunks_and_completed(frontend_over, scripted, batches):
    source = scripted(*batches([500, 501, 502], end=EndReason.LENGTH))
    *chunks, last = await said(frontend_over(source), asked(stream=True, max_tokens=3))
    assert [token for part in chunks for token in part.chunk.token_ids] == [500, 501, 502]
    assert sum(part.chunk.completion_tokens for part in chunks) == 3
    assert {part.chunk.prompt_tokens for part in chunks} == {3}
    assert last.complete.finish_reason == "length" and last.complete.WhichOneof("matched_stop") is None
    (request,) = source.requests
    assert request.id == "r" and request.prompt_token_ids == (5, 6, 7) and request.stop.max_tokens == 3


async def test_what_is_not_streamed_comes_whole(frontend_over, scripted, batches):
    source = scripted(*batches([500, 501, 502], end=EndReason.STOP))
    (only,) = await said(frontend_over(source), asked(stop_token_ids=[502]))
    assert list(only.complete.output_ids) == [500, 501, 502] and only.complete.completion_tokens == 3
    assert only.complete.finish_reason == "stop" and only.complete.matched_token_id == 502


async def test_numbers_that_are_0_say_nothing_and_all_others_are_passed_on(frontend_over, scripted, batches):
    plain = scripted(*batches([500], end=EndReason.LENGTH))
    await said(frontend_over(plain), asked(max_tokens=1))
    sampling = plain.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (1.0, 1.0, 1.0)
    full = scripted(*batches([500], end=EndReason.LENGTH))
    params = {"temperature": 0.0, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "seed": 9, "logit_bias": {5: 1.5}}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5}
    await said(frontend_over(full), asked(max_tokens=1, ignore_eos=True, **params, **penalties))
    (request,) = full.requests
    for name, value in {**params, **penalties}.items():
        assert getattr(request.sampling, name) == (((5, 1.5),) if name == "logit_bias" else value), name
    assert request.stop.token_ids == frozenset()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_request_ends_as_such_and_lets_its_work_go(frontend_over, scripted, batches, stream):
    source = scripted(*batches([500, 501], end=None), asyncio.Event())
    frontend = frontend_over(source)
    async with engine(frontend) as stub:
        call = stub.Generate(asked(stream=stream))
        if stream:
            assert [(await call.read()).chunk.token_ids[0] for _ in range(2)] == [500, 501]
        else:
            while (await stub.GetServerInfo(pb.GetServerInfoRequest())).active_requests == 0:
                await asyncio.sleep(0.01)
        await stub.Abort(pb.AbortRequest(request_ids=["another", "r"]))
        last = await call.read()
        assert await call.read() is grpc.aio.EOF
        assert last.complete.finish_reason == "abort"
        await asyncio.wait_for(source.closed.wait(), EVENT_S)
        assert (await stub.GetServerInfo(pb.GetServerInfoRequest())).active_requests == 0


class Held:
    """A guide check that takes until it is let go."""

    def __init__(self):
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, guide, tenant):
        self.asked.set()
        await self.go_on.wait()


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_aborted_before_it_is_accepted_is_never_begun(frontend_over, scripted, stream):
    source, held = scripted(), Held()
    async with engine(frontend_over(source, require_guide=held)) as stub:
        call = stub.Generate(asked(stream=stream, n=2, regex="a"))
        await asyncio.wait_for(held.asked.wait(), EVENT_S)
        await stub.Abort(pb.AbortRequest(request_ids=["r"]))
        held.go_on.set()
        ends = [part.complete async for part in call]
    assert [(end.index, end.finish_reason, end.prompt_tokens) for end in ends] == [
        (0, "abort", 3),
        (1, "abort", 3),
    ]
    assert source.requests == []


async def test_a_name_is_taken_from_the_first_moment_and_free_after_a_refusal(
    frontend_over, scripted, batches
):
    source, held = scripted(*batches([500], end=EndReason.LENGTH)), Held()
    async with engine(frontend_over(source, require_guide=held)) as stub:
        first = stub.Generate(asked(regex="a"))
        await asyncio.wait_for(held.asked.wait(), EVENT_S)
        with pytest.raises(grpc.aio.AioRpcError, match="request_id"):
            await stub.Generate(asked(regex="a", top_p=1.5)).read()
        nameless = [stub.Generate(asked(request_id="")) for _ in range(2)]
        assert [(await each.read()).complete.finish_reason for each in nameless] == ["length"] * 2
        held.go_on.set()
        assert (await first.read()).complete.finish_reason == "length"
        with pytest.raises(grpc.aio.AioRpcError, match="top_p"):
            await stub.Generate(asked(top_p=1.5)).read()
        assert (await stub.Generate(asked()).read()).complete.finish_reason == "length"


async def test_a_message_is_looked_at_only_where_there_is_room_for_it(frontend_over, scripted, admission_of):
    admission = admission_of(requests=1)
    frontend = frontend_over(scripted(), admission=admission)
    with admission.hold("other"), pytest.raises(grpc.aio.AioRpcError) as refused:
        await said(frontend, asked(logit_bias={-1: 1.0}, structural_tag="x"))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (asked(logit_bias=dict.fromkeys(range(-1, 300), 1.0)), "sampling_params.logit_bias: at most 300"),
        (asked(stop=["x"] * 17), "sampling_params.stop: at most 16"),
        (asked(stop_token_ids=[1] * 65), "sampling_params.stop_token_ids: at most 64"),
        (asked(choice=pb.ChoiceConstraint(choices=["x"] * 257)), "sampling_params.choice: at most 256"),
        (asked(ids=[5] * 513), "tokenized.input_ids: at most 512"),
        (asked(ids=[5] * 4097, truncate_prompt_tokens=9), "tokenized.input_ids: at most 4096"),
    ],
)
async def test_too_much_is_refused_as_the_router_has_named_it(frontend_over, scripted, request_, named):
    with pytest.raises(grpc.aio.AioRpcError, match=named) as refused:
        await said(frontend_over(scripted()), request_)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_large_message_is_copied_beside_the_event_loop(frontend_over, scripted, batches, monkeypatch):
    threads = []

    def spec_of(*given):
        threads.append(threading.current_thread())
        return translate(*given)

    translate = vllm_messages.spec_of
    monkeypatch.setattr(vllm_messages, "spec_of", spec_of)
    for large in (False, True):
        source = scripted(*batches([500], end=EndReason.LENGTH))
        spread = {"ids": [40_000] * 500, "stop": ["x" * 200] * 16} if large else {}
        (only,) = await said(frontend_over(source), asked(**spread))
        assert only.complete.completion_tokens == 1
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (asked(top_p=1.5), "top_p"),
        (asked(logit_bias={-1: 1.0}), "sampling_params"),
        (asked(ids=()), "token_ids"),
        (asked(structural_tag="x"), "structural_tag"),
        (
            pb.GenerateRequest(request_id="r", text="x", kv_transfer_params_json="{}"),
            "kv_transfer_params_json",
        ),
        (pb.GenerateRequest(request_id="r", text="x", data_parallel_rank=1), "data_parallel_rank"),
    ],
)
async def test_what_is_wrong_or_not_offered_is_refused_by_name(frontend_over, scripted, request_, named):
    source = scripted()
    with pytest.raises(grpc.aio.AioRpcError, match=named) as refused:
        await said(frontend_over(source), request_)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and source.requests == []


async def test_a_full_queue_is_a_refusal_that_says_when_to_come_again(frontend_over, scripted):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await said(frontend_over(scripted(Exhausted("full", retry_after_ms=1500))), asked())
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("grpc-retry-pushback-ms", "1500") in tuple(refused.value.trailing_metadata())


async def test_two_running_requests_do_not_share_a_name(frontend_over, scripted, batches):
    source = scripted(*batches([500], end=None), asyncio.Event())
    async with engine(frontend_over(source)) as stub:
        first = stub.Generate(asked(stream=True))
        await first.read()
        with pytest.raises(grpc.aio.AioRpcError, match="request_id"):
            await stub.Generate(asked(stream=True)).read()
        first.cancel()


async def test_a_router_hears_what_is_served_and_whether_it_is(frontend_over, scripted):
    async with engine(frontend_over(scripted(), ready=lambda: False)) as stub:
        model = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.served_model_name, model.max_context_length, list(model.eos_token_ids)) == (
            "smol",
            512,
            [2],
        )
        assert not (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Embed(pb.EmbedRequest())
        assert isinstance(from_rpc_error(refused.value), NotServed)
        assert from_rpc_error(refused.value).reason == "NOT_SERVED"
