"""Workers that take no more now: another one is asked, and an answer that has begun goes on."""

import asyncio

import pytest

from gateway.orchestrator import ATTEMPTS_MAX
from service.errors import Exhausted
from service.orders import AttemptKey
from service.reports import EndCause
from tests.fakes.scripted_workers import Say
from tests.gateway.test_orchestrator import ANSWER, Reader, Scene, reach, reserved, served


async def refuse(worker):
    """The next attempt at this worker is not taken up. Returns it."""
    order = (await worker.hear("reserve")).sequence
    say = Say(AttemptKey(request_id=order.request_id, attempt=order.attempt))
    worker.say(say.ended(EndCause.EXHAUSTED, "512 requests are queued"))
    assert (await worker.hear("cancel")).attempt == order.attempt
    return order


async def asked(workers):
    """The one of them that is asked first."""
    while True:
        for worker in workers:
            if "reserve" in worker.kinds():
                return worker
        await asyncio.sleep(0)


async def test_a_request_that_one_worker_does_not_take_goes_to_another():
    scene = Scene(1, 2)
    reader = Reader(scene.run())
    await refuse(scene.d[0])
    await served(scene, 0, 1)
    await reader.done()
    assert reader.tokens == list(enumerate(ANSWER))
    scene.assert_nothing_is_left()


@pytest.mark.parametrize("workers", [1, 2, ATTEMPTS_MAX + 2])
async def test_a_request_that_no_worker_takes_is_refused_when_each_was_asked_once(workers):
    scene = Scene(1, workers)
    reader = Reader(scene.run())
    left = list(scene.d)
    while left:
        worker = await asked(left)
        left.remove(worker)
        await refuse(worker)
    with pytest.raises(Exhausted) as refusal:
        await reader.done()
    assert refusal.value.retry_after_ms > 0 and "512" not in refusal.value.message
    assert [each.kinds() for each in scene.d] == [["reserve", "cancel"]] * workers
    scene.assert_nothing_is_left()


async def test_an_answer_that_was_lost_goes_on_at_the_worker_that_has_room():
    scene = Scene(1, 3)
    reader = await reach(scene, "decoding")
    scene.d[0].leave()
    first = await asked(scene.d[1:])
    assert list((await refuse(first)).token_ids) == [5, 6, 7, *ANSWER[:2]]
    await served(scene, 0, 3 - scene.d.index(first), emitted=2)
    await reader.done()
    assert reader.tokens == list(enumerate(ANSWER))
    scene.assert_nothing_is_left()


async def test_an_answer_that_was_lost_waits_for_room_where_all_are_full():
    scene = Scene(1, 2)
    reader = await reach(scene, "decoding")
    scene.d[0].leave()
    await refuse(scene.d[1])
    await asyncio.sleep(0)
    assert scene.d[1].kinds() == ["reserve", "cancel"]
    scene.orchestrator.workers_changed()
    await served(scene, 0, 1, emitted=2)
    await reader.done()
    assert reader.tokens == list(enumerate(ANSWER))
    scene.assert_nothing_is_left()


async def test_an_answer_that_was_lost_does_not_wait_for_room_for_ever():
    scene = Scene(1, 2)
    reader = await reach(scene, "decoding")
    scene.d[0].leave()
    for _ in range(ATTEMPTS_MAX - 1):
        await refuse(scene.d[1])
        scene.orchestrator.workers_changed()
    with pytest.raises(Exhausted):
        await reader.done()
    scene.assert_nothing_is_left()


async def test_a_worker_that_was_full_is_asked_again_when_the_one_that_took_the_request_is_lost():
    scene = Scene(1, 2)
    reader = Reader(scene.run())
    await refuse(scene.d[0])
    await reserved(scene.d[1])
    scene.d[1].leave()
    await served(scene, 0, 0)
    await reader.done()
    assert reader.tokens == list(enumerate(ANSWER))


async def test_a_worker_that_is_full_is_no_broken_one():
    scene = Scene(1, 1)
    reader = Reader(scene.run())
    await refuse(scene.d[0])
    with pytest.raises(Exhausted):
        await reader.done()
    assert scene.orchestrator._breakers.avoided(scene.clock.now) == frozenset()
