"""More is asked for than is taken, over the real faces: what is refused was not read, and others are served."""

import asyncio
import threading
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import orjson
import pytest
from google.rpc import error_details_pb2

from crossdock.v1 import inference_pb2 as pb
from crossdock.v1 import inference_pb2_grpc
from gateway import api_keys
from gateway.access import Access
from gateway.admission import Admission, Bounds
from gateway.api_keys import ApiKeys
from gateway.cost import Cost
from gateway.openai_http import openai_app
from gateway.reading import Reading
from gateway.servicer import InferenceServicer
from gateway.window import Window
from service.errors import Exhausted
from service.server import bind, create_server
from service.status import PUSHBACK_KEY
from tests.gateway.test_orchestrator import ANSWER, Scene, served
from tests.gateway.test_servicer import details_of, refusal_of, serving, stub_of

WAIT_S = 30.0
ASKED = 40
PROMPT = "The capital of France is"


class HeldTokenizer:
    """The model's own, which reads no text to its end before the test says so. seen: first words, in order."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.seen, self.go_on = [], threading.Event()

    def encode(self, text, **named):
        self.seen.append(text.partition(" ")[0])
        assert self.go_on.wait(WAIT_S)
        return self._tokenizer.encode(text, **named)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


class WatchedReading(Reading):
    """asked: the tenants whose texts came to be read, in order."""

    def __init__(self):
        super().__init__()
        self.asked = asyncio.Queue()

    async def run(self, work, **named):
        self.asked.put_nowait(named["tenant"])
        return await super().run(work, **named)


@asynccontextmanager
async def tenants(frontend, folder, *names):
    """Calls Generate with a long text, each as one of these tenants."""
    keys = {name: api_keys.make(folder / "keys", name) for name in names}
    server = create_server()
    servicer = InferenceServicer(frontend, Access(keys=ApiKeys(folder / "keys")))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = bind(server, "127.0.0.1:0")
    await server.start()

    def ask(tenant):
        spec = pb.GenerationSpec(
            text=f"{tenant} " * 1000,
            truncate_prompt_tokens=3,
            sampling=pb.SamplingParams(max_tokens=len(ANSWER)),
            stop=pb.StopConditions(ignore_eos=True),
        )
        metadata = (("authorization", f"Bearer {keys[tenant]}"),)
        return stub_of(channel).Generate(pb.GenerateRequest(spec=spec), metadata=metadata)

    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield ask
    finally:
        await server.stop(None)


async def test_a_flood_of_texts_is_refused_unread_and_another_tenant_takes_its_turn(
    frontend_over, tokenizer, tmp_path
):
    scene, held, reading = Scene(requests_max=6, shared=True), HeldTokenizer(tokenizer), WatchedReading()
    frontend = frontend_over(scene.orchestrator, tokenizer=held, admission=scene.admission, reading=reading)
    async with tenants(frontend, tmp_path, "greedy", "modest") as ask:
        flood = [asyncio.ensure_future(refusal_or_answer(ask("greedy"))) for _ in range(ASKED)]
        refusals = await first_of(flood, ASKED - 4)
        assert scene.admission.live == 4 and set(held.seen) == {"greedy"} and len(held.seen) <= 2
        for refusal in refusals:
            assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert details_of(refusal)[error_details_pb2.ErrorInfo].reason == "QUEUE_FULL"
            assert int(dict(refusal.trailing_metadata())[PUSHBACK_KEY]) > 0
        modest = ask("modest")
        while await reading.asked.get() != "modest":
            pass
        held.go_on.set()
        for _ in range(5):
            await served(scene, 0, 0)
        assert list((await modest).outputs[0].token_ids) == list(ANSWER)
        assert "modest" in held.seen[:4]
        answers = [
            answer for answer in await asyncio.gather(*flood) if isinstance(answer, pb.GenerateResponse)
        ]
        assert len(answers) == 4 and len(held.seen) == 5
    assert (scene.p[0].kinds().count("submit"), scene.d[0].kinds().count("reserve")) == (5, 5)
    scene.assert_nothing_is_left()


async def refusal_or_answer(call):
    try:
        return await call
    except grpc.aio.AioRpcError as refusal:
        return refusal


async def first_of(tasks, count):
    """What the first so many came to."""
    done = set()
    async with asyncio.timeout(WAIT_S):
        while len(done) < count:
            now, _ = await asyncio.wait(set(tasks) - done, return_when=asyncio.FIRST_COMPLETED)
            done |= now
    return [task.result() for task in done]


@pytest.mark.parametrize("method", ["Generate", "GenerateStream", "Tokenize", "Detokenize"])
async def test_every_call_holds_a_place_and_is_refused_unread_where_there_is_none(
    method, frontend_over, scripted, batches, admission_of, tokenizer
):
    admission, held = admission_of(requests=1), HeldTokenizer(tokenizer)
    held.go_on.set()
    frontend = frontend_over(scripted(*batches([500])), admission=admission, tokenizer=held)
    asked = {
        "Generate": pb.GenerateRequest(spec=pb.GenerationSpec(text="x")),
        "GenerateStream": pb.GenerateStreamRequest(spec=pb.GenerationSpec(text="x")),
        "Tokenize": pb.TokenizeRequest(text="x"),
        "Detokenize": pb.DetokenizeRequest(token_ids=[500]),
    }[method]
    async with serving(frontend) as channel:
        call = getattr(stub_of(channel), method)
        with admission.hold("somebody"):
            error = await refusal_of(call(asked))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and held.seen == []
        assert details_of(error)[error_details_pb2.ErrorInfo].reason == "QUEUE_FULL"
        if method == "GenerateStream":
            assert [part async for part in call(asked)]
        else:
            await call(asked)
    assert admission.live == 0


async def test_a_deadline_that_cannot_be_kept_is_refused_unread(
    frontend_over, scripted, admission_of, tokenizer, monkeypatch
):
    admission, held = admission_of(), HeldTokenizer(tokenizer)

    def hopeless(tenant, least, left_s):
        assert least.tokens == 1 + 3 * 50 and 0 < left_s <= WAIT_S
        raise Exhausted("too late", reason="DEADLINE_UNREACHABLE", retry_after_ms=7000)

    monkeypatch.setattr(admission, "require_time", hopeless)
    frontend = frontend_over(scripted(), admission=admission, tokenizer=held)
    spec = pb.GenerationSpec(text=PROMPT, sampling=pb.SamplingParams(n=3, max_tokens=50))
    async with serving(frontend) as channel:
        error = await refusal_of(stub_of(channel).Generate(pb.GenerateRequest(spec=spec), timeout=WAIT_S))
    assert details_of(error)[error_details_pb2.ErrorInfo].reason == "DEADLINE_UNREACHABLE"
    assert held.seen == [] and admission.live == 0


async def test_what_a_call_may_cost_is_claimed_before_it_is_read(
    frontend_over, scripted, admission_of, tokenizer
):
    admission, held = admission_of(tokens=500), HeldTokenizer(tokenizer)
    held.go_on.set()
    frontend = frontend_over(scripted(), admission=admission, tokenizer=held)
    spec = pb.GenerationSpec(text="x", sampling=pb.SamplingParams(n=2, max_tokens=100))
    with admission.hold("somebody") as other:
        other.claim(Cost(requests=1, tokens=301))
        async with serving(frontend) as channel:
            error = await refusal_of(stub_of(channel).Generate(pb.GenerateRequest(spec=spec)))
    assert "tokens: at most 500" in error.details() and held.seen == []


BODIES = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"prompt": PROMPT},
    "/detokenize": {"tokens": [500]},
}


@pytest.mark.parametrize("path", BODIES)
async def test_so_does_every_http_call(path, frontend_over, scripted, batches, admission_of, client_of):
    admission = admission_of(requests=1)
    async with client_of(frontend_over(scripted(*batches([500])), admission=admission)) as client:
        with admission.hold("somebody"):
            refused = await client.post(path, json=BODIES[path])
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
        assert (await client.post(path, json=BODIES[path])).status_code == 200
    assert admission.live == 0


async def test_a_body_counts_while_it_comes(frontend_over, scripted, admission_of, client_of):
    admission, sent = admission_of(bytes=150_000), []

    async def body():
        for _ in range(5):
            sent.append(20_000)
            yield b'{"prompt": "' + b" " * (20_000 - 12) if len(sent) == 1 else b" " * 20_000

    async with client_of(frontend_over(scripted(), admission=admission)) as client:
        with admission.hold("somebody", message_bytes=100_000):
            headers = {"content-type": "application/json"}
            refused = await client.post("/tokenize", content=body(), headers=headers)
    assert refused.status_code == 429 and "bytes" in refused.json()["error"]["message"]
    assert admission.live == 0


class OneByOne:
    """A source behind an admission. begun: requests that the workers were asked for; most: at a time."""

    def __init__(self, admission, steps):
        self._admission, self._steps = admission, steps
        self.begun = self.now = self.most = 0

    async def run(self, request, unread):
        async with self._admission.enter(request) as place:
            self.begun += 1
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                for batch in self._steps:
                    await asyncio.sleep(0)
                    place.took(len(batch.tokens))
                    yield batch
            finally:
                self.now -= 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_http_call_of_several_prompts_is_taken_whole_or_not_at_all_and_each_takes_its_turn(
    stream, frontend_over, batches, client_of
):
    window = Window(branches=4, prompts=16, prompt_tokens=8192)
    admission = Admission(Bounds(requests=10), clock=asyncio.get_running_loop().time, window=lambda: window)
    source = OneByOne(admission, batches([500, 501]))
    body = {"prompt": [PROMPT] * 16, "max_tokens": 2, "stream": stream}
    async with client_of(frontend_over(source, admission=admission)) as client:
        with admission.hold("somebody"):
            refused = await client.post("/v1/completions", json=body)
        assert refused.status_code == 429 and source.begun == 0
        for times in (1, 2):
            answered = await client.post("/v1/completions", json=body)
            assert answered.status_code == 200 and b"error" not in answered.content
            assert (source.begun, source.most) == (16 * times, 4)
    assert admission.live == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
async def test_a_place_is_held_until_all_of_the_answer_is_sent(
    stream, leaves, frontend_over, scripted, batches, admission_of
):
    """The client takes the last of it only later, or never."""
    admission, sending, read = admission_of(), asyncio.Event(), asyncio.Event()
    app = openai_app(
        frontend_over(scripted(*batches([500])), admission=admission), Access(), body_bytes_max=9999
    )
    content = orjson.dumps({"prompt": PROMPT, "max_tokens": 1, "stream": stream})
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        return await asyncio.Event().wait()

    async def send(message):
        if message.get("body"):
            sending.set()
            await read.wait()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    async with AsyncExitStack() as stack:
        call = asyncio.create_task(app(scope, receive, send))
        stack.callback(call.cancel)
        await asyncio.wait_for(sending.wait(), WAIT_S)
        assert admission.live == 1
        if leaves:
            call.cancel()
        read.set()
        await asyncio.wait_for(asyncio.gather(call, return_exceptions=True), WAIT_S)
    assert admission.live == 0
