"""What a call may cost counts from before it is read, and as it becomes known. Time is a number that the tests move."""

import pytest

from gateway.cost import Cost
from service.errors import Exhausted
from tests.fakes.scripted_workers import make_request
from tests.gateway.test_admission import measured, scene_of


async def test_a_place_counts_before_it_is_known_what_for():
    async with scene_of(window=None, requests=2, shared=False) as scene:
        with scene.admission.hold("a"), scene.admission.hold("b"):
            assert (scene.admission.live, scene.admission.waiting) == (2, 0)
            with pytest.raises(Exhausted):
                await (await scene.submit())
        await scene.submit()


@pytest.mark.parametrize("name", ["requests", "tokens", "bytes"])
async def test_a_place_grows_only_where_there_is_room_and_gives_back_what_it_does_not_need(name):
    async with scene_of(window=None, **{"requests": 1000, name: 100}) as scene:
        with scene.admission.hold("") as held, scene.admission.hold("") as other:
            held.claim(Cost(**{"requests": 1, name: 60}))
            with pytest.raises(Exhausted, match=f"{name}: at most 100"):
                other.claim(Cost(**{"requests": 1, name: 60}))
            assert other.cost == Cost(requests=1)
            held.claim(Cost(**{"requests": 1, name: 30}))
            other.claim(Cost(**{"requests": 1, name: 60}))
            held.claim(Cost(**{"requests": 1, name: 30}))  # what it has it keeps, however full it is


async def test_one_call_for_more_than_the_bound_is_taken_when_nobody_else_is_here():
    async with scene_of(window=None, requests=10) as scene:
        with scene.admission.hold("") as held:
            held.claim(Cost(requests=16))
            assert scene.admission.live == 16
            with pytest.raises(Exhausted), scene.admission.hold(""):
                pass
        with scene.admission.hold("") as other, scene.admission.hold("") as held:
            with pytest.raises(Exhausted):
                held.claim(Cost(requests=16))
            other.claim(Cost(requests=9))


async def test_nobody_enters_without_a_place():
    async with scene_of(window=None) as scene:
        with pytest.raises(AssertionError):
            async with scene.admission.enter(make_request()):
                pass


async def test_where_the_workers_have_shown_no_pace_it_is_as_long_as_calls_have_stayed():
    async with scene_of(window=None, requests=4) as scene:
        for _ in range(3):
            await scene.submit()
            await scene.finish(tokens=0, seconds=8.0)
        for _ in range(4):
            await scene.submit()
        with pytest.raises(Exhausted) as refusal:
            await (await scene.submit())
        assert refusal.value.retry_after_ms == 2000  # four that stay 8 s each: one leaves every 2 s


async def test_a_deadline_that_the_least_would_miss_is_refused_before_anything_is_read():
    async with scene_of() as scene:
        await measured(scene)
        for _ in range(4):
            await scene.submit()
        least = Cost(requests=1, tokens=2, prompt_tokens=1, branches=1)
        with scene.admission.hold("") as held:
            held.require_time(least, 60.0)
            with pytest.raises(Exhausted) as refusal:
                held.require_time(least, 1.0)
        assert refusal.value.reason == "DEADLINE_UNREACHABLE" and refusal.value.retry_after_ms >= 1000
