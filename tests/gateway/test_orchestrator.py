"""The whole way of a request over workers that say what the test wants."""

import asyncio
import itertools
from contextlib import aclosing

import pytest

from gateway.admission import Admission, Bounds
from gateway.attach import DECODE, PREFILL
from gateway.orchestrator import ATTEMPTS_MAX, Orchestrator
from gateway.request import EndReason
from kvtransfer.ticket import open_sealed
from service.errors import DeadlineExpired, Exhausted, InternalFault, Unavailable
from service.orders import AttemptKey
from service.reports import EndCause, TokenEnd
from tests.fakes.places import answered
from tests.fakes.scripted_workers import TICKET_KEY, Say, ScriptedWorker, make_pool, make_request

ANSWER = (11, 12, 13, 14)


class Clock:
    def __init__(self):
        self.now, self.step = 100.0, 0.0

    def __call__(self):
        self.now += self.step
        return self.now


class Scene:
    """A gateway's orchestrator over so many workers of each role, all ready: p0, p1, ... and d0, d1, ..."""

    def __init__(self, prefills=1, decodes=1, requests_max=8, window=None, **bounds):
        self.clock, serial = Clock(), itertools.count(1)
        pools = [
            make_pool(dialect, [f"{name}{number}" for number in range(count)], on_change=self._changed)
            for dialect, name, count in ((PREFILL, "p", prefills), (DECODE, "d", decodes))
        ]
        bounds = Bounds(requests=requests_max, **bounds)
        self.admission = Admission(bounds, clock=lambda: self.clock.now, window=lambda: window)
        self.orchestrator = Orchestrator(
            prefills=pools[0],
            decodes=pools[1],
            admission=self.admission,
            ticket_key=TICKET_KEY,
            gateway_epoch=0xAB,
            randomness=lambda count: next(serial).to_bytes(count, "big"),
            clock=self.clock,
        )
        self.p = [ScriptedWorker(record, PREFILL) for record in pools[0]]
        self.d = [ScriptedWorker(record, DECODE) for record in pools[1]]
        for worker in (*self.p, *self.d):
            worker.join()

    def _changed(self):
        self.orchestrator.workers_changed()

    def run(self, **request):
        return self.answer(make_request(**{"max_tokens": len(ANSWER), **request}))

    def answer(self, request, unread=frozenset()):
        return answered(self.admission, self.orchestrator, request, unread)

    def assert_nothing_is_left(self):
        assert self.admission.live == 0
        assert all(worker.is_free() for worker in (*self.p, *self.d))


class Reader:
    """A client of one answer."""

    def __init__(self, batches):
        self.tokens, self.end = [], None
        self._batches, self._more = batches, asyncio.Event()
        self._task = asyncio.create_task(self._read())

    async def _read(self):
        async with aclosing(self._batches) as batches:
            async for batch in batches:
                assert self.end is None, "nothing comes after the end"
                self.tokens += [(token.position, token.token_id) for token in batch.tokens]
                self.end = batch.end
                self._more.set()

    async def saw(self, count):
        while len(self.tokens) < count:
            self._more.clear()
            await self._more.wait()

    async def done(self):
        await self._task

    async def leave(self):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def reserved(worker):
    """The next attempt at a decode worker; it gets its blocks."""
    order = (await worker.hear("reserve")).sequence
    say = Say(AttemptKey(request_id=order.request_id, attempt=order.attempt))
    worker.say(say.reserved)
    return say


async def served(scene, p, d, emitted=0):
    """Both workers serve one attempt to its end."""
    say = await reserved(scene.d[d])
    await scene.p[p].hear("submit")
    scene.p[p].say(say.token(emitted, ANSWER[emitted]))
    scene.d[d].say(say.adopted)
    for position in range(emitted + 1, len(ANSWER)):
        end = TokenEnd.LENGTH if position == len(ANSWER) - 1 else None
        scene.d[d].say(say.token(position, ANSWER[position], end))
    return say


async def test_an_answer_goes_the_whole_way():
    scene = Scene()
    reader = Reader(scene.run())
    say = await served(scene, 0, 0)
    await reader.done()
    assert reader.tokens == list(enumerate(ANSWER)) and reader.end is EndReason.LENGTH
    assert say.key == AttemptKey(request_id="ab-1", attempt=1)
    scene.assert_nothing_is_left()
    assert (scene.p[0].kinds(), scene.d[0].kinds()) == (["submit"], ["reserve"])


async def test_the_ticket_names_both_ends_and_the_run_of_tokens():
    scene = Scene()
    reader = Reader(scene.run(prompt=tuple(range(9))))
    reserve = await scene.d[0].hear("reserve")
    ticket = open_sealed(reserve.ticket, TICKET_KEY)
    ends = (ticket.source_id, ticket.source_epoch, ticket.target_id, ticket.target_epoch)
    assert ends == ("p0", 7, "d0", 7)
    assert (ticket.request_id, ticket.attempt) == (reserve.sequence.request_id, 1)
    assert (ticket.num_tokens, ticket.first_block, ticket.num_blocks) == (9, 0, 3)
    await reader.leave()


async def test_each_request_has_its_own_name_whatever_the_client_calls_it():
    scene = Scene()
    readers = [Reader(scene.run()) for _ in range(3)]
    names = [(await scene.d[0].hear("reserve")).sequence.request_id for _ in readers]
    assert len(set(names)) == 3
    for reader in readers:
        await reader.leave()
    scene.assert_nothing_is_left()


async def test_over_the_limit_a_request_is_refused_and_an_ended_one_makes_room():
    scene = Scene(requests_max=1)
    reader = Reader(scene.run())
    await scene.d[0].hear("reserve")
    with pytest.raises(Exhausted):
        await anext(scene.run())
    await reader.leave()
    await scene.d[0].hear("cancel")
    reader = Reader(scene.run())
    await served(scene, 0, 0)
    await reader.done()


async def reach(scene, phase, **request):
    """A reader whose only attempt is in this phase."""
    reader = Reader(scene.run(**request))
    say = Say(AttemptKey(request_id="ab-1", attempt=1))
    await scene.d[0].hear("reserve")
    if phase == "reserving":
        return reader
    scene.d[0].say(say.reserved)
    await scene.p[0].hear("submit")
    if phase in ("handing over", "decoding"):
        scene.p[0].say(say.token(0, 11))
    if phase in ("adopted", "decoding"):
        scene.d[0].say(say.adopted)
    if phase == "decoding":
        scene.d[0].say(say.token(1, 12))
    await reader.saw(SHOWN[phase])
    return reader


SHOWN = {"reserving": 0, "computing": 0, "handing over": 1, "adopted": 0, "decoding": 2}


@pytest.mark.parametrize(("phase", "lost"), list(itertools.product(SHOWN, "pd")))
async def test_a_lost_worker_costs_another_attempt_from_where_the_journal_stands(phase, lost):
    scene = Scene(2, 2)
    reader = await reach(scene, phase)
    (scene.p if lost == "p" else scene.d)[0].leave()
    if (phase, lost) == ("decoding", "p"):
        say = Say(AttemptKey(request_id="ab-1", attempt=1))
        scene.d[0].say(say.token(2, 13), say.token(3, 14, TokenEnd.LENGTH))
    else:
        shown = SHOWN[phase]
        say = await served(scene, 1, 1, emitted=shown)  # neither of them was picked before
        assert say.key.attempt == 2
        assert list(scene.p[1].told[0].submit.sequence.token_ids) == [5, 6, 7, *ANSWER[:shown]]
    await reader.done()
    assert reader.tokens == list(enumerate(ANSWER))
    scene.assert_nothing_is_left()


@pytest.mark.parametrize("phase", SHOWN)
async def test_a_client_that_leaves_stops_the_work_on_both_workers(phase):
    scene = Scene()
    reader = await reach(scene, phase)
    await reader.leave()
    assert scene.d[0].kinds() == ["reserve", "cancel"]
    assert ("cancel" in scene.p[0].kinds()) == (phase in ("computing", "handing over", "adopted"))
    scene.assert_nothing_is_left()


async def test_closing_between_two_batches_stops_the_work():
    scene = Scene()
    batches = scene.run()
    first = asyncio.create_task(anext(batches))
    say = await reserved(scene.d[0])
    scene.p[0].say(say.token(0, 11))
    assert len((await first).tokens) == 1
    await batches.aclose()
    assert (scene.p[0].kinds(), scene.d[0].kinds()) == (["submit", "cancel"], ["reserve", "cancel"])
    scene.assert_nothing_is_left()


async def test_what_a_lost_attempt_sent_ahead_of_its_turn_is_void():
    scene = Scene(2, 2)
    reader = await reach(scene, "adopted")
    scene.d[0].say(Say(AttemptKey(request_id="ab-1", attempt=1)).token(1, 99))
    scene.p[0].leave()
    await served(scene, 1, 1)
    await reader.done()
    assert reader.tokens == list(enumerate(ANSWER))


async def test_an_answer_that_is_lost_again_and_again_is_given_up():
    scene = Scene()
    reader = Reader(scene.run())
    for number in range(1, ATTEMPTS_MAX + 1):
        order = (await scene.d[0].hear("reserve")).sequence
        assert order.attempt == number
        say = Say(AttemptKey(request_id=order.request_id, attempt=number))
        scene.d[0].say(say.ended(EndCause.TRANSFER_FAILED))
        assert (await scene.d[0].hear("cancel")).attempt == number
    with pytest.raises(Unavailable) as refusal:
        await reader.done()
    assert refusal.value.reason == "ATTEMPTS_LOST" and refusal.value.retry_after_ms is None
    scene.assert_nothing_is_left()


async def test_a_draining_worker_costs_one_attempt_not_all():
    scene = Scene(1, 2)
    reader = Reader(scene.run())
    say = Say(AttemptKey(request_id="ab-1", attempt=1))
    await scene.d[0].hear("reserve")
    scene.d[1].load(running_sequences=7)  # the draining one would be picked again and again
    scene.d[0].say(say.ended(EndCause.DRAINING))
    await served(scene, 0, 1)
    await reader.done()
    assert scene.d[0].kinds() == ["reserve", "cancel"]


async def test_what_was_entered_before_a_failure_is_shown_before_it_is_raised():
    scene = Scene()
    batches = scene.run()
    first = asyncio.create_task(anext(batches))
    say = await reserved(scene.d[0])
    await scene.p[0].hear("submit")
    scene.p[0].say(say.token(0, 11))
    scene.d[0].say(say.adopted, say.token(1, 12), say.token(1, 99))
    assert [token.token_id for token in (await first).tokens] == [11, 12]
    with pytest.raises(InternalFault):
        await anext(batches)
    scene.assert_nothing_is_left()


async def lost_without_another(scene, step_s=0.0, **request):
    """A reader that has seen two tokens when its only decode worker is lost, and looks for a route. step_s: how far
    the clock then moves each time it is read."""
    reader = await reach(scene, "decoding", **request)
    scene.clock.step = step_s
    scene.d[0].leave()
    await scene.d[0].hear("cancel")
    return reader


async def test_a_resumed_answer_waits_for_workers_to_come_back():
    scene = Scene()
    reader = await lost_without_another(scene)
    scene.d[0].join(epoch=8)
    assert (await served(scene, 0, 0, emitted=2)).key.attempt == 2
    await reader.done()
    assert reader.tokens == list(enumerate(ANSWER))


async def test_a_resumed_answer_does_not_wait_for_ever():
    scene = Scene()
    reader = await lost_without_another(scene, step_s=1000.0)
    with pytest.raises(Unavailable) as refusal:
        await reader.done()
    assert refusal.value.reason == "NO_DECODE_WORKER"
    assert [token for _, token in reader.tokens] == [11, 12]
    scene.assert_nothing_is_left()


async def test_the_deadline_holds_while_a_route_is_looked_for():
    scene = Scene()
    reader = await lost_without_another(scene, step_s=4.0, deadline=scene.clock.now + 5)
    with pytest.raises(DeadlineExpired):
        await reader.done()
    scene.assert_nothing_is_left()


@pytest.mark.parametrize("phase", SHOWN)
async def test_a_deadline_that_passes_stops_the_work_on_both_workers(phase):
    scene = Scene()
    reader = await reach(scene, phase, deadline=scene.clock.now + 0.05)
    with pytest.raises(DeadlineExpired):
        await reader.done()
    assert scene.d[0].kinds() == ["reserve", "cancel"]
    assert ("cancel" in scene.p[0].kinds()) == (phase in ("computing", "handing over", "adopted"))
    scene.assert_nothing_is_left()
