"""Every token that a worker computed was delivered, wasted for a named cause, or is live."""

import random

from service.token_books import TokenBooks, Waste
from tests.fakes.hash_model import VOCAB
from tests.fakes.world import GATEWAY, World


def prompt_of(seed, length):
    return [random.Random(seed).randrange(VOCAB) for _ in range(length)]


def test_books_that_do_not_add_up_say_so():
    books = TokenBooks()
    books.compute(10)
    books.deliver(4)
    books.waste(Waste.CANCELLED, 3)
    assert books.counts(live=3).balanced()
    assert not books.counts(live=2).balanced()


def test_a_finished_request_has_wasted_nothing():
    world = World(1)
    world.submit(prompt_of(1, 20), 6)
    world.run()
    source, target = world.prefills[0].worker.tokens(), world.decodes[0].worker.tokens()
    assert (source.computed, source.delivered, source.live, source.wasted) == (20, 20, 0, {})
    assert (target.computed, target.delivered, target.live, target.wasted) == (5, 5, 0, {})


def test_a_cancelled_prompt_is_wasted_as_far_as_it_was_computed():
    world = World(2, budget_tokens=2)
    client = world.submit(prompt_of(2, 40), 6)
    node = world.prefills[0]
    while node.worker.tokens().computed < 10:
        world.turn()
    assert node.worker.tokens().live >= 10
    client.attempt.close()
    client.outcome = "cancelled"
    world.run()
    counts = node.worker.tokens()
    assert counts.wasted == {Waste.CANCELLED: counts.computed}
    assert counts.computed < 40


def test_what_a_lost_gateway_asked_for_is_wasted_by_that_name():
    world = World(3, budget_tokens=2)
    client = world.submit(prompt_of(3, 40), 6)
    node = world.prefills[0]
    while node.worker.tokens().computed < 10:
        world.turn()
    client.outcome = "lost"
    for each in (*world.prefills, *world.decodes):
        each.worker.drop(GATEWAY)
    world.run()
    counts = node.worker.tokens()
    assert counts.wasted == {Waste.GATEWAY_LOST: counts.computed}
