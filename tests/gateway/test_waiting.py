"""Requests for which no worker is there, or none that moves: how long they wait, and for what."""

import asyncio

import pytest

from service.errors import DeadlineExpired, Unavailable
from tests.gateway.test_orchestrator import ANSWER, Reader, Scene, served


async def all_that_can_has_gone_on():
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("prefills", "decodes", "request_", "reason"),
    [
        (0, 0, {}, "NO_DECODE_WORKER"),
        (1, 0, {}, "NO_DECODE_WORKER"),
        (0, 0, {"max_tokens": 1}, "NO_PREFILL_WORKER"),
    ],
)
async def test_while_nobody_is_there_a_new_request_does_not_wait_for_ever(
    prefills, decodes, request_, reason
):
    scene = Scene(prefills, decodes)
    scene.clock.step = 1000.0
    with pytest.raises(Unavailable) as refusal:
        await anext(scene.run(**request_))
    assert refusal.value.reason == reason
    assert refusal.value.retry_after_ms > 0
    scene.assert_nothing_is_left()


async def test_what_nobody_who_is_there_could_hold_is_refused_at_once():
    scene = Scene()
    async with asyncio.timeout(5):  # seconds, where one that may wait would wait for ten
        with pytest.raises(Unavailable) as refusal:
            await anext(scene.run(max_tokens=398))
    assert refusal.value.reason == "NO_DECODE_WORKER"
    scene.assert_nothing_is_left()


@pytest.mark.parametrize("lost", [False, True], ids=["stopped", "lost"])
async def test_a_new_request_waits_for_workers_that_are_away_as_one_that_runs_does(lost):
    """One that had stopped may be given up meanwhile; that changes nothing."""
    scene = Scene()
    if lost:
        scene.d[0].leave()
    else:
        scene.d[0].load(frozen=True)
    reader = Reader(scene.run())
    await all_that_can_has_gone_on()
    if not lost:
        scene.d[0].leave()
        await all_that_can_has_gone_on()
    scene.d[0].join(epoch=8)
    assert (await served(scene, 0, 0)).key.attempt == 1
    await reader.done()
    assert reader.tokens == list(enumerate(ANSWER))


async def test_a_new_request_waits_no_longer_than_its_deadline_for_workers_that_are_away():
    scene = Scene()
    scene.d[0].leave()
    with pytest.raises(DeadlineExpired):
        await anext(scene.run(deadline=scene.clock.now + 0.05))
    scene.assert_nothing_is_left()


async def test_no_attempt_is_spent_on_workers_that_stand_still_and_one_that_moves_again_serves():
    scene = Scene()
    scene.d[0].load(frozen=True)
    reader = Reader(scene.run())
    await all_that_can_has_gone_on()
    scene.d[0].load(frozen=True, free_blocks=1)
    assert scene.d[0].kinds() == scene.p[0].kinds() == []
    scene.d[0].load(frozen=False, free_blocks=100)
    assert (await served(scene, 0, 0)).key.attempt == 1
    await reader.done()
    assert reader.tokens == list(enumerate(ANSWER))


async def test_a_request_does_not_wait_for_ever_for_workers_that_stand_still():
    scene = Scene()
    scene.d[0].load(frozen=True)
    scene.clock.step = 1000.0
    with pytest.raises(Unavailable) as refusal:
        await anext(scene.run())
    assert refusal.value.reason == "NO_DECODE_WORKER"
    assert scene.d[0].kinds() == []
    scene.assert_nothing_is_left()
