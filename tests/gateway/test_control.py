"""What operators hear."""

import asyncio
import time

import grpc
import pytest

from crossdock.v1 import control_pb2 as pb
from crossdock.worker.v1 import worker_pb2
from gateway.admission import Admission, Bounds
from gateway.attach import DECODE, PREFILL
from gateway.control import ControlServicer
from tests.fakes.scripted_workers import ScriptedWorker, make_pool


class Aborted(Exception):
    pass


class Context:
    """One call."""

    def trailing_metadata(self):
        return ()

    def set_trailing_metadata(self, told):
        pass

    async def abort(self, code, details, trailing_metadata=()):
        raise Aborted(code, details)


class Scene:
    """A gateway with prefill worker p and decode worker d."""

    def __init__(self, refusal=lambda welcome: None):
        prefills = make_pool(PREFILL, ("p",), refusal=refusal)
        decodes = make_pool(DECODE, ("d",), refusal=refusal)
        self.p, self.d = ScriptedWorker(*prefills, PREFILL), ScriptedWorker(*decodes, DECODE)
        self.admission = Admission(Bounds(requests=9), clock=time.monotonic)
        owns = lambda request_id: not request_id.startswith("other")  # noqa: E731
        self.control = ControlServicer(prefills, decodes, self.admission, owns=owns)

    async def audit(self, **reports):
        """An audit of the whole; each named worker answers with these counts."""
        asked = asyncio.create_task(self.control.Audit(pb.AuditRequest(), Context()))
        for name, fields in reports.items():
            await self.answer(name, **fields)
        return await asked

    async def answer(self, name, **fields):
        worker = getattr(self, name)
        query = await worker.hear("audit")
        worker.answer(worker_pb2.AuditReport(query_id=query.query_id, **fields))


async def test_the_status_shows_every_worker_and_what_it_is_said_to_do():
    scene = Scene(refusal=lambda welcome: "too blue" if welcome.worker_id == "blue" else None)
    scene.p.join("blue")
    scene.d.join("dora", epoch=99)
    scene.d.load(
        running_sequences=3, waiting_sequences=4, free_blocks=5, finished_sequences=6, borrowed_core_ms=7
    )
    with scene.admission.hold(""):
        answer = await scene.control.GetStatus(pb.GetStatusRequest(), Context())
    first, second = answer.workers
    assert answer.live_requests == 1
    assert (first.worker_id, first.role, first.state, first.reason) == (
        "blue",
        pb.WORKER_ROLE_PREFILL,
        pb.WORKER_STATE_REFUSED,
        "too blue",
    )
    assert (second.role, second.state, second.epoch) == (pb.WORKER_ROLE_DECODE, pb.WORKER_STATE_READY, 99)
    assert (second.running_sequences, second.waiting_sequences) == (3, 4)
    assert (second.free_blocks, second.total_blocks, second.finished_sequences) == (5, 100, 6)
    assert second.borrowed_core_ms == 7
    scene.d.record.drain()
    scene.p.leave()
    answer = await scene.control.GetStatus(pb.GetStatusRequest(), Context())
    assert [worker.state for worker in answer.workers] == [
        pb.WORKER_STATE_CONNECTING,
        pb.WORKER_STATE_DRAINING,
    ]


EMPTY = {"total_blocks": 100, "free_blocks": 100}
OWNER = worker_pb2.Owner(kind="hold", request_id="r", blocks=2)
SWAPPED = worker_pb2.Owner(kind="swapped", request_id="r", blocks=3)
OWNING = {"total_blocks": 100, "free_blocks": 98, "owned_blocks": 2, "owners": [OWNER]}


@pytest.mark.parametrize(
    ("report", "live", "balanced"),
    [
        (EMPTY, 0, True),
        (EMPTY, 1, True),
        (OWNING, 1, True),
        (OWNING, 0, False),
        ({"total_blocks": 100, "free_blocks": 99, "quarantined_blocks": 1}, 0, False),
        ({**EMPTY, "promised_blocks": 7}, 1, True),
        ({**EMPTY, "promised_blocks": 7}, 0, False),
        ({**EMPTY, "owners": [SWAPPED]}, 1, True),
        ({**EMPTY, "owners": [SWAPPED]}, 0, False),
        ({"total_blocks": 100, "free_blocks": 98, "cached_blocks": 2}, 0, True),
        ({**OWNING, "violations": ["block 3 is in 2 places"]}, 1, False),
    ],
)
async def test_the_books_balance_when_nothing_is_broken_and_an_idle_system_owns_nothing(
    report, live, balanced
):
    scene = Scene()
    scene.p.join()
    scene.d.join()
    if live:
        with scene.admission.hold(""):
            answer = await scene.audit(p=EMPTY, d=report)
    else:
        answer = await scene.audit(p=EMPTY, d=report)
    assert answer.balanced == balanced
    assert answer.live_requests == live
    ledger = answer.ledgers[1]
    assert (ledger.worker_id, ledger.role, ledger.unreachable) == ("d", pb.WORKER_ROLE_DECODE, False)
    assert (ledger.total_blocks, ledger.free_blocks) == (100, report["free_blocks"])
    for name in ("owned_blocks", "promised_blocks", "cached_blocks", "quarantined_blocks"):
        assert getattr(ledger, name) == report.get(name, 0)
    assert list(ledger.violations) == report.get("violations", [])
    assert [(each.kind, each.request_id, each.blocks) for each in ledger.owners] == [
        (each.kind, each.request_id, each.blocks) for each in report.get("owners", [])
    ]


async def test_a_request_that_came_while_the_workers_counted_explains_what_they_own():
    scene = Scene()
    scene.p.join()
    scene.d.join()
    asked = asyncio.create_task(scene.control.Audit(pb.AuditRequest(), Context()))
    await scene.answer("p", **EMPTY)
    with scene.admission.hold(""):
        await scene.answer("d", **OWNING)
        answer = await asked
    assert (answer.live_requests, answer.balanced) == (1, True)


async def test_what_another_gateway_owns_on_shared_workers_is_no_leak():
    scene = Scene()
    scene.p.join()
    scene.d.join()
    theirs = {**OWNING, "owners": [worker_pb2.Owner(kind="sequence", request_id="other-1", blocks=1)]}
    answer = await scene.audit(p=EMPTY, d=theirs)
    assert (answer.live_requests, answer.balanced) == (1, True)


async def test_a_worker_that_does_not_answer_is_unreachable_and_the_books_do_not_balance():
    scene = Scene()
    scene.d.join()
    answer = await scene.audit(d=EMPTY)
    assert [ledger.unreachable for ledger in answer.ledgers] == [True, False]
    assert not answer.balanced


async def test_a_worker_is_drained_by_the_name_it_gave_itself():
    scene = Scene()
    scene.p.join("paul")
    scene.d.join("dora")
    await scene.control.DrainWorker(pb.DrainWorkerRequest(worker_id="dora"), Context())
    assert (scene.p.kinds(), scene.d.kinds()) == ([], ["drain"])
    with pytest.raises(Aborted, match="worker_id") as refusal:
        await scene.control.DrainWorker(pb.DrainWorkerRequest(worker_id="d"), Context())
    assert refusal.value.args[0] is grpc.StatusCode.INVALID_ARGUMENT


CONTROL_CALLS = [
    ("GetStatus", pb.GetStatusRequest()),
    ("Audit", pb.AuditRequest()),
    ("DrainWorker", pb.DrainWorkerRequest(worker_id="d")),
]


@pytest.mark.parametrize(("method", "request_"), CONTROL_CALLS, ids=[name for name, _ in CONTROL_CALLS])
async def test_a_mistake_of_ours_is_internal_and_tells_nothing(method, request_):
    scene = Scene()
    scene.control._pools = ((pb.WORKER_ROLE_DECODE, [None]),)
    with pytest.raises(Aborted) as refusal:
        await getattr(scene.control, method)(request_, Context())
    code, details = refusal.value.args
    assert (code, details) == (grpc.StatusCode.INTERNAL, "internal error")
