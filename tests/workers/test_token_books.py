"""Every token that a worker computed was delivered, wasted for a named cause, or is live."""

import random

import pytest

from service.token_books import TokenBooks, Waste
from tests.fakes.hash_model import VOCAB, golden
from tests.fakes.world import GATEWAY, World


def prompt_of(seed, length):
    return random.Random(seed).choices(range(VOCAB), k=length)


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


@pytest.mark.parametrize("ahead", [False, True])
def test_what_was_computed_before_anybody_knew_that_the_answer_had_ended_is_no_delivery(ahead):
    """The prompt's first token is the other worker's: three are computed here for the four that are told."""
    prompt = prompt_of(4, 20)
    answer = golden(prompt, 4)
    assert answer[3] not in answer[:3]
    world = World(4, ahead=ahead)
    world.submit(prompt, 30, stop=frozenset({answer[3]}))
    world.run()
    counts = world.decodes[0].worker.tokens()
    assert world.clients[0].tokens == answer
    assert (counts.delivered, counts.live) == (3, 0) and counts.balanced()
    assert counts.wasted == ({Waste.TOO_FAR: 1} if ahead else {})


def test_what_is_drawn_for_one_that_was_cancelled_meanwhile_is_wasted_and_what_is_not_read_yet_is_live():
    world = World(5, ahead=True)
    client = world.submit(prompt_of(5, 8), 200)
    worker = world.decodes[0].worker
    while worker.tokens().delivered < 10:
        world.turn()
    assert worker.tokens().live == 1
    client.attempt.close()
    client.outcome = "cancelled"
    world.run()
    counts = worker.tokens()
    assert counts.wasted == {Waste.TOO_FAR: 1} and counts.live == 0 and counts.balanced()
