"""The public gRPC face: each method translates, delegates to the frontend, and translates back.

Protobuf messages stop here. It decides nothing: limits are validation's, statuses are service.status's. A
client that goes away, or whose deadline passes, closes the generator and with it the work on both workers.
"""

from contextlib import AbstractContextManager, aclosing

from google.protobuf.message import Message

from crossdock.v1 import inference_pb2, inference_pb2_grpc
from gateway import messages
from gateway.access import Access
from gateway.admission import Held
from gateway.calls import Call, Context, Trailer, no_trailer, refusals
from gateway.frontend import Frontend
from gateway.request import Request
from service.guard import authorization

REQUEST_ID_KEY = "x-request-id"


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """crossdock.v1.InferenceService over one frontend. access: whose a call is. trailer: what to say at the end of each
    call."""

    def __init__(self, frontend: Frontend, access: Access, trailer: Trailer = no_trailer) -> None:
        self._frontend = frontend
        self._access = access
        self._trailer = trailer

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        async with refusals(context, self._trailer):
            with self._hold(request, context) as held:
                accepted = await self._accept(held, request.spec, context, streamed=False)
                whole = messages.Whole(accepted)
                async with aclosing(self._frontend.generate(accepted)) as deltas:
                    async for delta in deltas:
                        whole.add(delta)
                await _send_id(accepted, context)
                return whole.message()
        raise AssertionError("a refusal ends the call")

    async def GenerateStream(self, request: inference_pb2.GenerateStreamRequest, context: Context) -> None:
        """Writes rather than yields: a write that is cancelled then closes the generator at once."""
        async with refusals(context, self._trailer) as call:
            with self._hold(request, context) as held:
                accepted = await self._accept(held, request.spec, context, streamed=True)
                await self._stream(accepted, context, call)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        async with refusals(context, self._trailer):
            with self._hold(request, context) as held:
                token_ids = await self._frontend.tokenize(request, held=held)
                length = self._frontend.card().tokens_max()
                return inference_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=length)
        raise AssertionError("a refusal ends the call")

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        async with refusals(context, self._trailer):
            with self._hold(request, context) as held:
                text = await self._frontend.detokenize(request, held=held)
                return inference_pb2.DetokenizeResponse(text=text)
        raise AssertionError("a refusal ends the call")

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        async with refusals(context, self._trailer):
            return inference_pb2.ListModelsResponse(models=[messages.model(self._frontend.card())])
        raise AssertionError("a refusal ends the call")

    def _hold(self, request: Message, context: Context) -> AbstractContextManager[Held]:
        return self._frontend.hold(self._access.tenant(authorization(context)), request.ByteSize())

    async def _accept(
        self, held: Held, spec: inference_pb2.GenerationSpec, context: Context, *, streamed: bool
    ) -> Request:
        time_left_s = context.time_remaining()
        self._frontend.claim(held, (spec,), time_left_s)
        accepted = await self._frontend.accept(spec, time_left_s, held=held, streamed=streamed)
        self._frontend.settle(held, (accepted,))
        context.set_trailing_metadata(((REQUEST_ID_KEY, accepted.id),))  # a later refusal carries it too
        return accepted

    async def _stream(self, accepted: Request, context: Context, call: Call) -> None:
        total, first = messages.Total(accepted), True
        async with aclosing(self._frontend.generate(accepted)) as deltas:
            async for delta in deltas:
                total.add(delta)
                if first:
                    await _send_id(accepted, context)
                part = messages.part(accepted, delta, first=first, usage=total.usage())
                await call.write(part)
                first = False


async def _send_id(accepted: Request, context: Context) -> None:
    """Not before there is something to say: once headers are sent, gRPC does not retry the call elsewhere."""
    await context.send_initial_metadata(((REQUEST_ID_KEY, accepted.id),))
