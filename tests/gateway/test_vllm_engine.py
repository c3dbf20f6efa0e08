"""vLLM's engine service on a real server, called with the stub that routers call it with."""

import asyncio
import threading
from contextlib import asynccontextmanager
from hashlib import sha256
from io import BytesIO
from zipfile import ZipFile

import grpc
import pytest
from pytest import approx
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from gateway import vllm_engine, vllm_messages
from gateway.access import Access
from gateway.calls import no_trailer
from gateway.request import EndReason
from gateway.tokenizer import load_tokenizer
from gateway.utilization import EngineLoad
from service.errors import Exhausted, NotServed
from service.guard import Guard
from service.scores import Scores
from service.server import bind, create_server
from service.status import from_rpc_error

EVENT_S = 10.0
LOAD = EngineLoad(
    running=3,
    waiting=2,
    seats=8,
    tokens=1600,
    used_tokens=400,
    waiting_tokens=70,
    tokens_per_s=150.0,
    hit_rate=0.75,
    utilization=0.625,
)
NOT_OFFERED = {"Embed", "FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents"}


@asynccontextmanager
async def engine(frontend):
    server = create_server([Guard(lambda call: None, message_bytes_max=100_000)])
    vllm_engine.register(server, frontend, Access(), no_trailer, lambda: LOAD)
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


@pytest.mark.parametrize("stream", [False, True])
async def test_every_choice_is_answered_to_its_own_end(frontend_over, scripted, batches, stream):
    first, second = batches([500, 501], end=EndReason.LENGTH), batches([600], end=EndReason.STOP)
    source = scripted(first[0], *(each._replace(choice=1) for each in second), first[1])
    answer = await said(frontend_over(source), asked(stream=stream, n=2, max_tokens=2, stop_token_ids=[600]))
    chunks = [part.chunk for part in answer if part.HasField("chunk")]
    ends = [part.complete for part in answer if part.HasField("complete")]
    assert [(each.index, *each.token_ids) for each in chunks] == stream * [(0, 500), (1, 600), (0, 501)]
    assert [(end.index, end.finish_reason) for end in ends] == [(1, "stop"), (0, "length")]
    assert list(ends[1].output_ids) == ([501] if stream else [500, 501])


async def test_the_string_that_ended_an_answer_is_named(frontend_over, scripted, batches, tokenizer):
    source = scripted(*batches(tokenizer.encode(" one two three"), end=EndReason.LENGTH))
    (only,) = await said(frontend_over(source), asked(stop=["two"]))
    assert (only.complete.finish_reason, only.complete.matched_stop_str) == ("stop", "two")


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_answers_come_with_their_tokens(frontend_over, scripted, batches, stream):
    source = scripted(*batches([500, 501], end=EndReason.LENGTH, alternatives=2))
    answer = await said(frontend_over(source), asked(stream=stream, max_tokens=2, logprobs=2))
    told = [getattr(part, part.WhichOneof("response")).output_logprobs for part in answer]
    assert [list(each.token_ids) for each in told] == ([[500], [501], [501]] if stream else [[500, 501]])
    assert {logprob for each in told for logprob in each.token_logprobs} == {-0.5}
    first = told[0].top_logprobs[0]
    assert (list(first.token_ids), list(first.values)) == ([500, 501], [-0.5, -1.5])


async def test_logprobs_without_alternatives_are_those_of_the_tokens_alone(frontend_over, scripted, batches):
    source = scripted(*batches([500], end=EndReason.LENGTH, alternatives=0))
    (only,) = await said(frontend_over(source), asked(max_tokens=1, logprobs=0))
    told = only.complete.output_logprobs
    assert (list(told.token_ids), list(told.token_logprobs), list(told.top_logprobs)) == ([500], [-0.5], [])


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_the_prompt_come_once_and_its_first_token_has_none(
    frontend_over, scripted, batches, stream
):
    scores = Scores.of([(-0.25, 1, ((6, -0.25),)), (-0.75, 2, ((9, -0.125),))])
    source = scripted(*batches([500, 501], end=EndReason.LENGTH, scores=scores))
    answer = await said(frontend_over(source), asked(stream=stream, max_tokens=2, prompt_logprobs=1))
    parts = [getattr(part, part.WhichOneof("response")) for part in answer]
    assert [part.HasField("input_logprobs") for part in parts] == [True, False, False][: len(parts)]
    told = parts[0].input_logprobs
    assert list(told.token_ids) == [5, 6, 7]
    logprobs = [each.value if each.HasField("value") else None for each in told.token_logprobs]
    assert logprobs == [None, -0.25, -0.75]
    tops = [(list(each.token_ids), list(each.values)) for each in told.top_logprobs]
    assert tops == [([], []), ([6], [-0.25]), ([9], [-0.125])]


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


def test_each_method_of_the_contract_is_served_or_known_not_to_be():
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["VllmEngine"].methods}
    assert methods == NOT_OFFERED | (methods & set(vars(vllm_engine.VllmEngineServicer)))
    assert not NOT_OFFERED & set(vars(vllm_engine.VllmEngineServicer))


async def test_what_is_not_offered_is_unimplemented(frontend_over, scripted):
    async with engine(frontend_over(scripted())) as stub:
        for name in NOT_OFFERED:
            method = pb.DESCRIPTOR.services_by_name["VllmEngine"].methods_by_name[name]
            call = getattr(stub, name)(message(method.input_type))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await (call.read() if hasattr(call, "read") else call)
            error = from_rpc_error(refused.value)
            assert isinstance(error, NotServed) and error.reason == "NOT_SERVED", name


def message(descriptor):
    """An empty one of a type."""
    return getattr(pb if descriptor.file is pb.DESCRIPTOR else common_pb2, descriptor.name)()


async def test_a_router_hears_how_busy_all_of_this_is_as_of_one_engine(frontend_over, scripted):
    async with engine(frontend_over(scripted())) as stub:
        assert (await stub.GetServerInfo(pb.GetServerInfoRequest())).max_num_seqs == 8
        told = await stub.GetLoads(pb.GetLoadsRequest(include=["core", "queues"]))
    (load,) = told.loads
    assert told.dp_rank_count == 1
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (3, 2, 5)
    assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (400, 1600, 0.25)
    assert (load.max_running_requests, load.num_waiting_uncached_tokens) == (8, 70)
    assert (load.gen_throughput, load.cache_hit_rate) == (150.0, 0.75)
    assert load.utilization == approx(0.625)


async def test_the_tokenizer_that_a_router_fetches_is_ours(
    frontend_over, scripted, tokenizer, golden, tmp_path
):
    async with engine(frontend_over(scripted())) as stub:
        twice = [
            [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())] for _ in range(2)
        ]
    assert twice[0] == twice[1]
    *chunks, last = twice[0]
    packed = b"".join(chunk.data for chunk in twice[0])
    assert last.sha256 == sha256(packed).hexdigest() and not any(chunk.sha256 for chunk in chunks)
    ZipFile(BytesIO(packed)).extractall(tmp_path)
    theirs = load_tokenizer(tmp_path)
    for name in ("vocab_size", "eos_token_ids", "max_model_len", "special_tokens", "chat_template"):
        assert getattr(theirs, name) == getattr(tokenizer, name), name
    texts = [case["prompt"] for case in golden if "prompt" in case]
    assert texts and [theirs.encode(text) for text in texts] == [tokenizer.encode(text) for text in texts]


async def test_what_a_router_takes_for_the_path_of_the_tokenizer_is_nobodys(frontend_over, scripted):
    """A name would be looked up at a hub, and may be another model's there. Without any a router does not ask for
    ours."""
    async with engine(frontend_over(scripted())) as stub:
        model = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.model_path, model.tokenizer_path) == ("", "/dev/null")
