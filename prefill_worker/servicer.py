"""PrefillService: translates, delegates, translates. Lives on the event loop; the work is on the step thread."""

from collections.abc import AsyncIterator
from functools import partial

import grpc

from crossdock.worker.v1 import worker_pb2 as pb
from crossdock.worker.v1.worker_pb2_grpc import PrefillServiceServicer
from kvtransfer.desk import TicketDesk
from prefill_worker.worker import HandOff, PrefillWorker
from service.guide_compiler import GuideCompiler
from service.orders import OrderLimits, from_spec
from service.preparations import Action, Later, guided
from service.worker_rim import Host, WorkerRim

Request = pb.PrefillServiceAttachRequest
Response = pb.PrefillServiceAttachResponse


class PrefillServicer(PrefillServiceServicer):
    """limits: what this worker can do for one sequence. desk: reads the tickets meant for this worker. guides: compiles
    those of orders; None where there are none."""

    def __init__(
        self,
        rim: WorkerRim,
        host: Host,
        worker: PrefillWorker,
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
        await self._rim.attach(request_iterator, context, self._host, self._submission)

    def _submission(self, gateway: str, request: Request) -> Action | Later:
        submit = request.submit
        order = from_spec(submit.sequence, self._limits)
        if not submit.ticket:
            return guided(partial(self._worker.submit, gateway, order, None), order, self._guides)
        ticket = self._desk.read(
            submit.ticket,
            request_id=order.key.request_id,
            attempt=order.key.attempt,
            num_tokens=len(order.token_ids),
        )
        endpoints = tuple(submit.target_endpoints)
        hand_off = HandOff(ticket=ticket, sealed=submit.ticket, endpoints=endpoints)
        return guided(partial(self._worker.submit, gateway, order, hand_off), order, self._guides)
