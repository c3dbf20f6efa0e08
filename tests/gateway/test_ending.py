"""What a process that ends makes of the answers that it has not finished."""

import asyncio

import pytest

from gateway.window import Window
from service.errors import Ending
from tests.gateway.test_orchestrator import ANSWER, SHOWN, Reader, Scene, reach


@pytest.mark.parametrize("phase", SHOWN)
async def test_an_answer_that_outlives_the_process_ends_with_the_reason_after_what_has_come_of_it(phase):
    scene = Scene()
    reader = await reach(scene, phase)
    scene.orchestrator.end()
    with pytest.raises(Ending):
        await reader.done()
    assert [token for _, token in reader.tokens] == list(ANSWER[: SHOWN[phase]])
    scene.assert_nothing_is_left()
    with pytest.raises(Ending):
        await anext(scene.run())


async def test_a_request_that_waits_for_its_turn_ends_with_the_process_too():
    scene = Scene(window=Window(branches=1, prompts=1, prompt_tokens=1))
    first = await reach(scene, "computing")
    waiting = Reader(scene.run())
    while not scene.admission.waiting:
        await asyncio.sleep(0)
    scene.orchestrator.end()
    for reader in (first, waiting):
        with pytest.raises(Ending):
            await reader.done()
    scene.assert_nothing_is_left()
