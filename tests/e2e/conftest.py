"""Real processes on the real model. A stack is shared by all tests that do not hurt it."""

import asyncio
import json
import random
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from commands import operator_token
from crossdock.credentials import Credentials
from crossdock.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from service import worker_access

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 60
CONTROL_TOKEN = "of gateways that tests start by themselves"
OPERATOR = Credentials(key=CONTROL_TOKEN).metadata()


@dataclass
class Stack:
    """first_finished: sequences by worker, after the first answers."""

    process: subprocess.Popen
    grpc: str
    http: str
    first_finished: dict = field(default_factory=dict)

    def audit(self):
        with grpc.insecure_channel(self.grpc) as channel:
            return control_pb2_grpc.ControlServiceStub(channel).Audit(
                control_pb2.AuditRequest(), timeout=15, metadata=self.operator()
            )

    def status(self):
        with grpc.insecure_channel(self.grpc) as channel:
            return control_pb2_grpc.ControlServiceStub(channel).GetStatus(
                control_pb2.GetStatusRequest(), timeout=15, metadata=self.operator()
            )

    def operator(self):
        """What an operator's calls bring: what the user who started it finds on this machine."""
        return Credentials(key=operator_token.find(self.grpc)).metadata()

    def idle_ledgers(self, attempts=200):
        """The ledgers once nothing is live or owned any more; fails when that does not come."""
        for attempt in range(attempts):
            with pytest.raises(subprocess.TimeoutExpired):  # it has not ended
                self.process.wait(min(attempt, 10) / 100)
            audit = self.audit()
            owned = sum(ledger.owned_blocks + ledger.quarantined_blocks for ledger in audit.ledgers)
            if audit.live_requests == 0 and owned == 0:
                assert audit.balanced, audit
                return audit.ledgers
        raise AssertionError(f"still owned: {audit}")

    def worker_credential(self):
        """What the gateway shows its workers, from the key that they all have."""
        environ = Path(f"/proc/{self.children()['gateway']}/environ").read_bytes().split(b"\0")
        (key,) = [each.partition(b"=")[2] for each in environ if each.startswith(b"CROSSDOCK_TICKET_KEY=")]
        return worker_access.credential(bytes.fromhex(key.decode()))

    def children(self):
        """pid by worker name, from the command lines of the children."""
        return {
            words[words.index("--worker-id") + 1] if "--worker-id" in words else "gateway": pid
            for pid, words in self._children()
        }

    def gateways(self):
        """Their pids."""
        return [pid for pid, words in self._children() if "gateway" in words]

    def _children(self):
        """pid and words of the command line, of each."""
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            for pid in (task / "children").read_text().split():
                with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    yield int(pid), Path(f"/proc/{pid}/cmdline").read_text().replace("=", "\0").split("\0")


def resident_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def said_when_ready(process):
    """What a process that serves says of itself; before, it may say what it is loading."""
    while "loading" in (said := json.loads(process.stdout.readline())):
        continue
    assert said["ready"] is True, said
    return said


@contextmanager
def running_stack(*flags):
    argv = [sys.executable, "-m", "commands.main", "serve", "--grpc-port", "0", "--http-port", "0", *flags]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("ready "), f"no ready line, exit code {process.poll()}: {line!r}"
        said = dict(word.split("=", 1) for word in line.split()[1:])
        yield Stack(process=process, grpc=said["grpc"], http=said["http"])
    finally:
        process.terminate()
        process.wait(timeout=30)
        process.stdout.close()


@pytest.fixture(scope="session")
def coarse_stack(shallow_model):
    """As the narrow one, but that it computes prompts in chunks of 16 tokens."""
    flags = (*shallow_model, "--kv-cache-memory-bytes", "64MiB")
    with running_stack(*flags, "--prefill-max-num-batched-tokens", "16") as stack:
        yield stack


@pytest.fixture(scope="session")
def forgetful_stack(shallow_model):
    """As the narrow one, but that it computes prompts in chunks of 64 tokens, finds none of them again, and begins
    steps before the tokens of the last one are read."""
    flags = (*shallow_model, "--kv-cache-memory-bytes", "64MiB", "--async-scheduling")
    more = ("--prefill-max-num-batched-tokens", "64", "--no-enable-prefix-caching")
    with running_stack(*flags, *more) as stack:
        yield stack


@pytest.fixture(scope="session")
async def wide_stack(shallow_model):
    """Shallow, the default dtype, two workers of each role. Tests may kill these, and wait until all are ready again.

    Its first requests were 16 short ones at once, before any worker had measured how fast it is."""
    flags = ("--prefill", "2", "--decode", "2", "--kv-cache-memory-bytes", "64MiB")
    with running_stack(*shallow_model, *flags) as stack:
        stop = inference_pb2.StopConditions(ignore_eos=True)
        short = [spec(tokens_of(n, 40), sampling={"max_tokens": 8}, stop=stop) for n in range(16)]
        async with grpc.aio.insecure_channel(stack.grpc) as channel:
            await asyncio.gather(*(stream(channel, each) for each in short))
        while sum(stack.first_finished.values()) < 2 * len(short):
            workers = stack.status().workers
            stack.first_finished = {worker.worker_id: worker.finished_sequences for worker in workers}
        yield stack


@pytest.fixture(scope="session")
def small_stack():
    """Its pools hold 640 tokens, fewer than the model could; its requests may be 12 MiB."""
    flags = ("--num-gpu-blocks-override", "40", "--grpc-max-message-bytes", "12MiB")
    with running_stack("--dtype", "float32", *flags) as stack:
        yield stack


@pytest.fixture(scope="session")
def narrow_stack(shallow_model):
    """Shallow, the default dtype, one worker of each role. Tests may kill these, and wait for them again."""
    with running_stack(*shallow_model, "--kv-cache-memory-bytes", "64MiB") as stack:
        yield stack


def crossdock(*words):
    """The command, run to its end."""
    argv = [sys.executable, "-m", "commands.main", *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def spec(prompt, *, sampling=None, **fields):
    """prompt: text or a list of token ids. sampling: fields of SamplingParams; greedy unless said."""
    given = {"text": prompt} if isinstance(prompt, str) else {"token_ids": inference_pb2.TokenIds(ids=prompt)}
    params = inference_pb2.SamplingParams(**({"temperature": 0.0} | (sampling or {})))
    return inference_pb2.GenerationSpec(sampling=params, **given, **fields)


@dataclass
class Answer:
    token_ids: list
    logprobs: list
    text: str
    finish: object
    usage: object
    prompt: object = None


async def stream(channel, generation_spec, timeout=60):
    """One streamed answer; checks the order of things that every stream keeps."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    call = stub.GenerateStream(inference_pb2.GenerateStreamRequest(spec=generation_spec), timeout=timeout)
    answer = Answer([], [], "", None, None)
    async for message in call:
        assert message.HasField("prompt_info") == (not answer.token_ids and answer.usage is None)
        if message.HasField("prompt_info"):
            answer.prompt = message.prompt_info
        for delta in message.deltas:
            assert delta.first_position == len(answer.token_ids), "each position once, without gap"
            answer.token_ids += delta.token_ids
            answer.logprobs += delta.logprobs.token_logprobs
            answer.text += delta.text
            if delta.HasField("finish"):
                answer.finish = delta.finish
        if message.HasField("usage"):
            answer.usage = message.usage
    assert answer.finish is not None and answer.usage is not None
    return answer


def tokens_of(seed, length):
    """A prompt of ordinary words that mean nothing together."""
    return random.Random(seed).choices(range(1000, 40000), k=length)


NEIGHBOUR = spec(
    tokens_of(11, 70),
    sampling={"max_tokens": 24, "temperature": 0.9, "top_p": 0.9, "seed": 11},
    stop=inference_pb2.StopConditions(ignore_eos=True),
    output=inference_pb2.OutputOptions(logprobs=2),
)


@asynccontextmanager
async def undisturbed(stack):
    """One stream after another goes on beside the block, which gets the list of their answers. Each must be,
    to the bit, the answer that the idle stack gave before."""
    over = asyncio.Event()
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        alone = await stream(channel, NEIGHBOUR)
        answers = [alone]

        async def go_on():
            while not over.is_set():
                answers.append(await stream(channel, NEIGHBOUR))

        neighbour = asyncio.create_task(go_on())
        try:
            yield answers
        finally:
            over.set()
            await neighbour
    assert len(answers) > 1
    for answer in answers:
        assert (answer.token_ids, answer.logprobs) == (alone.token_ids, alone.logprobs)
