"""How likely a prompt is comes to the client once, before the answer, whichever workers computed it how often."""

import asyncio
import itertools
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cost import SCORE_BYTES, Cost, cost_of
from gateway.journal import Divergence, Journal
from gateway.prompt_scores import PromptScores
from service.errors import InternalFault
from service.orders import AttemptKey
from service.reports import TokenEnd
from service.scores import Scores
from tests.fakes.scripted_workers import Say, make_request
from tests.gateway.test_attempt import Scene as OneAttempt
from tests.gateway.test_orchestrator import Reader, Scene, reserved
from tests.gateway.test_routing import names_in_the_order_to

SAY = Say(AttemptKey(request_id="w", attempt=1))
PROMPT = tuple(range(1, 10))
LOGPROBS = tuple(-float(n) for n in range(1, len(PROMPT)))


def request(**changes):
    return make_request(**{"prompt": PROMPT, "prompt_logprobs": 1, **changes})


@st.composite
def chunked(draw):
    """Attempts, each a run from the start in chunks, the last of them to the end: (first position, logprobs)."""
    parts = []
    for end in [*draw(st.lists(st.integers(1, len(LOGPROBS)), max_size=3)), len(LOGPROBS)]:
        cuts = sorted({0, end, *draw(st.lists(st.integers(1, end), max_size=4))})
        parts += [(first + 1, LOGPROBS[first:last]) for first, last in itertools.pairwise(cuts)]
    return parts


@given(chunked())
def test_each_position_is_kept_once_however_often_and_in_whatever_chunks_it_comes(parts):
    scores = PromptScores(request())
    for first, logprobs in parts:
        assert scores.take(SAY.scores(first, *logprobs))
    assert not scores.due()
    assert scores.all() == SAY.scores(1, *LOGPROBS).scores


@pytest.mark.parametrize(
    "report",
    [
        SAY.scores(0, -1.0),
        SAY.scores(2, -1.0),
        SAY.scores(1, *LOGPROBS, -1.0),
        SAY.scores(1, -1.0, width=0),
        SAY.scores(1, -1.0, width=2),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_entered(report):
    scores = PromptScores(request())
    assert not scores.take(report)
    assert scores.take(SAY.scores(1, *LOGPROBS)) and not scores.due()


def test_what_nobody_asked_for_is_refused():
    scores = PromptScores(request(prompt_logprobs=None))
    assert not scores.due() and scores.all() is None
    assert not scores.take(SAY.scores(1, -1.0))


def test_a_prompt_of_one_token_has_none_and_waits_for_none():
    scores = PromptScores(request(prompt=(5,)))
    assert not scores.due() and scores.all() == Scores()


def test_a_first_token_that_comes_before_them_is_a_divergence():
    journal = Journal(request(max_tokens=2), "w")
    with pytest.raises(Divergence):
        journal.take(SAY.token(0, 50))
    journal.score(SAY.scores(1, *LOGPROBS))
    batch = journal.take(SAY.token(0, 50))
    assert batch.scores == SAY.scores(1, *LOGPROBS).scores
    assert journal.take(SAY.token(1, 51, TokenEnd.LENGTH)).scores is None


async def test_what_the_target_says_of_later_tokens_may_overtake_them():
    scene = Scene()
    task = asyncio.create_task(batches_of(scene.run(prompt=PROMPT, prompt_logprobs=1, max_tokens=2)))
    say = await reserved(scene.d[0])
    await scene.p[0].hear("submit")
    scene.d[0].say(say.adopted, say.token(1, 51, TokenEnd.LENGTH))
    scene.p[0].say(say.scores(1, *LOGPROBS), say.token(0, 50))
    (batch,) = await task
    assert [token.token_id for token in batch.tokens] == [50, 51]
    assert batch.scores == say.scores(1, *LOGPROBS).scores


def test_an_order_asks_for_them_until_they_are_known():
    journal = Journal(request(max_tokens=2), "w")
    assert journal.order(1).prompt_logprobs == 1
    journal.score(SAY.scores(1, *LOGPROBS))
    assert journal.order(2).prompt_logprobs is None


def test_they_are_not_heard_after_the_first_token():
    scene = OneAttempt(prompt_logprobs=1)
    scene.attempt.begin()
    scene.tell("d", scene.say.reserved)
    scene.tell("p", scene.say.scores(1, -1.0, -2.0), scene.say.token(0, 11), scene.say.scores(1, -1.0))
    assert scene.heard == [11] and scene.attempt.failure is not None


def test_they_are_heard_from_whoever_computes_the_prompt_and_from_nobody_else():
    for sender, lost in (("p", False), ("d", True)):
        scene = OneAttempt(prompt_logprobs=1)
        scene.attempt.begin()
        scene.tell("d", scene.say.reserved)
        scene.tell(sender, scene.say.scores(1, -1.0, -2.0))
        assert (scene.attempt.failure is not None) is lost


async def batches_of(run):
    async with aclosing(run) as batches:
        return [batch async for batch in batches]


async def test_what_a_lost_worker_had_told_is_computed_again_and_shown_once():
    scene = Scene(prefills=2)
    task = asyncio.create_task(batches_of(scene.run(prompt=PROMPT, prompt_logprobs=1, max_tokens=2)))
    say = await reserved(scene.d[0])
    await scene.p[0].hear("submit")
    scene.p[0].say(say.scores(1, *LOGPROBS[:3]))
    scene.p[0].leave()
    await scene.d[0].hear("cancel")
    say = await reserved(scene.d[0])
    assert (await scene.p[1].hear("submit")).sequence.prompt_logprobs == 1
    scene.p[1].say(say.scores(1, *LOGPROBS[:5]), say.scores(6, *LOGPROBS[5:]), say.token(0, 50))
    scene.d[0].say(say.adopted, say.token(1, 51, TokenEnd.LENGTH))
    (first, *others) = await task
    assert first.scores == say.scores(1, *LOGPROBS).scores
    assert [batch.scores for batch in others] == [None] * len(others)
    assert say.key.attempt == 2
    scene.assert_nothing_is_left()


async def test_what_was_told_is_not_asked_for_again_when_the_answer_is_resumed():
    scene = Scene(decodes=2)
    task = asyncio.create_task(batches_of(scene.run(prompt=PROMPT, prompt_logprobs=1, max_tokens=3)))
    say = await reserved(scene.d[0])
    await scene.p[0].hear("submit")
    scene.p[0].say(say.scores(1, *LOGPROBS), say.token(0, 50))
    scene.d[0].leave()
    order = (await scene.d[1].hear("reserve")).sequence
    assert list(order.token_ids) == [*PROMPT, 50] and not order.HasField("prompt_logprobs")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_worker_that_leaves_them_out_ends_the_stream_with_internal():
    scene = Scene()
    task = asyncio.create_task(batches_of(scene.run(prompt=PROMPT, prompt_logprobs=1, max_tokens=2)))
    say = await reserved(scene.d[0])
    await scene.p[0].hear("submit")
    scene.p[0].say(say.token(0, 50))
    with pytest.raises(InternalFault):
        await task


async def test_what_is_cached_is_not_counted_on():
    scene, prompt = Scene(2, 2), tuple(range(41))
    reader = Reader(scene.run(prompt=prompt))
    hashes = await names_in_the_order_to(scene.d[0], prompt)
    await reader.leave()
    scene.p[1].tell_cached(hashes)
    task = asyncio.create_task(batches_of(scene.run(prompt=prompt, prompt_logprobs=0)))
    await reserved(scene.d[1])
    await scene.p[1].hear("submit")
    assert scene.p[1].record.view().queued_tokens == len(prompt)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_all_choices_bring_the_same_and_one_order_asks_for_them():
    scene = Scene()
    run = scene.run(prompt=PROMPT, prompt_logprobs=1, n=2, best_of=2, max_tokens=2)
    task = asyncio.create_task(batches_of(run))
    say = await reserved(scene.d[0])
    await scene.p[0].hear("submit")
    scene.p[0].say(say.scores(1, *LOGPROBS), say.token(0, 50), say.token(0, 60, choice=1))
    scene.d[0].say(
        say.adopted, say.token(1, 51, TokenEnd.LENGTH), say.token(1, 61, TokenEnd.LENGTH, choice=1)
    )
    heard = await task
    firsts = {batch.choice: batch.scores for batch in heard if batch.tokens[0].position == 0}
    assert firsts == dict.fromkeys(range(2), say.scores(1, *LOGPROBS).scores)
    assert (scene.p[0].kinds(), scene.d[0].kinds()) == (["submit"], ["reserve"])


def test_what_is_kept_of_them_counts_as_bytes():
    prompt, plain = len(PROMPT), cost_of(request(prompt_logprobs=None))
    assert cost_of(request(prompt_logprobs=2)) - plain == Cost(bytes=SCORE_BYTES * prompt * 3)
