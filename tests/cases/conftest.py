"""Two prefill and two decode workers and a gateway, each a process of its own; KV blocks travel through proxies.

Pools are small. A prefill worker has fewer blocks than a decode worker, and a decode worker takes shorter sequences.
"""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from contextlib import contextmanager

import grpc
import pytest

from crossdock.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.e2e.conftest import CONTROL_TOKEN, OPERATOR, ROOT, said_when_ready, spec, stream, tokens_of
from tests.e2e.listening import listeners
from tests.fakes.shallow_model import LAYERS
from tests.fakes.tcp_proxy import TcpProxy

SOURCE_BLOCKS, TARGET_BLOCKS, BLOCK = 72, 128, 16
TOKENS_MAX = 1100
"""Of one sequence, at a decode worker."""
LOOKS_MAX = 20_000
TOKEN_BYTES = LAYERS * 2 * 3 * 64 * 2
"""Keys and values of 3 heads of 64 in each layer, in bfloat16."""
BREATH_S = 0.005
"""Between two looks at what comes to stay, so that looking does not hold it up."""
SOURCES, TARGETS = ("p0", "p1"), ("d0", "d1")
NO_EOS = inference_pb2.StopConditions(ignore_eos=True)
WITH_LOGPROBS = inference_pb2.OutputOptions(logprobs=1)


def wish(words, length, max_tokens, *, stop=NO_EOS, request_id="", **sampling):
    """A request for max_tokens after `length` words; words: which ones. Greedy unless said."""
    return spec(
        tokens_of(words, length),
        sampling={"max_tokens": max_tokens} | sampling,
        stop=stop,
        output=WITH_LOGPROBS,
        request_id=request_id,
    )


def cold(request):
    """The same request, and nothing of it is cached anywhere."""
    return _salted(request, secrets.token_hex(8))


def _salted(request, salt):
    copy = inference_pb2.GenerationSpec()
    copy.CopyFrom(request)
    copy.cache_salt = salt
    return copy


def same(answer, golden):
    """To the bit."""
    return (answer.token_ids, answer.logprobs) == (golden.token_ids, golden.logprobs)


class Rig:
    """links: the proxy before each decode worker, by name. first_status: of the workers, before anything was done."""

    def __init__(self, model):
        self.model = model
        self.links = {name: TcpProxy() for name in TARGETS}
        self.processes = {}
        self.addresses = {}
        self.ticket_key = secrets.token_bytes(32)
        self.channel = self.first_status = None
        self._golden = {}

    def start(self, name, verb, *flags):
        environ = os.environ | {"CROSSDOCK_TICKET_KEY": self.ticket_key.hex()}
        argv = [sys.executable, "-m", "commands.main", verb, *flags]
        self.processes[name] = subprocess.Popen(
            argv, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True
        )

    def start_worker(self, name):
        flags = (*self.model, "--worker-id", name, "--listen", "127.0.0.1:0")
        if name in SOURCES:
            self.start(name, "prefill-worker", *flags, f"--num-gpu-blocks-override={SOURCE_BLOCKS}")
            return
        advertised = "tcp://{}:{}".format(*self.links[name].address)
        kv = ("--kv-listen=tcp://127.0.0.1:0", f"--kv-advertise={advertised}", "--no-kv-shared-memory")
        size = (f"--num-gpu-blocks-override={TARGET_BLOCKS}", f"--max-model-len={TOKENS_MAX}")
        self.start(name, "decode-worker", *flags, *kv, *size)

    def start_gateway(self, name):
        """Its address, once it serves with all workers."""
        at = {role: ",".join(self.addresses[each] for each in role) for role in (SOURCES, TARGETS)}
        workers = (f"--prefill-workers={at[SOURCES]}", f"--decode-workers={at[TARGETS]}")
        self.start(
            name, "gateway", *workers, "--grpc-port=0", "--http-port=0", f"--control-token={CONTROL_TOKEN}"
        )
        return self.ready(name)

    def ready(self, name):
        """Wait for a process to serve; its address."""
        said = said_when_ready(self.processes[name])
        self.addresses[name] = said["grpc"]
        return said["grpc"]

    def kv_address(self, name):
        """Where a decode worker really takes blocks."""
        found = listeners([self.processes[name].pid])
        return next(each.address for each in found if each.speaks() == "zmq")

    def pids(self):
        """Of what runs."""
        return {name: each.pid for name, each in self.processes.items() if each.poll() is None}

    def end(self, name):
        process = self.processes.pop(name)
        process.kill()
        process.wait()
        process.stdout.close()

    @contextmanager
    def frozen(self, name):
        """SIGSTOP for the length of a `with`."""
        self.processes[name].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.processes[name].send_signal(signal.SIGCONT)

    def slow(self, tokens_per_s):
        """Keys and values of no more tokens get to each decode worker."""
        for link in self.links.values():
            link.forth.bytes_per_s = tokens_per_s * TOKEN_BYTES

    def clear_up(self):
        for link in self.links.values():
            link.clear_up()

    async def golden(self, request):
        """The idle stack's answer. It does not depend on what is cached."""
        request = _salted(request, "")
        key = request.SerializeToString(deterministic=True)
        if key not in self._golden:
            self._golden[key] = await stream(self.channel, request)
        return self._golden[key]

    async def require_exact(self, *requests):
        """All at once; each must be answered as the idle stack answers it."""
        golden = [await self.golden(request) for request in requests]
        answers = await asyncio.gather(*(stream(self.channel, request) for request in requests))
        for answer, right in zip(answers, golden, strict=True):
            assert same(answer, right)

    def call(self, request):
        """A stream that the test reads, and may cancel."""
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        return stub.GenerateStream(inference_pb2.GenerateStreamRequest(spec=request), timeout=60)

    async def books(self):
        """What the audit says, by worker."""
        stub = control_pb2_grpc.ControlServiceStub(self.channel)
        return await stub.Audit(control_pb2.AuditRequest(), timeout=15, metadata=OPERATOR)

    async def status(self):
        stub = control_pb2_grpc.ControlServiceStub(self.channel)
        answer = await stub.GetStatus(control_pb2.GetStatusRequest(), timeout=15, metadata=OPERATOR)
        return {worker.worker_id: worker for worker in answer.workers}

    async def until(self, holds):
        """The ledgers by worker, once they are as wished."""
        for _ in range(LOOKS_MAX):
            books = await self.books()
            ledgers = {ledger.worker_id: ledger for ledger in books.ledgers}
            if holds(ledgers):
                return ledgers
        raise AssertionError(f"never seen: {books}")

    async def until_idle(self):
        """Nothing lives, nothing is owned or promised, and the books balance."""
        for _ in range(LOOKS_MAX):
            books = await self.books()
            used = (
                ledger.owned_blocks + ledger.promised_blocks + ledger.quarantined_blocks
                for ledger in books.ledgers
            )
            if books.live_requests == 0 and not any(used):
                assert books.balanced, books
                return {ledger.worker_id: ledger for ledger in books.ledgers}
            await asyncio.sleep(BREATH_S)
        raise AssertionError(f"still owned: {books}")

    async def until_ready(self, *names):
        for _ in range(LOOKS_MAX):
            workers = await self.status()
            if all(workers[name].state == control_pb2.WORKER_STATE_READY for name in names):
                return
            await asyncio.sleep(BREATH_S)
        raise AssertionError(f"not ready: {workers}")

    def close(self):
        for name in list(self.processes):
            self.end(name)
        for link in self.links.values():
            link.close()


@pytest.fixture(scope="session")
async def shared_rig(shallow_model):
    rig = Rig(shallow_model)
    try:
        for name in (*SOURCES, *TARGETS):
            rig.start_worker(name)
        for name in (*SOURCES, *TARGETS):
            rig.ready(name)
        for name, link in rig.links.items():
            link.target = rig.kv_address(name)
        async with grpc.aio.insecure_channel(rig.start_gateway("gateway")) as channel:
            rig.channel = channel
            await rig.until_ready(*SOURCES, *TARGETS)
            rig.first_status = await rig.status()
            yield rig
    finally:
        rig.close()


@pytest.fixture
async def rig(shared_rig):
    """Idle before and after, with the same processes, in fair weather."""
    pids = shared_rig.pids()
    yield shared_rig
    shared_rig.clear_up()
    await shared_rig.until_idle()
    assert shared_rig.pids() == pids


def held(ledgers, kind):
    """Blocks that owners of a kind have, by worker, where there are any."""
    blocks = {
        name: sum(owner.blocks for owner in ledger.owners if owner.kind == kind)
        for name, ledger in ledgers.items()
    }
    return {name: count for name, count in blocks.items() if count}


def computed(ledgers, *names):
    """Tokens since the start of the processes."""
    return sum(ledgers[name].tokens.computed for name in names)


def wasted(ledgers, *names):
    """Of these tokens, those that were of no use."""
    return sum(each.tokens for name in names for each in ledgers[name].tokens.wasted)
