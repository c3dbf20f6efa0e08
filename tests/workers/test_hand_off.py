"""Both workers, the transfers and the gateway's attempts, in a virtual world: exact or cleanly ended, nothing left."""

import random
from dataclasses import replace

import pytest

from tests.fakes.hash_model import VOCAB, golden
from tests.fakes.world import World


def prompt_of(seed, length):
    return [random.Random(seed).randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 15, 16, 17])
def test_an_answer_is_exact_at_every_prompt_length_around_a_block_border(length):
    world = World(length)
    client = world.submit(prompt_of(length, length), 11)
    world.run()
    assert client.outcome == "length"
    assert client.tokens == golden(prompt_of(length, length), 11)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_count_of_tokens_is_exact_and_one_token_never_involves_the_target(count):
    world = World(count)
    client = world.submit(prompt_of(7, 10), count)
    world.run()
    assert client.tokens == golden(prompt_of(7, 10), count)
    assert (world.decodes[0].steps == 0) == (count == 1)


def test_a_stop_token_that_is_sampled_first_ends_the_answer_and_frees_the_reservation():
    prompt = prompt_of(3, 9)
    first = golden(prompt, 1)[0]
    world = World(3)
    client = world.submit(prompt, 20, stop=frozenset({first}))
    world.run()
    assert (client.tokens, client.outcome) == ([first], "stop")


def faulty(seed, drop=0.03, double=0.03, late=0.1, flip=0.03):
    """A network that loses, doubles, delays and damages messages."""
    dice = random.Random(seed)

    def script(packet):
        if dice.random() < drop:
            return ()
        if dice.random() < flip:
            packet = damaged(packet, dice)
        if dice.random() < late:
            packet = replace(packet, delay=dice.randrange(1, 6))
        return (packet, packet) if dice.random() < double else (packet,)

    return script


def damaged(packet, dice):
    if packet.payload is not None and dice.random() < 0.7:
        wrong = bytearray(packet.payload)
        wrong[dice.randrange(len(wrong))] ^= 1 << dice.randrange(8)
        return replace(packet, payload=memoryview(bytes(wrong)))
    header = bytearray(packet.header)
    header[dice.randrange(len(header))] ^= 1 << dice.randrange(8)
    return replace(packet, header=bytes(header))


@pytest.mark.parametrize("seed", range(40))
def test_many_requests_over_a_faulty_network_are_exact_and_leave_nothing(seed):
    dice = random.Random(seed)
    world = World(
        seed,
        prefills=dice.randrange(1, 3),
        decodes=dice.randrange(1, 3),
        blocks=(dice.randrange(12, 40), dice.randrange(12, 40)),
        script=faulty(seed),
    )
    wanted = []
    for number in range(8):
        prompt = prompt_of(100 * seed + number, dice.randrange(1, 30))
        count = dice.randrange(1, 12)
        sampled = {"temperature": 1.0, "seed": number} if dice.random() < 0.3 else {}
        cancel_at = dice.random() * 0.2 if dice.random() < 0.3 else None
        wanted.append(
            (world.submit(prompt, count, cancel_at=cancel_at, **sampled), prompt, count, bool(sampled))
        )
    world.run()
    for client, prompt, count, sampled in wanted:
        if client.outcome == "cancelled":
            continue
        assert client.outcome == "length", f"seed {seed}"
        expected = alone(prompt, count, client.request) if sampled else golden(prompt, count)
        assert client.tokens == expected, f"seed {seed}"


def alone(prompt, count, request):
    """What an idle world with a perfect network answers."""
    world = World(0)
    client = world.submit(prompt, count, temperature=request.sampling.temperature, seed=request.sampling.seed)
    world.run()
    return client.tokens


@pytest.mark.parametrize("turns", range(0, 60, 3))
def test_a_lost_worker_at_any_moment_costs_nothing_but_time(turns):
    prompt = prompt_of(turns, 21)
    world = World(turns, prefills=2, decodes=2)
    client = world.submit(prompt, 14)
    for _ in range(turns):
        world.turn()
    if client.outcome is None and client.attempt is not None:
        for worker_id in ("p0", "d0", "p1", "d1"):
            if client.outcome is None and client.attempt is not None:
                world.lose(client, worker_id)
    world.run()
    assert client.tokens == golden(prompt, 14)


def test_a_pool_of_one_and_a_half_requests_serves_twenty_one_after_the_other():
    world = World(5, blocks=(9, 9))
    wanted = [(world.submit(prompt_of(n, 20), 6), prompt_of(n, 20)) for n in range(20)]
    world.run()
    for client, prompt in wanted:
        assert client.tokens == golden(prompt, 6)
        assert client.attempts == 1
