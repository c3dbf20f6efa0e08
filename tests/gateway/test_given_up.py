"""Answers that a decode worker gives back for want of blocks: they go on, and cost no attempt."""

from dataclasses import replace

import pytest

from gateway.orchestrator import ATTEMPTS_MAX
from service.errors import Unavailable
from service.orders import PREEMPTIONS_MAX, AttemptKey
from service.reports import EndCause
from tests.fakes.scripted_workers import Say
from tests.gateway.test_orchestrator import Reader, Scene, reach, reserved


def given_up(say, times):
    return replace(say.ended(EndCause.PREEMPTED), preemptions=times)


async def test_an_answer_that_is_given_up_goes_on_where_it_was_and_keeps_its_place():
    scene = Scene(1, 2)
    reader = await reach(scene, "decoding", priority=-3)
    say = Say(AttemptKey(request_id="ab-1", attempt=1))
    before = scene.d[0].told[0].reserve.sequence
    assert (before.preemptions, before.age_ms, before.priority) == (0, 0, -3)
    scene.clock.now += 1.5
    scene.d[1].load(running_sequences=7)  # much of the answer is cached where it was
    scene.d[0].say(given_up(say, 1))
    order = (await scene.d[0].hear("reserve")).sequence
    assert (order.attempt, order.preemptions, order.age_ms, order.priority) == (2, 1, 1500, -3)
    assert list(order.token_ids[-2:]) == [11, 12]
    await reader.leave()


async def test_being_given_up_costs_no_attempt_but_only_as_often_as_is_allowed():
    scene = Scene()
    reader = Reader(scene.run())
    for number in range(1, ATTEMPTS_MAX + PREEMPTIONS_MAX + 1):
        say = await reserved(scene.d[0])
        assert say.key.attempt == number
        await scene.p[0].hear("submit")
        scene.d[0].say(say.adopted, given_up(say, number))
        assert (await scene.p[0].hear("cancel")).attempt == number
    with pytest.raises(Unavailable) as refusal:
        await reader.done()
    assert refusal.value.reason == "ATTEMPTS_LOST"
    scene.assert_nothing_is_left()
