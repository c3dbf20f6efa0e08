"""Requests for several answers: one attempt for all of them, and after a loss one for each."""

import asyncio
from contextlib import aclosing

import pytest

from crossdock.seeds import choice_seed
from gateway.attach import DECODE
from gateway.request import EndReason
from service.errors import InvalidRequest
from service.orders import AttemptKey, Beam
from service.reports import TokenEnd
from tests.fakes.scripted_workers import Say, ScriptedWorker, make_pool, make_request
from tests.gateway.test_orchestrator import Scene, reserved

PAIR = ((11, 12, 13, 14), (21, 22, 23, 24))
"""Two answers of four tokens to one prompt."""


class Choices:
    """The reader of a request for two choices: what it was told of each."""

    def __init__(self, scene, unread=frozenset(), **request):
        self.told, self.ends = ([], []), [None, None]
        run = scene.answer(make_request(max_tokens=4, n=2, best_of=2, **request), unread)
        self.task = asyncio.create_task(self._read(run))

    async def _read(self, batches):
        async with aclosing(batches):
            async for batch in batches:
                self.told[batch.choice].extend(token.token_id for token in batch.tokens)
                self.ends[batch.choice] = batch.end

    async def saw(self, *counts):
        while tuple(map(len, self.told)) != counts:
            await asyncio.sleep(0)


def both(say, position, ends=(None, None)):
    """A token of each choice."""
    return [say.token(position, PAIR[choice][position], ends[choice], choice=choice) for choice in (0, 1)]


async def test_two_choices_share_one_attempt_and_one_hand_off():
    scene = Scene()
    reader = Choices(scene, seed=5)
    order = (await scene.d[0].hear("reserve")).sequence
    assert [(each.index, each.seed) for each in order.choices] == [(0, 5), (1, choice_seed(5, 1))]
    say = Say(AttemptKey(request_id=order.request_id, attempt=order.attempt))
    scene.d[0].say(say.reserved)
    await scene.p[0].hear("submit")
    scene.p[0].say(*both(say, 0))
    last = both(say, 3, (TokenEnd.LENGTH, TokenEnd.LENGTH))
    scene.d[0].say(say.adopted, *both(say, 1), *both(say, 2), *last)
    await reader.task
    assert tuple(map(tuple, reader.told)) == PAIR and reader.ends == [EndReason.LENGTH] * 2
    assert (scene.p[0].kinds(), scene.d[0].kinds()) == (["submit"], ["reserve"])
    scene.assert_nothing_is_left()


async def test_after_a_loss_each_choice_goes_on_by_itself_from_its_own_tokens():
    scene = Scene(decodes=2)
    reader = Choices(scene)
    say = await reserved(scene.d[0])
    await scene.p[0].hear("submit")
    scene.p[0].say(*both(say, 0))
    scene.d[0].say(say.adopted, say.token(1, 12))
    await reader.saw(2, 1)
    scene.d[0].leave()
    orders = [(await scene.d[1].hear("reserve")).sequence for _ in PAIR]
    known = {order.choices[0].index: tuple(order.token_ids[3:]) for order in orders}
    assert known == {0: (11, 12), 1: (21,)}
    assert len({order.request_id for order in orders}) == 2, "neither makes the other void"
    for order in orders:
        say = Say(AttemptKey(request_id=order.request_id, attempt=order.attempt))
        choice = order.choices[0].index
        scene.d[1].say(say.reserved)
        await scene.p[0].hear("submit")
        position = len(known[choice])
        scene.p[0].say(say.token(position, PAIR[choice][position], choice=choice))
        scene.d[1].say(say.adopted)
        for later in range(position + 1, 4):
            end = TokenEnd.LENGTH if later == 3 else None
            scene.d[1].say(say.token(later, PAIR[choice][later], end, choice=choice))
    await reader.task
    assert tuple(map(tuple, reader.told)) == PAIR
    scene.assert_nothing_is_left()


async def test_choices_that_have_no_token_yet_stay_together_after_a_loss():
    scene = Scene(decodes=2)
    reader = Choices(scene)
    await reserved(scene.d[0])
    await scene.p[0].hear("submit")
    scene.d[0].leave()
    order = (await scene.d[1].hear("reserve")).sequence
    assert (len(order.choices), order.attempt) == (2, 2)
    reader.task.cancel()


async def test_a_choice_that_is_not_read_any_more_ends_alone():
    scene, unread = Scene(), set()
    reader = Choices(scene, unread)
    say = await reserved(scene.d[0])
    await scene.p[0].hear("submit")
    scene.p[0].say(*both(say, 0))
    await reader.saw(1, 1)
    unread.add(1)
    scene.d[0].say(say.adopted, *both(say, 1))
    await reader.saw(2, 2)
    end = await asyncio.wait_for(scene.d[0].hear("end_choice"), 1)
    assert end.choice == 1
    scene.d[0].say(say.token(2, 13), say.token(3, 14, TokenEnd.LENGTH))
    await reader.task
    assert reader.ends == [EndReason.LENGTH, None]
    scene.assert_nothing_is_left()


async def test_more_choices_than_a_worker_has_seats_go_one_by_one():
    scene = Scene(decodes=0)
    pool = make_pool(DECODE, ["small"], on_change=scene._changed)
    scene.orchestrator._decodes = pool
    (record,) = pool
    worker = ScriptedWorker(record, DECODE)
    worker.join(max_num_seqs=1)
    reader = Choices(scene)
    orders = [(await worker.hear("reserve")).sequence for _ in PAIR]
    assert [len(order.choices) for order in orders] == [1, 1]
    reader.task.cancel()


async def test_a_search_that_no_worker_can_hold_is_refused_with_the_sizes():
    scene = Scene()
    wide = make_request(max_tokens=3, beam=Beam(width=9))
    with pytest.raises(InvalidRequest, match="beam_width"):
        await anext(scene.answer(wide))
    scene.assert_nothing_is_left()


async def test_answers_of_a_search_come_from_the_decode_worker_alone_and_all_at_once():
    scene = Scene()
    request = make_request(max_tokens=4, n=2, best_of=2, beam=Beam(width=3))
    told = {}

    async def read():
        async with aclosing(scene.answer(request)) as batches:
            async for batch in batches:
                told[batch.choice] = ([token.token_id for token in batch.tokens], batch.end)

    reading = asyncio.create_task(read())
    say = await reserved(scene.d[0])
    assert (await scene.p[0].hear("submit")).sequence.beam.width == 3
    scene.d[0].say(say.adopted)
    scene.p[0].leave()
    last = both(say, 3, (TokenEnd.LENGTH, TokenEnd.LENGTH))
    scene.d[0].say(*both(say, 0), *both(say, 1), *both(say, 2), *last)
    await reading
    assert told == {choice: (list(PAIR[choice]), EndReason.LENGTH) for choice in (0, 1)}
    scene.assert_nothing_is_left()


async def test_a_search_that_is_lost_begins_again():
    scene = Scene(decodes=2)
    run = scene.answer(make_request(max_tokens=4, n=2, best_of=2, beam=Beam(width=3)))
    reading = asyncio.ensure_future(anext(run))
    say = await reserved(scene.d[0])
    await scene.p[0].hear("submit")
    scene.d[0].say(say.adopted)
    scene.d[0].leave()
    again = (await scene.d[1].hear("reserve")).sequence
    assert (again.attempt, list(again.token_ids), len(again.choices)) == (2, [5, 6, 7], 2)
    reading.cancel()
