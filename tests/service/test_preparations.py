"""Submissions that need work before the step thread can take them, over real gRPC: what waits, and for whom."""

import asyncio
from dataclasses import replace

import pytest

from crossdock.worker.v1 import worker_pb2 as pb
from service import preparations
from service.load import WorkerLoad
from tests.fakes.rim_server import Gateway, serving_rim


@pytest.fixture
async def rim_server(tmp_path):
    async with serving_rim(tmp_path) as served:
        yield served
        served.finish.set()


async def calls_of(rim_server, count):
    return [(await rim_server.worker.calls.get())[::2] for _ in range(count)]


async def test_what_needs_preparation_holds_up_nobody_else_and_is_followed_by_what_was_said_of_it(rim_server):
    gateway = await Gateway(rim_server).attach()
    await gateway.submit("later")
    await gateway.say(cancel=pb.Cancel(request_id="later", attempt=1))
    await gateway.submit("b")
    assert await calls_of(rim_server, 1) == [("submit", "b")]
    rim_server.finish.set()
    assert await calls_of(rim_server, 2) == [("submit", "later"), ("cancel", "later")]


async def test_what_is_being_prepared_is_dropped_with_its_gateway(rim_server):
    gateway = await Gateway(rim_server).attach()
    await gateway.submit("later")
    assert await asyncio.to_thread(rim_server.working.wait, 10)
    gateway.call.cancel()
    assert await rim_server.worker.calls.get() == ("drop", "g/1")
    other = await Gateway(rim_server, gateway_id="other").attach()
    rim_server.finish.set()
    await other.submit("later than that")
    assert await rim_server.worker.calls.get() == ("submit", "other/1", "later than that")


@pytest.mark.parametrize(
    ("request_id", "cause"), [("later wrong", pb.END_CAUSE_INVALID), ("later mistake", pb.END_CAUSE_INTERNAL)]
)
async def test_what_cannot_be_prepared_is_refused_by_its_cause(rim_server, request_id, cause):
    gateway = await Gateway(rim_server).attach()
    await gateway.submit(request_id, attempt=3)
    rim_server.finish.set()
    refusal = await gateway.hear("ended")
    assert (refusal.request_id, refusal.attempt, refusal.cause) == (request_id, 3, cause)
    await gateway.submit("later")
    assert await calls_of(rim_server, 1) == [("submit", "later")]


async def test_more_than_can_be_prepared_is_refused_for_want_of_room(rim_server, monkeypatch):
    monkeypatch.setattr(preparations, "PREPARATIONS_MAX", 1)
    gateway = await Gateway(rim_server).attach()
    await gateway.submit("later")
    await gateway.submit("later on")
    refusal = await gateway.hear("ended")
    assert (refusal.request_id, refusal.cause) == ("later on", pb.END_CAUSE_EXHAUSTED)
    rim_server.finish.set()


async def test_a_drain_waits_for_what_is_being_prepared(rim_server):
    gateway = await Gateway(rim_server).attach()
    await gateway.submit("later")
    assert await asyncio.to_thread(rim_server.working.wait, 10)
    draining = asyncio.create_task(rim_server.rim.drain())
    await gateway.submit("new")
    assert (await gateway.hear("ended")).cause == pb.END_CAUSE_DRAINING
    assert not draining.done()
    rim_server.load = WorkerLoad(running_sequences=1)
    rim_server.finish.set()
    assert await calls_of(rim_server, 1) == [("submit", "later")]
    await gateway.say(audit=pb.AuditQuery(query_id=1))
    await gateway.hear("load")
    await gateway.hear("audit")
    assert not draining.done(), "the order is not finished"
    rim_server.rim.flush(WorkerLoad())
    await draining


async def test_a_drain_waits_for_what_is_on_its_way_to_the_step_thread(rim_server):
    gateway, posted = await Gateway(rim_server).attach(), []
    rim_server.host = replace(rim_server.host, post=posted.append)
    other = await Gateway(rim_server, gateway_id="other").attach()
    await other.submit("r")
    while not posted:
        await asyncio.sleep(0)
    draining = asyncio.create_task(rim_server.rim.drain())
    rim_server.rim.flush(WorkerLoad(step=1))  # of a step that had begun before
    await gateway.submit("new")
    assert (await gateway.hear("ended")).cause == pb.END_CAUSE_DRAINING
    assert not draining.done()
    posted.pop()()
    rim_server.rim.flush(WorkerLoad(step=2))
    await draining


async def test_a_gateway_that_goes_takes_with_it_what_has_not_begun(rim_server):
    gateway = await Gateway(rim_server).attach()
    await gateway.submit("later 1")
    assert await asyncio.to_thread(rim_server.working.wait, 10)
    await gateway.submit("later 2")
    await gateway.submit("b")
    assert await calls_of(rim_server, 1) == [("submit", "b")]
    gateway.call.cancel()
    assert await rim_server.worker.calls.get() == ("drop", "g/1")
    rim_server.finish.set()
    other = await Gateway(rim_server, gateway_id="other").attach()
    await other.submit("later 3")
    assert await calls_of(rim_server, 1) == [("submit", "later 3")]
    assert rim_server.worked == ["later 1", "later 3"]
