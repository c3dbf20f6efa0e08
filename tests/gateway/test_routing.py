"""Which workers an orchestrator takes: those that have the prompt unless they are too busy, and no pair that has just
failed.
"""

from engine.cache.prefix_chain import PrefixChain
from gateway.breakers import FIRST_S
from service.orders import AttemptKey
from service.reports import EndCause
from tests.fakes.scripted_workers import BLOCK_SIZE, Say
from tests.gateway.test_orchestrator import ANSWER, Reader, Scene, reserved, served


async def reserved_again(worker):
    """As `reserved`, after the end of what it was asked before."""
    await worker.hear("cancel")
    return await reserved(worker)


async def names_in_the_order_to(worker, prompt):
    """The names of all full blocks of this prompt, in the scope of the request that is asked of the worker next."""
    order = (await worker.hear("reserve")).sequence
    links = PrefixChain(order.cache_scope, BLOCK_SIZE).links(prompt, 0, len(prompt) // BLOCK_SIZE)
    return [link.hash for link in links]


async def test_a_request_goes_to_the_pair_that_has_its_prompt_cached():
    scene, prompt = Scene(2, 2), tuple(range(41))
    reader = Reader(scene.run(prompt=prompt))
    hashes = await names_in_the_order_to(scene.d[0], prompt)
    await reader.leave()
    scene.p[1].tell_cached(hashes)
    scene.d[1].tell_cached(hashes)
    for _ in range(2):  # the second time they are those that were picked last
        reader = Reader(scene.run(prompt=prompt))
        say = await reserved(scene.d[1])
        await scene.p[1].hear("submit")
        assert scene.p[1].record.view().queued_tokens == 1, "what is cached is not queued for"
        scene.p[1].say(say.token(0, ANSWER[0]))
        await reader.saw(1)
        await reader.leave()
        assert [(await each.hear("cancel")).attempt for each in (scene.d[1], scene.p[1])] == [1, 1]
    scene.assert_nothing_is_left()


async def test_many_at_once_of_one_prompt_do_not_leave_a_worker_idle():
    scene, prompt = Scene(2, 1), tuple(range(41))
    first = Reader(scene.run(prompt=prompt))
    scene.p[0].tell_cached((await names_in_the_order_to(scene.d[0], prompt))[:5])
    readers = [first]
    for _ in range(6):
        readers.append(Reader(scene.run(prompt=prompt)))
        await scene.d[0].hear("reserve")
    assert min(worker.record.view().queued_tokens for worker in scene.p) > 0
    for reader in readers:
        await reader.leave()


async def test_a_pair_that_failed_costs_one_attempt_and_not_one_of_each_request():
    scene = Scene(1, 2)
    reader = Reader(scene.run())
    order = (await scene.d[0].hear("reserve")).sequence
    say = Say(AttemptKey(request_id=order.request_id, attempt=1))
    scene.d[0].say(say.reserved, say.ended(EndCause.TRANSFER_FAILED, "no endpoint answers"))
    await scene.p[0].hear("submit")
    await scene.p[0].hear("cancel")
    await served(scene, 0, 1)
    await reader.done()
    for _ in range(3):
        reader = Reader(scene.run())
        assert (await served(scene, 0, 1)).key.attempt == 1
        await reader.done()
    scene.clock.now += FIRST_S
    finding_out = Reader(scene.run())
    say = await reserved_again(scene.d[0])
    scene.d[1].load(running_sequences=5, free_blocks=100)
    meanwhile = Reader(scene.run())
    await scene.p[0].hear("submit")
    await served(scene, 0, 1)
    await meanwhile.done()
    scene.d[1].load(free_blocks=100)
    scene.p[0].say(say.token(0, ANSWER[0]))
    scene.d[0].say(say.adopted)
    await finding_out.saw(1)
    await finding_out.leave()
    reader = Reader(scene.run())
    assert (await reserved_again(scene.d[0])).key.attempt == 1, "it works again"
    await reader.leave()
    scene.assert_nothing_is_left()
