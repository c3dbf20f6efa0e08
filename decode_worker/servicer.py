"""DecodeService: translates, delegates, translates. Lives on the event loop; the work is on the step thread."""

from collections.abc import AsyncIterator
from functools import partial

import grpc

from crossdock.worker.v1 import worker_pb2 as pb
from crossdock.worker.v1.worker_pb2_grpc import DecodeServiceServicer
from decode_worker.worker import DecodeWorker
from kvtransfer.desk import TicketDesk
from service.guide_compiler import GuideCompiler
from service.orders import AttemptKey, OrderLimits, from_spec
from service.preparations import Action, Later, guided
from service.worker_rim import Host, WorkerRim

Request = pb.DecodeServiceAttachRequest
Response = pb.DecodeServiceAttachResponse


class DecodeServicer(DecodeServiceServicer):
    """limits: what this worker can do for one sequence. desk: reads the tickets meant for this worker. guides: compiles
    those of orders; None where there are none."""

    def __init__(
        self,
        rim: WorkerRim,
        host: Host,
        worker: DecodeWorker,
        limits: OrderLimits,
        desk: TicketDesk,
        guides: GuideCompiler | None = None,
    ) -> None:
        self._rim = rim
        self._host = host
        self._worker = worker
        self._limits = limits
        self._desk = desk
        self._guides = guides

    async def Attach(  # noqa: N802 (the name is gRPC's)
        self, request_iterator: AsyncIterator[Request], context: grpc.aio.ServicerContext[Request, Response]
    ) -> None:
        await self._rim.attach(request_iterator, context, self._host, self._action)

    def _action(self, gateway: str, request: Request) -> Action | Later:
        if request.WhichOneof("message") == "end_choice":
            ended = request.end_choice
            key = AttemptKey(request_id=ended.request_id, attempt=ended.attempt)
            return partial(self._worker.end_choice, gateway, key, ended.choice)
        order = from_spec(request.reserve.sequence, self._limits)
        if not request.reserve.ticket:
            return guided(partial(self._worker.reserve, gateway, order, None), order, self._guides)
        ticket = self._desk.read(
            request.reserve.ticket,
            request_id=order.key.request_id,
            attempt=order.key.attempt,
            num_tokens=len(order.token_ids),
        )
        return guided(partial(self._worker.reserve, gateway, order, ticket), order, self._guides)
