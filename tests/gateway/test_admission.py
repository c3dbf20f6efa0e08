"""Who is taken, who goes when, and what those who are refused hear. Time is a number that the tests move."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from gateway.admission import RETRY_AFTER_MS, Admission, Bounds
from gateway.cost import cost_of
from gateway.window import Window
from service.errors import DeadlineExpired, Exhausted
from tests.fakes.places import placed
from tests.fakes.scripted_workers import make_request

ONE_AT_A_TIME = Window(branches=1, prompts=1, prompt_tokens=1)


class Scene:
    """Requests of 3 + 3 tokens by tenants. went: their tenants in the order in which they went."""

    def __init__(self, window=ONE_AT_A_TIME, weights=None, light_tokens=0, **bounds):
        self.now, self.window = 100.0, window
        self.admission = Admission(
            Bounds(**{"requests": 100, **bounds}),
            clock=lambda: self.now,
            window=lambda: self.window,
            weight=lambda tenant: (weights or {}).get(tenant, 1.0),
            light_tokens=light_tokens,
        )
        self.went, self.tasks, self.ends = [], [], []
        self.read = asyncio.Event()
        self.read.set()

    async def submit(self, tenant="", name=None, **request):
        """Comes; it is over at the workers when the test says so, and for good when all is `read`. Returns its task,
        once it has gone as far as it can."""
        end = asyncio.Event()
        request = replace(make_request(**request), tenant=tenant)

        async def live():
            with placed(self.admission, request):
                async with self.admission.enter(request) as place:
                    self.went.append(name or tenant)
                    self.ends.append((end, place))
                    await end.wait()
                await self.read.wait()

        task = asyncio.create_task(live())
        self.tasks.append(task)
        await settle()
        return task

    async def finish(self, tokens=3, seconds=0.0):
        """Whoever went first, and has not ended, has made so many tokens, and ends."""
        self.now += seconds
        end, place = self.ends.pop(0)
        if tokens:
            place.took(tokens)
        end.set()
        await settle()


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


@asynccontextmanager
async def scene_of(*arguments, **named):
    scene = Scene(*arguments, **named)
    try:
        yield scene
    finally:
        for task in scene.tasks:
            task.cancel()
        await asyncio.gather(*scene.tasks, return_exceptions=True)
        assert (scene.admission.live, scene.admission.waiting) == (0, 0)


def measured(scene, seconds_each=1.0, requests=4):
    """What is known once so many have been served one by one while others waited."""

    async def serve():
        for _ in range(requests + 1):
            await scene.submit()
        for _ in range(requests + 1):
            await scene.finish(seconds=seconds_each)

    return serve()


async def test_as_many_as_the_limit_are_live_and_the_next_is_refused_with_the_number():
    async with scene_of(window=None, requests=2) as scene:
        await scene.submit()
        await scene.submit()
        with pytest.raises(Exhausted, match="at most 2") as refusal:
            await (await scene.submit())
        assert refusal.value.retry_after_ms == RETRY_AFTER_MS
        with pytest.raises(Exhausted, match="at most 2"), scene.admission.hold(""):
            pass
        await scene.finish()
        await scene.submit()
        assert scene.admission.live == 2


@pytest.mark.parametrize("bound", ["tokens", "bytes"])
async def test_what_requests_may_cost_is_bounded_and_one_alone_may_cost_more(bound):
    cost = getattr(cost_of(make_request()), bound)
    async with scene_of(window=None, **{bound: 2 * cost}) as scene:
        await scene.submit()
        with pytest.raises(Exhausted, match=f"{bound}: at most {2 * cost}"):
            await (await scene.submit(best_of=2))
        await scene.submit()
        with pytest.raises(Exhausted):
            await (await scene.submit())
        await scene.finish()
        await scene.finish()
        await scene.submit(prompt=[5] * 1000)
        assert scene.admission.live == 1


def test_the_cost_of_a_request_is_its_prompt_and_all_its_answers_at_their_longest():
    cost = cost_of(make_request(prompt=[1] * 10, max_tokens=7, best_of=4))
    assert (cost.prompt_tokens, cost.tokens, cost.branches) == (10, 38, 4)


async def test_the_workers_get_what_they_can_take_and_the_others_wait_in_order():
    async with scene_of(Window(branches=2, prompts=9, prompt_tokens=0)) as scene:
        for name in "abcd":
            await scene.submit(name=name)
        assert (scene.went, scene.admission.waiting) == (["a", "b"], 2)
        await scene.finish()
        assert scene.went == ["a", "b", "c"]
        scene.window = None
        scene.admission.look()
        await settle()
        assert scene.went == ["a", "b", "c", "d"]


async def test_a_prompt_that_is_computed_makes_room_for_the_next():
    async with scene_of(Window(branches=9, prompts=1, prompt_tokens=5)) as scene:
        await scene.submit(name="a")
        await scene.submit(name="b", prompt=[5] * 3)
        await scene.submit(name="c", prompt=[5] * 2)
        assert scene.went == ["a"]
        scene.ends[0][1].took(1)
        await settle()
        assert scene.went == ["a", "b", "c"]


async def test_what_is_larger_than_the_window_goes_alone():
    async with scene_of(Window(branches=2, prompts=1, prompt_tokens=1)) as scene:
        await scene.submit(name="large", best_of=8)
        await scene.submit(name="small")
        assert scene.went == ["large"]
        await scene.finish()
        assert scene.went == ["large", "small"]


async def test_a_tenant_that_asks_for_much_does_not_make_another_one_wait_behind_it():
    async with scene_of() as scene:
        for _ in range(6):
            await scene.submit("greedy")
        await scene.submit("modest")
        await scene.submit("modest")
        for _ in range(4):
            await scene.finish()
        assert scene.went == ["greedy", "modest", "greedy", "modest", "greedy"] or scene.went == [
            "greedy",
            "greedy",
            "modest",
            "modest",
            "greedy",
        ]


@pytest.mark.parametrize("large", ["a", "b"])
async def test_shares_are_of_tokens_and_not_of_requests(large):
    """One asks in large requests, the other in small ones."""
    async with scene_of() as scene:
        for _ in range(30):
            await scene.submit("a", prompt=[5] * (57 if large == "a" else 3))
            await scene.submit("b", prompt=[5] * (57 if large == "b" else 3))
        for _ in range(21):
            await scene.finish()
        small = {"a": "b", "b": "a"}[large]
        assert scene.went.count(small) / scene.went.count(large) == pytest.approx(10, abs=2.5)


async def test_a_weight_is_a_multiple_of_the_share():
    async with scene_of(weights={"a": 3.0}) as scene:
        for _ in range(20):
            await scene.submit("a")
            await scene.submit("b")
        for _ in range(19):
            await scene.finish()
        assert scene.went.count("a") == 15


async def test_what_a_request_did_not_use_is_given_back():
    """Both may cost as much; one never does, and gets more of them for it."""
    async with scene_of() as scene:
        for _ in range(30):
            await scene.submit("short", max_tokens=97)
            await scene.submit("long", max_tokens=97)
        for _ in range(20):
            await scene.finish(tokens=97 if scene.went[-1] == "long" else 7)
        assert scene.went.count("short") > 2 * scene.went.count("long")


async def test_a_tenant_with_nothing_waiting_saves_nothing_up():
    async with scene_of() as scene:
        await scene.submit("late")
        await scene.finish()
        for _ in range(10):
            await scene.submit("early")
        for _ in range(5):
            await scene.finish()
        for _ in range(5):
            await scene.submit("late")
        scene.went.clear()
        for _ in range(4):
            await scene.finish()
        assert sorted(scene.went) == ["early", "early", "late", "late"]


async def test_priority_is_time_within_a_tenant_and_counts_nothing_between_tenants():
    async with scene_of() as scene:
        await scene.submit("x", name="first")
        await scene.submit("a", name="a")
        await scene.submit("a", name="a, urgent", priority=-1)
        await scene.submit("b", name="b, urgent", priority=-100)
        await scene.submit("b", name="b")
        for _ in range(4):
            await scene.finish()
        assert scene.went.index("a, urgent") < scene.went.index("a")
        assert scene.went.index("a, urgent") < scene.went.index("b")


async def test_a_crowd_of_one_tenant_leaves_room_for_others():
    async with scene_of(requests=12, shared=True) as scene:
        taken = [await scene.submit("greedy") for _ in range(20)]
        refused = [task for task in taken if task.done()]
        assert len(refused) == 12
        assert all(isinstance(task.exception(), Exhausted) for task in refused)
        for _ in range(2):
            assert not (await scene.submit("modest")).done()


async def test_until_anything_is_known_no_deadline_is_refused():
    async with scene_of() as scene:
        for _ in range(5):
            assert not (await scene.submit(deadline=scene.now + 5.0)).done()


async def test_who_would_wait_longer_than_its_deadline_is_refused_with_the_time_to_come_back():
    """Each takes a second, and three are before it."""
    async with scene_of() as scene:
        await measured(scene)
        for _ in range(4):
            await scene.submit()
        with pytest.raises(Exhausted) as refusal:
            await (await scene.submit(deadline=scene.now + 2.0))
        assert refusal.value.reason == "DEADLINE_UNREACHABLE"
        assert 1000 <= refusal.value.retry_after_ms <= 4000
        assert not (await scene.submit(deadline=scene.now + 6.0)).done()
        assert scene.admission.live == 5


async def test_what_a_client_takes_to_read_is_no_time_of_the_workers():
    async with scene_of() as scene:
        scene.read.clear()
        for _ in range(5):
            await scene.submit()
        for _ in range(5):
            await scene.finish(seconds=1.0)
        assert (len(scene.went), scene.admission.waiting, scene.admission.live) == (5, 0, 5)
        scene.now += 1000.0
        scene.read.set()
        await settle()
        for _ in range(4):
            await scene.submit()
        with pytest.raises(Exhausted) as refusal:
            await (await scene.submit(deadline=scene.now + 2.0))
        assert 1000 <= refusal.value.retry_after_ms <= 4000


async def test_a_request_that_the_workers_did_not_take_comes_again_when_as_much_as_it_is_done():
    async with scene_of() as scene:
        await scene.submit()
        assert scene.ends[0][1].pause_s() == RETRY_AFTER_MS / 1000
        await scene.finish()
        await measured(scene, seconds_each=3.0)
        await scene.submit()
        assert scene.ends[0][1].pause_s() == pytest.approx(3.0, rel=0.3)


async def test_a_full_queue_says_how_long_it_takes_to_make_room():
    async with scene_of(requests=4) as scene:
        for _ in range(3):
            await scene.submit()
        for _ in range(3):
            await scene.finish(seconds=2.0)
        for _ in range(4):
            await scene.submit()
        with pytest.raises(Exhausted) as refusal:
            await (await scene.submit())
        assert refusal.value.retry_after_ms == pytest.approx(2000, rel=0.5)


async def test_whose_turn_comes_too_late_is_refused_instead_of_run():
    async with scene_of() as scene:
        await measured(scene)
        await scene.submit(name="slow")
        late = await scene.submit(name="late", deadline=scene.now + 4.0)
        await scene.submit(name="next")
        await scene.finish(seconds=3.5)
        assert scene.went[-2:] == ["slow", "next"]
        with pytest.raises(Exhausted, match="the deadline would pass"):
            await late


async def test_a_deadline_that_passes_while_a_request_waits_is_said_as_such():
    async with scene_of() as scene:
        await scene.submit()
        with pytest.raises(DeadlineExpired):
            await (await scene.submit(deadline=scene.now + 0.001))
        assert scene.admission.live == 1


async def test_whoever_leaves_while_it_waits_leaves_nothing_behind():
    async with scene_of() as scene:
        await scene.submit(name="a")
        leaving = await scene.submit(name="b")
        await scene.submit(name="c")
        leaving.cancel()
        await settle()
        assert scene.admission.live == 2
        await scene.finish()
        assert scene.went == ["a", "c"]


async def test_a_turn_that_comes_with_a_cancellation_goes_to_the_next():
    async with scene_of() as scene:
        await scene.submit(name="a")
        leaving = await scene.submit(name="b")
        await scene.submit(name="c")
        scene.ends.pop(0)[0].set()
        await asyncio.sleep(0)
        leaving.cancel()
        await settle()
        assert "c" in scene.went and scene.admission.live <= 2


async def test_a_turn_that_is_given_back_costs_its_tenant_nothing():
    async with scene_of() as scene:
        await scene.submit("x")
        leaving = await scene.submit("mine", max_tokens=900)
        scene.ends.pop(0)[0].set()
        await asyncio.sleep(0)
        leaving.cancel()
        await settle()
        for tenant in ("busy", "other", "mine"):
            await scene.submit(tenant)
        await scene.finish()
        await scene.finish()
        assert scene.went == ["x", "busy", "mine", "other"]


async def test_a_request_that_ends_badly_makes_room_too():
    async with scene_of(requests=1) as scene:
        for _ in range(3):
            with pytest.raises(KeyError), scene.admission.hold(""):
                async with scene.admission.enter(make_request()):
                    raise KeyError
        assert scene.admission.live == 0
