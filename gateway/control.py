"""ControlService: what operators ask. Translates, delegates, translates; who may ask is `gateway.access`'s."""

import asyncio
from collections.abc import Callable, Iterator

from crossdock.v1 import control_pb2 as pb
from crossdock.v1.control_pb2_grpc import ControlServiceServicer
from crossdock.worker.v1 import worker_pb2
from gateway.admission import Admission
from gateway.calls import Context, refusals
from gateway.worker_pool import WorkerPool, WorkerRecord, WorkerState
from service.errors import FieldViolation, InvalidRequest

AUDIT_TIMEOUT_S = 5.0
_IN_FLIGHT = ("hold", "reservation")
_SWAPPED = "swapped"
_STATES = {
    WorkerState.CONNECTING: pb.WORKER_STATE_CONNECTING,
    WorkerState.READY: pb.WORKER_STATE_READY,
    WorkerState.DRAINING: pb.WORKER_STATE_DRAINING,
    WorkerState.REFUSED: pb.WORKER_STATE_REFUSED,
}


class ControlServicer(ControlServiceServicer):
    """owns: whether a request as workers name it is this gateway's; others may share the workers."""

    def __init__(
        self,
        prefills: WorkerPool,
        decodes: WorkerPool,
        admission: Admission,
        *,
        owns: Callable[[str], bool],
    ) -> None:
        self._pools = ((pb.WORKER_ROLE_PREFILL, prefills), (pb.WORKER_ROLE_DECODE, decodes))
        self._admission = admission
        self._owns = owns

    async def GetStatus(  # noqa: N802 (the name is gRPC's)
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        async with refusals(context):
            return self._status()
        raise AssertionError("a refusal ends the call")

    async def Audit(  # noqa: N802
        self, request: pb.AuditRequest, context: Context
    ) -> pb.AuditResponse:
        async with refusals(context):
            return await self._audit()
        raise AssertionError("a refusal ends the call")

    async def DrainWorker(  # noqa: N802
        self, request: pb.DrainWorkerRequest, context: Context
    ) -> pb.DrainWorkerResponse:
        async with refusals(context):
            self._drain(request.worker_id)
        return pb.DrainWorkerResponse()

    def _status(self) -> pb.GetStatusResponse:
        workers = [_status(role, worker) for role, worker in self._workers()]
        return pb.GetStatusResponse(workers=workers, live_requests=self._admission.live)

    async def _audit(self) -> pb.AuditResponse:
        before = self._admission.live
        ledgers = await asyncio.gather(*(_ledger(role, worker) for role, worker in self._workers()))
        owners = {each.request_id for ledger in ledgers for each in ledger.owners}
        elsewhere = sum(not self._owns(request_id) for request_id in owners)
        live = max(before, self._admission.live) + elsewhere  # what came meanwhile may own what was counted
        stranded = live == 0 and any(map(_in_use, ledgers))
        broken = any(each.violations or each.unreachable for each in ledgers)
        return pb.AuditResponse(ledgers=ledgers, live_requests=live, balanced=not (broken or stranded))

    def _drain(self, worker_id: str) -> None:
        named = [worker for _, worker in self._workers() if worker.worker_id == worker_id]
        if not named:
            unknown = FieldViolation(field="worker_id", description="no worker of that name is known")
            raise InvalidRequest(unknown)
        for worker in named:
            worker.drain()

    def _workers(self) -> Iterator[tuple[pb.WorkerRole, WorkerRecord]]:
        for role, pool in self._pools:
            for worker in pool:
                yield role, worker


def _status(role: pb.WorkerRole, worker: WorkerRecord) -> pb.WorkerStatus:
    load, welcome = worker.load, worker.welcome or worker_pb2.Welcome()
    return pb.WorkerStatus(
        worker_id=worker.worker_id,
        role=role,
        epoch=welcome.epoch,
        state=_STATES[worker.state],
        running_sequences=load.running_sequences,
        waiting_sequences=load.waiting_sequences,
        free_blocks=load.free_blocks,
        total_blocks=welcome.total_blocks,
        finished_sequences=load.finished_sequences,
        reason="frozen" if worker.frozen else worker.reason,
        borrowed_core_ms=load.borrowed_core_ms,
    )


def _in_use(ledger: pb.WorkerLedger) -> bool:
    """Whether blocks belong or are promised to anybody, or are locked away."""
    held = ledger.owned_blocks or ledger.promised_blocks or ledger.quarantined_blocks
    return bool(held or any(each.kind == _SWAPPED for each in ledger.owners))


async def _ledger(role: pb.WorkerRole, worker: WorkerRecord) -> pb.WorkerLedger:
    report = await worker.audit(AUDIT_TIMEOUT_S)
    if report is None:
        return pb.WorkerLedger(worker_id=worker.worker_id, role=role, unreachable=True)
    return pb.WorkerLedger(
        worker_id=worker.worker_id,
        role=role,
        total_blocks=report.total_blocks,
        free_blocks=report.free_blocks,
        cached_blocks=report.cached_blocks,
        owned_blocks=report.owned_blocks,
        quarantined_blocks=report.quarantined_blocks,
        promised_blocks=report.promised_blocks,
        owners=[
            pb.BlockOwner(kind=each.kind, request_id=each.request_id, blocks=each.blocks)
            for each in report.owners
        ],
        violations=report.violations,
        in_flight_blocks=sum(each.blocks for each in report.owners if each.kind in _IN_FLIGHT),
        tokens=pb.TokenCounts(
            computed=report.tokens.computed,
            delivered=report.tokens.delivered,
            live=report.tokens.live,
            wasted=[pb.WastedTokens(cause=each.cause, tokens=each.tokens) for each in report.tokens.wasted],
        ),
    )
