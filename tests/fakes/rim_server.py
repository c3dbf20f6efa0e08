"""A worker's rim behind a real gRPC server on a unix socket; the worker behind it only notes what it is told."""

import asyncio
import threading
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import grpc
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status

from crossdock.worker.v1 import worker_pb2 as pb
from crossdock.worker.v1.worker_pb2_grpc import (
    PrefillServiceServicer,
    PrefillServiceStub,
    add_PrefillServiceServicer_to_server,
)
from service.channel import open_channel
from service.load import WorkerLoad
from service.preparations import Later
from service.reports import EndCause
from service.server import create_server
from service.token_books import TokenBooks
from service.worker_rim import PROTOCOL_VERSION, Host, WorkerRim


class Full(Exception):
    """The step thread takes nothing more."""


class NotedWorker:
    """Notes its calls; `calls` is a queue, in order."""

    def __init__(self):
        self.calls = asyncio.Queue()

    def cancel(self, gateway, key):
        self.calls.put_nowait(("cancel", gateway, key.request_id, key.attempt))

    def drop(self, gateway):
        self.calls.put_nowait(("drop", gateway))

    def tokens(self):
        return TokenBooks().counts(live=0)

    def ledger(self):
        owner = SimpleNamespace(kind="hold", request_id="r")
        owners = [SimpleNamespace(owner=owner, blocks=3)]
        counts = {"total": 10, "free": 5, "cached": 1, "owned": 3, "quarantined": 1, "promised": 2}
        return SimpleNamespace(**counts, owners=owners, violations=["block 1 is nowhere"])

    def load(self, step):
        return WorkerLoad(step=step, free_blocks=5, total_blocks=10)


class RimServer:
    """submission: what the servicer would make of a submit; it is posted like everything else. load: what the worker
    tells after each action, None for the same as before. worked: what has been prepared, or begun to be."""

    def __init__(self):
        self.worker = NotedWorker()
        self.rim = WorkerRim(pb.PrefillServiceAttachResponse, asyncio.get_running_loop())
        self.worked = []
        self.full, self.load = False, None
        self.working, self.finish = threading.Event(), threading.Event()
        self.host = Host(
            worker=self.worker,
            welcome=pb.Welcome(protocol_version=PROTOCOL_VERSION, worker_id="w"),
            post=self._post,
            insist=lambda action: action(),
            refusals={Full: EndCause.EXHAUSTED, KeyError: EndCause.INVALID},
        )

    def submission(self, gateway, request):
        request_id = request.submit.sequence.request_id
        if request_id == "wrong":
            raise KeyError("a rule")
        if request_id == "mistake":
            raise ZeroDivisionError
        action = partial(self.worker.calls.put_nowait, ("submit", gateway, request_id))
        return Later(partial(self._work, request_id, action)) if request_id.startswith("later") else action

    def _work(self, request_id, action):
        """On another thread; waits until the test lets it go on."""
        self.worked.append(request_id)
        self.working.set()
        assert self.finish.wait(30)
        if request_id == "later wrong":
            raise KeyError("a rule")
        if request_id == "later mistake":
            raise ZeroDivisionError
        return action

    def _post(self, action):
        if self.full:
            raise Full("no room")
        action()
        self.rim.flush(self.load or self.rim.load)


class _Servicer(PrefillServiceServicer):
    def __init__(self, served):
        self._served = served

    async def Attach(self, request_iterator, context):
        served = self._served
        await served.rim.attach(request_iterator, context, served.host, served.submission)


@asynccontextmanager
async def listening(address, servicer):
    server = create_server()
    add_PrefillServiceServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


@asynccontextmanager
async def serving_rim(folder):
    """A RimServer and a way to dial it."""
    served, address = RimServer(), f"unix:{folder}/rim.sock"
    async with listening(address, _Servicer(served)), open_channel(address) as channel:
        served.address, served.channel = address, channel
        yield served


class Gateway:
    """One stream to a rim, by hand."""

    def __init__(self, served, **hello):
        self.call = PrefillServiceStub(served.channel).Attach()
        self._hello = {
            "protocol_version": PROTOCOL_VERSION,
            "gateway_id": "g",
            "gateway_epoch": 1,
            **hello,
        }

    async def attach(self):
        await self.say(hello=pb.Hello(**self._hello))
        assert (await self.hear("welcome")).worker_id == "w"
        await self.hear("load")
        self.snapshot = await self.hear("cache")
        return self

    async def say(self, **message):
        await self.call.write(pb.PrefillServiceAttachRequest(**message))

    async def submit(self, request_id, attempt=1):
        sequence = pb.SequenceSpec(request_id=request_id, attempt=attempt)
        await self.say(submit=pb.SubmitPrompt(sequence=sequence))

    async def hear(self, kind):
        message = await self.call.read()
        assert message is not grpc.aio.EOF, "the stream has ended"
        assert message.WhichOneof("message") == kind, message
        return getattr(message, kind)

    async def end(self):
        """What is still said, and the code that the stream ends with; a refusal has our details."""
        rest = []
        while True:
            try:
                message = await self.call.read()
            except grpc.aio.AioRpcError as error:
                assert any(each.Is(ErrorInfo.DESCRIPTOR) for each in rpc_status.from_call(error).details)
                return rest, error.code()
            if message is grpc.aio.EOF:
                return rest, await self.call.code()
            rest.append(message.WhichOneof("message"))
