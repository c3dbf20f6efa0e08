"""A prompt of a few tokens does not wait for long ones of others: it needs no turn at those who compute prompts."""

import asyncio

import pytest

from gateway.window import LIGHT_TOKENS, Window
from service.errors import Exhausted
from tests.gateway.test_admission import measured, scene_of, settle

LONG = [5] * (LIGHT_TOKENS + 1)
LIGHT = [5] * LIGHT_TOKENS


def window(branches=10):
    """One prompt at a time."""
    return Window(branches=branches, prompts=1, prompt_tokens=0)


async def crowd(scene, count=4):
    """Of long prompts, of which one is computed and the others wait. What is waiting when a test ends is cancelled."""
    for number in range(count):
        await scene.submit(name=f"long {number}", prompt=LONG)
    assert scene.went == ["long 0"]


async def test_a_light_prompt_passes_long_ones_that_wait_to_be_computed_and_these_keep_their_order():
    async with scene_of(window(), light_tokens=LIGHT_TOKENS) as scene:
        await crowd(scene)
        await scene.submit(name="light", prompt=LIGHT)
        await scene.submit(name="another", prompt=LIGHT)
        assert scene.went == ["long 0", "light", "another"]
        await scene.submit(name="longer", prompt=LONG)
        for _ in range(5):
            await scene.finish()
        assert scene.went[3:] == ["long 1", "long 2", "long 3"]


async def test_half_of_the_seats_are_left_to_those_who_were_passed():
    async with scene_of(window(branches=10), light_tokens=LIGHT_TOKENS) as scene:
        await crowd(scene)
        for number in range(6):
            await scene.submit(name=str(number), prompt=LIGHT)
        assert scene.went == ["long 0", "0", "1", "2", "3"], "five of ten"
        await scene.finish()
        assert scene.went[5:] == ["4"]


async def test_nobody_passes_one_that_waits_for_seats():
    async with scene_of(window(branches=10), light_tokens=LIGHT_TOKENS) as scene:
        await scene.submit(name="first", prompt=LONG)
        await scene.submit(name="wide", prompt=LONG, best_of=10)
        await scene.submit(name="light", prompt=LIGHT)
        assert scene.went == ["first"]
        await scene.finish()
        assert scene.went == ["first", "wide"]


async def test_tenants_take_turns_among_light_prompts_too():
    async with scene_of(window(branches=2), light_tokens=LIGHT_TOKENS) as scene:
        await scene.submit("a", name="long", prompt=LONG)
        await scene.submit("a", name="next", prompt=LONG)
        for number in range(3):
            await scene.submit("a", name=f"a{number}", prompt=LIGHT)
        await scene.submit("b", name="b", prompt=LIGHT)
        scene.window = window(branches=6)
        scene.admission.look()
        await settle()
        assert scene.went == ["long", "a0", "b"]


async def test_one_that_is_cancelled_while_it_waits_is_passed_over():
    async with scene_of(window(branches=2), light_tokens=LIGHT_TOKENS) as scene:
        await crowd(scene)
        gone = await scene.submit(name="gone", prompt=LIGHT)
        await scene.submit(name="stays", prompt=LIGHT)
        gone.cancel()
        await asyncio.wait({gone})
        scene.window = window(branches=10)
        scene.admission.look()
        await settle()
        assert scene.went == ["long 0", "stays"]


async def test_no_deadline_of_a_light_prompt_is_given_up_for_what_it_passes():
    async with scene_of(light_tokens=LIGHT_TOKENS) as scene:
        await measured(scene)
        scene.window = window()
        for _ in range(9):
            await scene.submit(name="long", prompt=LONG, max_tokens=100)
        late = scene.now + 5.0
        with pytest.raises(Exhausted):
            await (await scene.submit(name="long", prompt=LONG, deadline=late))
        await scene.submit(name="light", prompt=[5] * 3, deadline=late)
        assert "light" in scene.went
