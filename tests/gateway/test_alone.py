"""Requests that a decode worker serves by itself: because nobody else is there, or because it is the least trouble."""

import pytest

from gateway.breakers import FIRST_S
from service.orders import AttemptKey
from service.reports import EndCause, TokenEnd
from tests.fakes.scripted_workers import Say
from tests.gateway.test_orchestrator import ANSWER, Reader, Scene, reserved, served


async def asked_alone(worker):
    """The next attempt at a decode worker, which comes without a ticket."""
    reserve = await worker.hear("reserve")
    assert reserve.ticket == b""
    return Say(AttemptKey(request_id=reserve.sequence.request_id, attempt=reserve.sequence.attempt))


def finish(worker, say, emitted=0):
    """It computes what is known, and generates the rest."""
    worker.say(say.token(emitted, ANSWER[emitted]), say.adopted)
    for position in range(emitted + 1, len(ANSWER)):
        end = TokenEnd.LENGTH if position == len(ANSWER) - 1 else None
        worker.say(say.token(position, ANSWER[position], end))


async def test_without_a_prefill_worker_the_decode_worker_serves():
    scene = Scene(0, 1)
    reader = Reader(scene.run())
    finish(scene.d[0], await asked_alone(scene.d[0]))
    await reader.done()
    assert reader.tokens == list(enumerate(ANSWER))
    scene.assert_nothing_is_left()


async def test_two_workers_that_cannot_hand_over_are_no_pair_and_one_of_them_is_enough():
    scene = Scene()
    scene.d[0].join(layout_fingerprint=b"\1" * 32)
    reader = Reader(scene.run())
    finish(scene.d[0], await asked_alone(scene.d[0]))
    await reader.done()
    assert scene.p[0].kinds() == []


async def test_an_answer_goes_on_at_the_decode_worker_when_the_only_prefill_worker_is_lost():
    scene = Scene()
    reader = Reader(scene.run())
    say = await reserved(scene.d[0])
    await scene.p[0].hear("submit")
    scene.p[0].say(say.token(0, ANSWER[0]))
    await reader.saw(1)
    scene.p[0].leave()
    assert (await scene.d[0].hear("cancel")).attempt == 1
    order = (await scene.d[0].hear("reserve")).sequence
    assert (order.attempt, list(order.token_ids)) == (2, [5, 6, 7, ANSWER[0]])
    finish(scene.d[0], say.of(2), emitted=1)
    await reader.done()
    assert reader.tokens == list(enumerate(ANSWER))
    scene.assert_nothing_is_left()


async def test_a_pair_whose_hand_off_fails_costs_one_attempt_and_no_answer():
    scene = Scene()
    reader = Reader(scene.run())
    say = await reserved(scene.d[0])
    scene.d[0].say(say.ended(EndCause.TRANSFER_FAILED, "no endpoint answers"))
    await scene.d[0].hear("cancel")
    finish(scene.d[0], await asked_alone(scene.d[0]))
    await reader.done()
    scene.clock.now += FIRST_S
    reader = Reader(scene.run())
    await scene.p[0].hear("submit")
    await scene.p[0].hear("cancel")
    await served(scene, 0, 0)
    await reader.done()
    assert reader.tokens == list(enumerate(ANSWER)), "and then the pair is tried again"


async def test_a_short_prompt_goes_to_a_decode_worker_that_has_measured_that_it_hardly_hurts():
    scene = Scene()
    scene.d[0].load(free_blocks=100, step_ms=20.0, prompt_token_ms=1.0)
    reader = Reader(scene.run())
    finish(scene.d[0], await asked_alone(scene.d[0]))
    await reader.done()
    long = Reader(scene.run(prompt=tuple(range(110))))
    assert (await scene.d[0].hear("reserve")).ticket != b""
    await long.leave()
    scene.assert_nothing_is_left()


async def test_one_short_prompt_after_the_other_does_not_pile_up_at_a_decode_worker():
    scene = Scene()
    scene.d[0].load(free_blocks=100, step_ms=20.0, prompt_token_ms=1.0)
    readers = [Reader(scene.run(prompt=tuple(range(15)))) for _ in range(4)]
    alone = [(await scene.d[0].hear("reserve")).ticket == b"" for _ in readers]
    assert alone[0] and not alone[-1]
    for reader in readers:
        await reader.leave()


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1.0, 1e300])
async def test_what_no_clock_can_have_measured_is_taken_for_unknown(nonsense):
    scene = Scene()
    scene.d[0].load(free_blocks=100, step_ms=nonsense, prompt_token_ms=nonsense)
    view = scene.d[0].record.view()
    assert (view.step_ms, view.prompt_token_ms) == (0.0, 0.0)


async def test_a_worker_that_breaks_is_avoided_for_a_while_even_when_it_is_back_at_once():
    scene = Scene(1, 2)
    reader = Reader(scene.run())
    await reserved(scene.d[0])
    await scene.p[0].hear("submit")
    scene.d[0].leave()
    scene.d[0].join(epoch=8)
    await scene.p[0].hear("cancel")
    await served(scene, 0, 1)
    await reader.done()
    scene.d[1].load(running_sequences=7, free_blocks=10)
    reader = Reader(scene.run())
    await served(scene, 0, 1)
    await reader.done()
    scene.clock.now += FIRST_S
    reader = Reader(scene.run())
    assert (await scene.d[0].hear("cancel")).attempt == 1
    await served(scene, 0, 0)
    await reader.done()


@pytest.mark.parametrize("cause", [EndCause.DRAINING, EndCause.CANCELLED, EndCause.TICKET_REFUSED])
async def test_what_a_worker_refuses_is_no_failure_of_it(cause):
    scene = Scene(1, 2)
    reader = Reader(scene.run())
    say = await reserved(scene.d[0])
    scene.d[0].say(say.ended(cause))
    await scene.d[1].hear("reserve")
    await reader.leave()
    assert scene.orchestrator._breakers.avoided(scene.clock.now) == frozenset()
