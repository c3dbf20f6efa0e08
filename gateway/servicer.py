"""The public gRPC face: each method translates, delegates to the frontend, and translates back.

Protobuf messages stop here. It decides nothing: limits are validation's, statuses are service.status's. A
client that goes away, or whose deadline passes, closes the generator and with it the work on both workers.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol

import grpc
import structlog

from crossdock.v1 import inference_pb2, inference_pb2_grpc
from gateway import messages, patience
from gateway.access import Access
from gateway.frontend import Frontend
from gateway.request import Request
from service.errors import Exhausted, InternalFault, ServiceError, Unavailable
from service.guard import authorization
from service.status import abort

REQUEST_ID_KEY = "x-request-id"

Context = grpc.aio.ServicerContext[Any, Any]

_log = structlog.stdlib.get_logger(__name__)


class Trailer(Protocol):
    """Trailing metadata of a call that ends now. failed: through a fault of ours."""

    def __call__(self, *, failed: bool) -> tuple[tuple[str, bytes], ...]: ...


def _no_trailer(*, failed: bool) -> tuple[tuple[str, bytes], ...]:
    return ()


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """crossdock.v1.InferenceService over one frontend. access: whose a call is. trailer: what to say at the end of each
    call."""

    def __init__(self, frontend: Frontend, access: Access, trailer: Trailer = _no_trailer) -> None:
        self._frontend = frontend
        self._access = access
        self._trailer = trailer

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        async with self._refusals(context):
            accepted = await self._accept(request.spec, context, streamed=False)
            async with aclosing(self._frontend.generate(accepted)) as deltas:
                whole = messages.whole(accepted, [delta async for delta in deltas])
            await _send_id(accepted, context)
            return whole
        raise AssertionError("a refusal ends the call")

    async def GenerateStream(self, request: inference_pb2.GenerateStreamRequest, context: Context) -> None:
        """Writes rather than yields: a write that is cancelled then closes the generator at once."""
        async with self._refusals(context):
            accepted = await self._accept(request.spec, context, streamed=True)
            total = messages.Total(accepted)
            async with aclosing(self._frontend.generate(accepted)) as deltas:
                first = True
                async for delta in deltas:
                    total.add(delta)
                    if first:
                        await _send_id(accepted, context)
                    part = messages.part(accepted, delta, first=first, usage=total.usage())
                    await _write(context, part)
                    first = False

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        async with self._refusals(context):
            token_ids = await self._frontend.tokenize(request)
            length = self._frontend.card().tokens_max()
            return inference_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=length)
        raise AssertionError("a refusal ends the call")

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        async with self._refusals(context):
            return inference_pb2.DetokenizeResponse(text=self._frontend.detokenize(request))
        raise AssertionError("a refusal ends the call")

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        async with self._refusals(context):
            return inference_pb2.ListModelsResponse(models=[messages.model(self._frontend.card())])
        raise AssertionError("a refusal ends the call")

    async def _accept(
        self, spec: inference_pb2.GenerationSpec, context: Context, *, streamed: bool
    ) -> Request:
        tenant = self._access.tenant(authorization(context))
        accepted = await self._frontend.accept(
            spec, context.time_remaining(), tenant=tenant, streamed=streamed
        )
        context.set_trailing_metadata(((REQUEST_ID_KEY, accepted.id),))  # a later refusal carries it too
        return accepted

    @asynccontextmanager
    async def _refusals(self, context: Context) -> AsyncIterator[None]:
        """Ends the call with the status of what is raised inside. A cancellation that is not the caller's would
        leave the client waiting, and is a fault like any other."""
        refusal: ServiceError | None = None
        try:
            yield
        except ServiceError as error:
            refusal = error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            refusal = _fault()
        except Exception:
            refusal = _fault()
        trailer = self._trailer(failed=isinstance(refusal, InternalFault | Unavailable))
        context.set_trailing_metadata((*(context.trailing_metadata() or ()), *trailer))
        if refusal is not None:
            await abort(context, refusal)


async def _write(context: Context, part: inference_pb2.GenerateStreamResponse) -> None:
    """Raises Exhausted for a client that does not read."""
    try:
        async with asyncio.timeout(patience.STALL_S):
            await context.write(part)
    except TimeoutError:
        text = f"nothing of the answer was read for {patience.STALL_S:g} seconds"
        raise Exhausted(text, reason="CLIENT_STALLED") from None


async def _send_id(accepted: Request, context: Context) -> None:
    """Not before there is something to say: once headers are sent, gRPC does not retry the call elsewhere."""
    await context.send_initial_metadata(((REQUEST_ID_KEY, accepted.id),))


def _fault() -> InternalFault:
    _log.exception("a call failed")
    return InternalFault("internal error")
