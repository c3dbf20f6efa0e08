"""Answers whose clients do not read them: what has come is kept once, and the workers are there for others."""

import asyncio
from contextlib import aclosing

import pytest

from gateway.arrivals import Arrivals
from gateway.mailbox import Mailbox, Turnstile, Unwanted
from gateway.request import EndReason
from gateway.window import Window
from service.errors import InternalFault
from service.orders import Beam
from service.reports import TokenEnd
from tests.gateway.test_orchestrator import ANSWER, Reader, Scene, reserved, served

ONE_AT_A_TIME = Window(branches=1, prompts=8, prompt_tokens=8192)


def ended(failure=None):
    work = asyncio.get_running_loop().create_future()
    if failure is None:
        work.set_result(None)
    else:
        work.set_exception(failure)
    return work


async def told(mailbox):
    """All that the mailbox was told."""
    mailbox.put("", Unwanted(choice=99))
    return [each.letter.choice for each in await mailbox.take()][:-1]


async def first_token_read(scene, **request):
    """An answer whose reader has taken its first token and reads no more; what its workers say of it."""
    answer = scene.run(**request)
    first = asyncio.create_task(anext(answer))
    say = await reserved(scene.d[0])
    await scene.p[0].hear("submit")
    scene.p[0].say(say.token(0, ANSWER[0]))
    await first
    return answer, say


def rest(say):
    ends = [None] * (len(ANSWER) - 2) + [TokenEnd.LENGTH]
    return [say.token(n, ANSWER[n], end) for n, end in enumerate(ends, 1)]


async def all_of(answer):
    async with aclosing(answer):
        return [batch async for batch in answer]


async def test_what_comes_while_nobody_reads_is_one_batch_of_each_choice(batches):
    arrivals = Arrivals(frozenset())
    tokens = batches(range(500, 600), end=EndReason.LENGTH, cached_tokens=3)
    for batch in tokens:
        arrivals.put(batch)
        arrivals.put(batch._replace(choice=1))
    first, second = await arrivals.take()
    assert (first.choice, second.choice) == (0, 1)
    assert [token.token_id for token in first.tokens] == list(
        range(500, 600)
    ) and first.tokens == second.tokens
    assert (first.end, first.cached_tokens) == (EndReason.LENGTH, 3)


async def test_what_came_before_a_failure_is_taken_before_it_is_raised(batches):
    arrivals = Arrivals(frozenset())
    (batch,) = batches([500], end=None)
    arrivals.put(batch)
    arrivals.end(ended(InternalFault("broken")))
    assert await arrivals.take() == [batch]
    with pytest.raises(InternalFault):
        await arrivals.take()


async def test_a_reader_that_waits_hears_of_the_end():
    arrivals = Arrivals(frozenset())
    taking = asyncio.create_task(arrivals.take())
    await asyncio.sleep(0)
    arrivals.end(ended())
    assert await taking == []


async def test_those_that_follow_hear_once_of_each_choice_that_is_not_read_and_later_ones_of_all():
    unread = set()
    arrivals, early, late = Arrivals(unread), Mailbox(Turnstile()), Mailbox(Turnstile())
    with arrivals.followed(early):
        arrivals.look()
        unread.update((2, 1))
        arrivals.look()
        arrivals.look()
        assert await told(early) == [1, 2]
        assert not arrivals.wanted(1) and arrivals.wanted(0)
    unread.add(0)
    arrivals.look()
    with arrivals.followed(late):
        assert sorted(await told(late)) == [0, 1, 2]
    assert await told(early) == []


async def test_a_complete_answer_that_nobody_reads_holds_no_place_at_the_workers():
    scene = Scene(window=ONE_AT_A_TIME)
    unread, say = await first_token_read(scene)
    waiting = Reader(scene.run())
    scene.d[0].say(say.adopted, *rest(say))
    await served(scene, 0, 0)
    await waiting.done()
    assert (scene.admission.live, scene.admission.waiting) == (1, 0)
    (batch,) = await all_of(unread)
    assert [token.token_id for token in batch.tokens] == list(ANSWER[1:]) and batch.end is EndReason.LENGTH
    scene.assert_nothing_is_left()


async def test_an_answer_that_nobody_reads_is_resumed_all_the_same():
    scene = Scene(1, 2, window=ONE_AT_A_TIME)
    unread, say = await first_token_read(scene)
    scene.d[0].say(say.adopted, say.token(1, ANSWER[1]))
    scene.d[0].leave()
    await served(scene, 0, 1, emitted=2)
    waiting = Reader(scene.run())
    await served(scene, 0, 1)
    await waiting.done()
    assert [len(batch.tokens) for batch in await all_of(unread)] == [len(ANSWER) - 1]


async def test_a_complete_answer_that_nobody_reads_counts_against_the_bounds():
    scene = Scene(requests_max=1)
    unread, say = await first_token_read(scene)
    scene.d[0].say(say.adopted, *rest(say))
    while not scene.d[0].is_free():
        await asyncio.sleep(0)
    assert scene.admission.live == 1
    await unread.aclose()
    scene.assert_nothing_is_left()


async def test_the_prompt_of_a_search_is_computed_when_the_search_begins_and_not_when_it_ends():
    scene = Scene(window=Window(branches=9, prompts=1, prompt_tokens=0))
    search = Reader(scene.run(beam=Beam(width=2)))
    say = await reserved(scene.d[0])
    waiting = Reader(scene.run())
    while not scene.admission.waiting:
        await asyncio.sleep(0)
    scene.d[0].say(say.adopted)
    await scene.p[0].hear("submit")
    await served(scene, 0, 0)
    await waiting.done()
    await search.leave()
    scene.assert_nothing_is_left()
