"""vllm.grpc.engine.VllmEngine over the frontend, for routers that know vLLM's gRPC server.

Served where `smg-grpc-proto` is installed (`crossdock[smg]`), on the gateway's port: to a router all of this is one
engine. Translates and delegates as `servicer` does; the same limits, statuses and keys hold. Tells of no cache, no
worker and no path: what is not here is UNIMPLEMENTED.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import TypeAlias

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from gateway import prompt, vllm_messages, vllm_tokenizer
from gateway.access import Access
from gateway.admission import Held
from gateway.calls import Context, Trailer, no_trailer, refusals
from gateway.frontend import Frontend
from gateway.generation import Delta
from gateway.request import Request
from gateway.utilization import EngineLoad
from service.errors import FieldViolation, NotServed
from service.guard import authorization

SERVICE = "vllm.grpc.engine.VllmEngine"

_Name: TypeAlias = tuple[str, str]
"""(tenant, request id): a tenant aborts its own requests only."""


def register(
    server: grpc.aio.Server,
    frontend: Frontend,
    access: Access,
    trailer: Trailer,
    load: Callable[[], EngineLoad],
) -> None:
    servicer = VllmEngineServicer(frontend, access, trailer, load)
    for method in pb.DESCRIPTOR.services_by_name["VllmEngine"].methods_by_name:
        if method not in vars(VllmEngineServicer):
            setattr(servicer, method, _not_served)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """access: whose a call is. trailer: what to say at the end of each answer. load: how busy all of this is now."""

    def __init__(
        self,
        frontend: Frontend,
        access: Access,
        trailer: Trailer = no_trailer,
        load: Callable[[], EngineLoad] = EngineLoad,
    ) -> None:
        self._frontend = frontend
        self._access = access
        self._trailer = trailer
        self._load = load
        self._tokenizer: asyncio.Task[bytes] | None = None
        self._started = self._last_came = frontend.wall()
        self._running: dict[_Name, asyncio.Event] = {}

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        async with refusals(context, self._trailer) as call:
            self._last_came = self._frontend.wall()
            tenant = self._access.tenant(authorization(context))
            request_id = request.request_id or self._frontend.new_id()
            with (
                self._frontend.hold(tenant, request.ByteSize()) as held,
                self._abortable((tenant, request_id)) as aborted,
            ):
                accepted = await self._accept(request, request_id, held, context)
                answers = _Answers(accepted, streamed=request.stream)
                async with aclosing(self._frontend.generate(accepted)) as deltas:
                    async for delta in _until(aborted, deltas):
                        for part in answers.hear(delta):
                            await call.write(part)
                for part in answers.rest():
                    await call.write(part)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """What is not running is no mistake."""
        async with refusals(context):
            tenant = self._access.tenant(authorization(context))
            for request_id in request.request_ids:
                if (aborted := self._running.get((tenant, request_id))) is not None:
                    aborted.set()
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        async with refusals(context):
            ready = self._frontend.ready()
            return pb.HealthCheckResponse(
                healthy=ready, message="ready" if ready else "not ready for requests"
            )
        raise AssertionError("a refusal ends the call")

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """With a path that is there on every router and leads to no tokenizer: it then asks for ours. Without one it
        does without, and a model's name in its place it would look up at a hub."""
        async with refusals(context):
            card = self._frontend.card()
            return pb.GetModelInfoResponse(
                tokenizer_path=os.devnull,
                served_model_name=card.name,
                is_generation=True,
                max_context_length=card.tokens_max(),
                max_req_input_len=card.tokens_max() - 1,
                vocab_size=card.vocab_size,
                eos_token_ids=card.eos_token_ids,
            )
        raise AssertionError("a refusal ends the call")

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        async with refusals(context):
            return pb.GetServerInfoResponse(
                active_requests=len(self._running),
                last_receive_timestamp=self._last_came.timestamp(),
                uptime_seconds=(self._frontend.wall() - self._started).total_seconds(),
                server_type="vllm-grpc",
                data_parallel_size=1,
                max_num_seqs=self._load().seats,
            )
        raise AssertionError("a refusal ends the call")

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        async with refusals(context):
            now, load = self._frontend.wall().isoformat(), vllm_messages.scheduler_load(self._load())
            return pb.GetLoadsResponse(timestamp=now, dp_rank_count=1, loads=[load])
        raise AssertionError("a refusal ends the call")

    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: Context) -> None:
        """For a router that has none of its own. It is packed once."""
        async with refusals(context) as call:
            if self._tokenizer is None:
                packing = asyncio.to_thread(vllm_tokenizer.bundle, self._frontend.tokenizer)
                self._tokenizer = asyncio.create_task(packing)
            for part in vllm_tokenizer.chunks(await asyncio.shield(self._tokenizer)):
                await call.write(part)

    async def _accept(
        self, request: pb.GenerateRequest, request_id: str, held: Held, context: Context
    ) -> Request:
        """Large messages are copied on another thread, once it is known that they are not too large."""
        tokens_max, size = self._frontend.card().tokens_max(), request.ByteSize()
        prompt.refuse([*vllm_messages.violations(request), *vllm_messages.too_long(request, tokens_max)])
        spec = await self._frontend.reading.run(
            lambda: vllm_messages.spec_of(request, request_id), tenant=held.tenant, size_bytes=size
        )
        time_left_s = context.time_remaining()
        self._frontend.claim(held, (spec,), time_left_s, message_bytes=size + spec.ByteSize())
        accepted = await self._frontend.accept(spec, time_left_s, held=held, streamed=request.stream)
        self._frontend.settle(held, (accepted,))
        return accepted

    @contextmanager
    def _abortable(self, name: _Name) -> Iterator[asyncio.Event]:
        """While this runs, `Abort` finds it by its name; it begins before the request is looked at."""
        if name in self._running:
            prompt.refuse([FieldViolation(field="request_id", description="is that of a running request")])
        aborted = self._running[name] = asyncio.Event()
        try:
            yield aborted
        finally:
            del self._running[name]


async def _not_served(request: object, context: Context) -> None:
    async with refusals(context):
        raise NotServed("this method is not served")


class _Answers:
    """What is said of each choice, and when."""

    def __init__(self, request: Request, *, streamed: bool) -> None:
        self._request = request
        self._streamed = streamed
        self._heard: dict[int, list[Delta]] = {}
        self._open = set(range(request.n))

    def hear(self, delta: Delta) -> Iterator[pb.GenerateResponse]:
        first = delta.choice not in self._heard
        if self._streamed:
            yield vllm_messages.chunk(self._request, delta, first=first)
            self._heard[delta.choice] = [delta]
        else:
            self._heard.setdefault(delta.choice, []).append(delta)
        if delta.finish is not None:
            self._open.discard(delta.choice)
            yield vllm_messages.complete(self._request, self._heard[delta.choice])

    def rest(self) -> Iterator[pb.GenerateResponse]:
        """Of those that were aborted."""
        for choice in sorted(self._open):
            nothing = Delta("", (), 0, 0, None, choice)
            heard = [] if self._streamed else self._heard.get(choice, [])
            yield vllm_messages.complete(self._request, [*heard, nothing])


async def _until(aborted: asyncio.Event, deltas: AsyncGenerator[Delta, None]) -> AsyncIterator[Delta]:
    """What comes before that. Once it is aborted, nothing is begun."""
    ending = asyncio.ensure_future(aborted.wait())
    try:
        while not aborted.is_set():
            pulled = asyncio.ensure_future(anext(deltas))
            try:
                await asyncio.wait((pulled, ending), return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not pulled.done():
                    pulled.cancel()
                    with suppress(asyncio.CancelledError):
                        await pulled
            if pulled.cancelled() or (delta := await _next(pulled)) is None:
                return
            yield delta
    finally:
        ending.cancel()


async def _next(pulled: "asyncio.Future[Delta]") -> Delta | None:
    try:
        return await pulled
    except StopAsyncIteration:
        return None
