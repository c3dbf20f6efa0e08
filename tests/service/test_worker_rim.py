"""A worker's streams to its gateways, over real gRPC: who may attach, what ends a session, who is told what."""

import asyncio

import grpc
import pytest
from structlog.testing import capture_logs

from crossdock.worker.v1 import worker_pb2 as pb
from engine.cache.prefix_index import PrefixChanges
from service import worker_rim
from service.cache_feed import WAITING_MESSAGES_MAX
from service.load import WorkerLoad
from service.orders import REQUEST_ID_BYTES_MAX, AttemptKey
from service.reports import EndCause, EndedReport, HandedOverReport, TokenReport
from service.worker_rim import PROTOCOL_VERSION, WorkerRim
from tests.fakes.rim_server import Gateway, serving_rim

HELLO = {"protocol_version": PROTOCOL_VERSION, "gateway_id": "g", "gateway_epoch": 1}


@pytest.fixture
async def rim_server(tmp_path):
    async with serving_rim(tmp_path) as served:
        yield served


def token(number):
    key = AttemptKey(request_id=f"r{number}", attempt=1)
    return TokenReport(key=key, position=0, token_id=number, logprob=None, top=(), end=None)


def ended(detail=""):
    return EndedReport(key=AttemptKey(request_id="r", attempt=1), cause=EndCause.INTERNAL, detail=detail)


@pytest.mark.parametrize(
    ("first", "code"),
    [
        ({"cancel": pb.Cancel(request_id="r")}, grpc.StatusCode.INVALID_ARGUMENT),
        ({}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"hello": pb.Hello(**{**HELLO, "protocol_version": 0})}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"hello": pb.Hello(**{**HELLO, "protocol_version": 1})}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"hello": pb.Hello(**{**HELLO, "gateway_id": ""})}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"hello": pb.Hello(**{**HELLO, "gateway_id": "g" * 129})}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_one_that_does_not_introduce_itself_well_is_not_let_in(rim_server, first, code):
    gateway = Gateway(rim_server)
    await gateway.say(**first)
    assert await gateway.end() == ([], code)
    assert rim_server.worker.calls.empty()


async def test_one_that_says_nothing_at_all_is_not_let_in(rim_server):
    gateway = Gateway(rim_server)
    await gateway.call.done_writing()
    assert await gateway.end() == ([], grpc.StatusCode.INVALID_ARGUMENT)


@pytest.mark.parametrize("attached", [False, True])
async def test_garbage_ends_its_own_stream_and_nobody_elses(rim_server, attached):
    other = await Gateway(rim_server, gateway_id="other").attach()
    raw = rim_server.channel.stream_stream("/crossdock.worker.v1.PrefillService/Attach")()
    if attached:
        hello = pb.PrefillServiceAttachRequest(hello=pb.Hello(**HELLO))
        await raw.write(hello.SerializeToString())
        await raw.read()
    await raw.write(b"\xff\xff\xff\xff garbage")
    with pytest.raises(grpc.aio.AioRpcError):
        while await raw.read() is not grpc.aio.EOF:
            pass
    if attached:
        assert await rim_server.worker.calls.get() == ("drop", "g/1")
    await other.say(cancel=pb.Cancel(request_id="r", attempt=2))
    assert await rim_server.worker.calls.get() == ("cancel", "other/1", "r", 2)


async def test_what_is_submitted_and_cancelled_reaches_the_worker_in_order_with_the_gateways_name(rim_server):
    gateway = await Gateway(rim_server, gateway_epoch=5).attach()
    await gateway.submit("a")
    await gateway.say(cancel=pb.Cancel(request_id="a", attempt=3))
    await gateway.submit("b")
    calls = [await rim_server.worker.calls.get() for _ in range(3)]
    assert calls == [("submit", "g/5", "a"), ("cancel", "g/5", "a", 3), ("submit", "g/5", "b")]


async def test_what_the_servicer_refuses_is_refused_by_its_cause_and_costs_nobody_the_stream(rim_server):
    gateway = await Gateway(rim_server).attach()
    await gateway.submit("wrong", attempt=4)
    refusal = await gateway.hear("ended")
    assert (refusal.request_id, refusal.attempt, refusal.cause) == ("wrong", 4, pb.END_CAUSE_INVALID)
    assert "a rule" in refusal.detail
    rim_server.full = True
    await gateway.submit("right")
    assert (await gateway.hear("ended")).cause == pb.END_CAUSE_EXHAUSTED
    rim_server.full = False
    await gateway.submit("right")
    assert await rim_server.worker.calls.get() == ("submit", "g/1", "right")


async def test_a_draining_worker_refuses_what_is_new_and_cancels_what_is_old(rim_server):
    gateway = await Gateway(rim_server).attach()
    await gateway.say(drain=pb.Drain())
    await gateway.submit("new")
    assert (await gateway.hear("ended")).cause == pb.END_CAUSE_DRAINING
    await gateway.say(cancel=pb.Cancel(request_id="old", attempt=1))
    assert await rim_server.worker.calls.get() == ("cancel", "g/1", "old", 1)
    other = Gateway(rim_server, gateway_id="other")
    await other.say(hello=pb.Hello(**{**HELLO, "gateway_id": "other"}))
    await other.hear("welcome")
    assert (await other.hear("load")).draining


@pytest.mark.parametrize(
    "way", ["cancels", "says that it is done", "names what cannot be", "sends what breaks us"]
)
async def test_whatever_ends_a_session_drops_all_that_the_gateway_had_here(rim_server, way):
    gateway = await Gateway(rim_server).attach()
    other = await Gateway(rim_server, gateway_id="other").attach()
    with capture_logs() as logs:
        if way == "cancels":
            gateway.call.cancel()
        elif way == "says that it is done":
            await gateway.call.done_writing()
            assert await gateway.end() == ([], grpc.StatusCode.OK)
        elif way == "names what cannot be":
            await gateway.say(cancel=pb.Cancel(request_id="r" * (REQUEST_ID_BYTES_MAX + 1)))
            assert await gateway.end() == ([], grpc.StatusCode.INVALID_ARGUMENT)
        else:
            await gateway.submit("mistake")
            assert await gateway.end() == ([], grpc.StatusCode.INTERNAL)
        assert await rim_server.worker.calls.get() == ("drop", "g/1")
    assert bool(logs) == (way in ("names what cannot be", "sends what breaks us"))
    await other.submit("fine")
    assert await rim_server.worker.calls.get() == ("submit", "other/1", "fine")


async def test_a_cancel_that_finds_no_room_ends_the_session_rather_than_getting_lost(rim_server):
    gateway = await Gateway(rim_server).attach()
    rim_server.full = True
    await gateway.say(cancel=pb.Cancel(request_id="r", attempt=1))
    assert (await gateway.end())[1] is grpc.StatusCode.INTERNAL
    assert await rim_server.worker.calls.get() == ("drop", "g/1")


async def test_a_gateway_that_attaches_again_has_given_up_what_it_asked_for_before(rim_server):
    before = await Gateway(rim_server).attach()
    await before.submit("old")
    again = await Gateway(rim_server).attach()
    assert await before.end() == ([], grpc.StatusCode.OK)
    await again.submit("new")
    calls = [await rim_server.worker.calls.get() for _ in range(3)]
    assert calls == [("submit", "g/1", "old"), ("drop", "g/1"), ("submit", "g/1", "new")]
    rim_server.rim.tell("g/1", ended())
    rim_server.rim.flush(WorkerLoad())
    await again.hear("ended")


async def test_another_start_of_a_gateway_is_another_gateway(rim_server):
    sessions = [await Gateway(rim_server, gateway_epoch=epoch).attach() for epoch in (1, 2)]
    await sessions[0].submit("r")
    assert await rim_server.worker.calls.get() == ("submit", "g/1", "r")


@pytest.mark.parametrize("round_", range(20))
async def test_a_gateway_that_vanishes_while_it_is_told_something_is_dropped_too(rim_server, round_):
    """gRPC then cancels more than once, also while we clean up."""
    gateway = await Gateway(rim_server).attach()
    for _ in range(round_):
        rim_server.rim.tell("g/1", ended("x" * 10_000))
        rim_server.rim.flush(WorkerLoad())
    gateway.call.cancel()
    for _ in range(round_):
        await asyncio.sleep(0)
    for _ in range(2 * worker_rim.OUTBOX_MESSAGES_MAX * (round_ % 2)):
        rim_server.rim.tell("g/1", ended())
    rim_server.rim.flush(WorkerLoad())
    assert await rim_server.worker.calls.get() == ("drop", "g/1")
    assert rim_server.worker.calls.empty()


async def test_an_idle_stream_outlives_honest_pings(rim_server):
    """The library's default answers them with GOAWAY, which ends every stream of the connection."""
    options = (("grpc.keepalive_time_ms", 1_100), ("grpc.http2.max_pings_without_data", 0))
    async with grpc.aio.insecure_channel(rim_server.address, options) as channel:
        rim_server.channel = channel
        idle = await Gateway(rim_server).attach()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(idle.call.read(), 5.0)
        assert rim_server.worker.calls.empty()


async def test_one_flush_is_one_message_with_all_tokens_for_each_gateway(rim_server):
    first = await Gateway(rim_server, gateway_id="a").attach()
    second = await Gateway(rim_server, gateway_id="b").attach()
    for number in range(6):
        rim_server.rim.tell("ab"[number % 2] + "/1", token(number))
    rim_server.rim.tell("a/1", HandedOverReport(key=token(0).key))
    rim_server.rim.tell("nobody/1", token(9))
    await asyncio.to_thread(rim_server.rim.flush, WorkerLoad(step=17))
    outputs = await first.hear("outputs")
    assert outputs.step == 17
    assert list(outputs.token_ids) == [0, 2, 4]
    assert (await first.hear("handed_over")).request_id == "r0"
    assert list((await second.hear("outputs")).token_ids) == [1, 3, 5]
    rim_server.rim.tell("b/1", token(7))
    await asyncio.to_thread(rim_server.rim.flush, WorkerLoad(step=18))
    assert list((await second.hear("outputs")).token_ids) == [7]


async def test_every_gateway_is_told_what_is_cached_first_all_of_it_and_then_each_change(rim_server):
    a, b, c, d = (letter * 16 for letter in (b"a", b"b", b"c", b"d"))
    rim_server.rim.flush(WorkerLoad(), PrefixChanges(added=(a,), removed=()))
    first = await Gateway(rim_server, gateway_id="first").attach()
    assert first.snapshot == pb.CacheEvents(sequence=1, snapshot=True, added=a)
    await asyncio.to_thread(rim_server.rim.flush, WorkerLoad(), PrefixChanges(added=(b, c), removed=(a,)))
    assert await first.hear("cache") == pb.CacheEvents(sequence=2, added=b + c, removed=a)
    second = await Gateway(rim_server, gateway_id="second").attach()
    assert second.snapshot.snapshot and set(hashes_of(second.snapshot.added)) == {b, c}
    rim_server.rim.tell("first/1", token(1))
    rim_server.rim.flush(WorkerLoad(), PrefixChanges(added=(d,), removed=()))
    assert await first.hear("cache") == pb.CacheEvents(sequence=3, added=d)
    await first.hear("outputs")  # whoever hears of a result knows what it left behind
    assert await second.hear("cache") == pb.CacheEvents(sequence=2, added=d)
    first.call.cancel()
    assert await rim_server.worker.calls.get() == ("drop", "first/1")
    again = await Gateway(rim_server, gateway_id="first").attach()
    assert again.snapshot.snapshot and set(hashes_of(again.snapshot.added)) == {b, c, d}


async def test_a_gateway_that_missed_something_gets_all_of_it_with_the_next_look_at_the_load(rim_server):
    rim = rim_server.rim
    gateway = await Gateway(rim_server).attach()
    hashes = [bytes([number]) * 16 for number in range(WAITING_MESSAGES_MAX + 1)]
    for each in hashes:  # nothing is written before the loop gets a turn
        rim.flush(WorkerLoad(), PrefixChanges(added=(each,), removed=()))
    told = [await gateway.hear("cache") for _ in hashes[:-1]]
    assert [each.sequence for each in told] == list(range(2, 2 + len(told)))
    reporting = asyncio.create_task(rim.report_load())
    try:
        snapshot = await gateway.hear("cache")
    finally:
        reporting.cancel()
    assert (snapshot.snapshot, set(hashes_of(snapshot.added))) == (True, set(hashes))
    assert snapshot.sequence > told[-1].sequence + 1, "the gap shows"


async def test_for_a_gateway_that_is_gone_no_message_is_made(rim_server):
    made = []

    def response(**message):
        made.append(message)
        return pb.PrefillServiceAttachResponse(**message)

    rim_server.rim = WorkerRim(response, asyncio.get_running_loop())
    gateway = await Gateway(rim_server).attach()
    gateway.call.cancel()
    assert await rim_server.worker.calls.get() == ("drop", "g/1")
    made.clear()
    rim_server.rim.flush(WorkerLoad(step=3), PrefixChanges(added=(bytes(16),), removed=()))
    while rim_server.rim.load.step != 3:
        await asyncio.sleep(0)
    assert made == []


def hashes_of(octets):
    return [octets[start : start + 16] for start in range(0, len(octets), 16)]


async def test_a_gateway_that_does_not_read_is_cut_off_and_dropped(rim_server):
    other = await Gateway(rim_server, gateway_id="other").attach()
    deaf = await Gateway(rim_server).attach()
    while rim_server.worker.calls.empty():
        rim_server.rim.tell("g/1", ended("x" * 20_000))
        rim_server.rim.flush(WorkerLoad())
        await asyncio.sleep(0)
    rim_server.rim.tell("other/1", ended())
    rim_server.rim.flush(WorkerLoad())
    assert deaf.call.done() is False, "it has not noticed anything itself"
    assert await rim_server.worker.calls.get() == ("drop", "g/1")
    await other.hear("ended")


async def test_an_audit_recounts_the_ledger_and_sends_the_load_of_the_same_moment(rim_server):
    gateway = await Gateway(rim_server).attach()
    await gateway.say(audit=pb.AuditQuery(query_id=42))
    assert (await gateway.hear("load")).free_blocks == 5
    report = await gateway.hear("audit")
    assert report.query_id == 42
    counts = (report.total_blocks, report.free_blocks, report.cached_blocks, report.owned_blocks)
    assert (*counts, report.quarantined_blocks, report.promised_blocks) == (10, 5, 1, 3, 1, 2)
    assert [(each.kind, each.request_id, each.blocks) for each in report.owners] == [("hold", "r", 3)]
    assert list(report.violations) == ["block 1 is nowhere"]


async def test_the_load_is_sent_when_it_has_changed(rim_server):
    gateway = await Gateway(rim_server).attach()
    reporter = asyncio.create_task(rim_server.rim.report_load())
    try:
        assert (await gateway.hear("load")).running_sequences == 0
        rim_server.rim.flush(WorkerLoad(running_sequences=3))
        assert (await gateway.hear("load")).running_sequences == 3
        rim_server.rim.draining = True
        assert (await gateway.hear("load")).draining
        rim_server.rim.frozen = True
        while not (await gateway.hear("load")).frozen:
            pass
    finally:
        reporter.cancel()


async def test_whoever_hears_of_a_result_knows_how_much_is_left_to_do(rim_server):
    """Or the next request would be kept away from a worker that has just become free, and from what is cached there."""
    rim, hears, other = rim_server.rim, Gateway(rim_server), Gateway(rim_server, gateway_id="other")
    await hears.attach()
    await other.attach()
    rim.flush(WorkerLoad(running_sequences=1, waiting_tokens=200))
    rim.tell("g/1", token(1))
    rim.flush(WorkerLoad(step=1, running_sequences=1))
    assert (await hears.hear("load")).waiting_tokens == 0
    await hears.hear("outputs")
    rim.tell("g/1", token(2))
    rim.tell("other/1", token(3))
    rim.flush(WorkerLoad(step=2, running_sequences=1))
    assert (await hears.hear("outputs")).step == 2, "nothing has changed"
    assert (await other.hear("outputs")).step == 2


async def test_a_drain_waits_for_what_runs_and_sends_the_last_word_before_it_ends_the_streams(rim_server):
    gateway = await Gateway(rim_server).attach()
    rim_server.rim.flush(WorkerLoad(running_sequences=1))
    await gateway.say(audit=pb.AuditQuery())
    await gateway.hear("load")
    await gateway.hear("audit")
    draining = asyncio.create_task(rim_server.rim.drain())
    rim_server.rim.tell("g/1", token(1))
    rim_server.rim.flush(WorkerLoad(waiting_sequences=1))
    await gateway.hear("load")
    await gateway.hear("outputs")
    assert not draining.done()
    rim_server.rim.tell("g/1", token(2))
    rim_server.rim.flush(WorkerLoad())
    await draining
    assert await gateway.end() == (["load", "outputs"], grpc.StatusCode.OK)
    late = Gateway(rim_server)
    await late.say(hello=pb.Hello(**HELLO))
    assert await late.end() == ([], grpc.StatusCode.UNAVAILABLE)


async def test_gateways_are_bounded(rim_server, monkeypatch):
    monkeypatch.setattr(worker_rim, "SESSIONS_MAX", 2)
    sessions = [await Gateway(rim_server, gateway_id=name).attach() for name in "ab"]
    late = Gateway(rim_server)
    await late.say(hello=pb.Hello(**HELLO))
    assert await late.end() == ([], grpc.StatusCode.RESOURCE_EXHAUSTED)
    sessions[0].call.cancel()
    assert await rim_server.worker.calls.get() == ("drop", "a/1")
    await Gateway(rim_server).attach()
