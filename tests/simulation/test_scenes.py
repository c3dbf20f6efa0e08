"""Single requests through both workers in a virtual world: exact, and nothing left."""

import random
from dataclasses import replace

import pytest

from decode_worker.policy import DecodePolicy
from engine.sequence import PREEMPTIONS_MAX
from service.orders import Beam
from tests.fakes.forcing_policy import Forcing
from tests.fakes.hash_model import VOCAB, golden
from tests.simulation.faults import Fault, Kind
from tests.simulation.scenario import STARTED_S, Wish, quiet
from tests.simulation.workers import DecodeProcess
from tests.simulation.world import World

NOTICE_S = 0.002


def prompt_of(seed, length):
    return tuple(random.Random(seed).choices(range(VOCAB), k=length))


def wish(seed, length, count, at=STARTED_S, **changes):
    return Wish(gateway="g0", at=at, prompt=prompt_of(seed, length), max_tokens=count, **changes)


def answer_to(world):
    world.run()
    return world.clients[0].tokens


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 15, 16, 17])
def test_an_answer_is_exact_at_every_prompt_length_around_a_block_border(length):
    world = World(quiet([wish(length, length, 11)]))
    assert answer_to(world) == golden(prompt_of(length, length), 11)
    assert world.clients[0].outcome == "length"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_count_of_tokens_is_exact_and_one_token_never_involves_the_target(count):
    world = World(quiet([wish(7, 10, count)]))
    assert answer_to(world) == golden(prompt_of(7, 10), count)
    assert (world.processes["d0"].engine_loop.steps == 0) == (count == 1)


def test_a_stop_token_that_is_sampled_first_ends_the_answer_and_frees_the_reservation():
    first = golden(prompt_of(3, 9), 1)[0]
    world = World(quiet([wish(3, 9, 20, stop=frozenset({first}))]))
    assert answer_to(world) == [first]
    assert world.clients[0].outcome == "stop"


def test_a_stop_token_that_is_sampled_first_is_believed_however_late_it_is_told():
    first = golden(prompt_of(3, 9), 1)[0]
    late = Fault(Kind.SLOW_STREAM, STARTED_S, ("g0", "p0"), 5.0)
    world = World(quiet([wish(3, 9, 20, stop=frozenset({first}))], faults=(late,)))
    assert answer_to(world) == [first]
    assert (world.clients[0].outcome, world.clients[0].attempts) == ("stop", 1)


@pytest.mark.parametrize("turn", range(0, 120, 4))
def test_a_lost_pair_at_any_moment_costs_nothing_but_time(turn):
    world = World(quiet([wish(turn, 21, 14)], prefills=2, decodes=2, budget_tokens=3))
    with world.begun():
        world.until(lambda: world.agenda.now >= STARTED_S)
        for _ in range(turn):
            world.step()
        for name in ("p0", "d0"):
            world.kill(name, stream_notice_s=NOTICE_S, data_notice_s=NOTICE_S)
        world.finish()
    assert world.clients[0].tokens == golden(prompt_of(turn, 21), 14)


def test_a_pool_of_one_and_a_half_requests_serves_twenty_one_after_the_other():
    """Case 21 and case 41."""
    world = World(quiet([wish(n, 20, 6) for n in range(20)], blocks=9))
    world.run()
    for n, client in enumerate(world.clients):
        assert client.tokens == golden(prompt_of(n, 20), 6)
        assert client.attempts == 1


@pytest.mark.parametrize("swap_blocks", [0, 6, 64])
@pytest.mark.parametrize("headroom", [0.0, 0.1])
def test_answers_that_outgrow_the_pool_together_are_given_up_and_resumed_exactly(swap_blocks, headroom):
    """Case 46 and case 55."""
    scenario = quiet(
        [wish(n, 8, 40) for n in range(20)], blocks=18, swap_blocks=swap_blocks, headroom=headroom
    )
    world = World(replace(scenario, lags_s=scenario.lags_s | {"d0": 0.003}))
    world.run()
    for n, client in enumerate(world.clients):
        assert client.tokens == golden(prompt_of(n, 8), 40)
        assert client.attempts - 1 <= client.preemptions <= PREEMPTIONS_MAX
    assert world.counts["given back" if swap_blocks == 0 else "swapped out"] > 0
    assert not world.processes["p0"].worker.tokens().wasted, (
        "no prompt is computed before there is room for it"
    )


@pytest.mark.parametrize("length", range(11, 24))
def test_an_answer_that_is_given_up_at_any_position_goes_on_through_the_gateway(length, monkeypatch):
    """Case 51 and case 52."""
    policy = Forcing(DecodePolicy(budget_tokens=64, seats=8), length)
    made = lambda process: policy.watch(process)  # noqa: E731, PLW0108 (a function, so that it binds)
    monkeypatch.setattr(DecodeProcess, "make_policy", made)
    world = World(quiet([replace(wish(1, 10, 14), temperature=1.0, seed=77)]))
    world.run()
    (client,) = world.clients
    assert (tuple(client.tokens), client.outcome) == (client.choices[0].answer.tokens, "length")
    assert (client.attempts, client.preemptions) == (2, 1)


def test_a_request_that_goes_first_goes_first():
    crowd = [wish(n, 8, 30) for n in range(8)]
    late = [wish(9, 8, 30, priority=5), wish(10, 8, 30, priority=-5)]
    scenario = quiet([*crowd, *late], blocks=12)
    world = World(replace(scenario, lags_s=scenario.lags_s | {"d0": 0.003}))
    ended = []
    world.ended = lambda client, told=world.ended: (ended.append(client.number), told(client))
    world.run()
    assert ended.index(9) < ended.index(8) and ended.index(9) <= 4 and ended[-1] == 8


def test_a_reservation_may_wait_longer_than_a_lease():
    world = World(quiet([wish(0, 20, 6, pause_s=0.01), wish(1, 20, 150)], blocks=43, lease_ms=20))
    world.run()
    assert [client.attempts for client in world.clients] == [1, 1]


def test_an_answer_of_one_token_is_given_without_any_decode_worker():
    world = World(quiet([wish(3, 9, 1)]))
    with world.begun():
        world.kill("d0", stream_notice_s=NOTICE_S, data_notice_s=NOTICE_S)
        world.finish()
    assert world.clients[0].tokens == golden(prompt_of(3, 9), 1)


def test_a_pair_that_is_cut_off_from_each_other_costs_no_request():
    cut = Fault(Kind.STALL_DATA, 0.1, ("p0", "d0"), 60.0)
    wishes = [wish(n, 9 + n, 5, at=STARTED_S + n / 500) for n in range(20)]
    world = World(quiet(wishes, prefills=2, decodes=2, faults=(cut,), seed=5))
    world.run()
    assert [client.outcome for client in world.clients] == ["length"] * 20
    assert max(client.attempts for client in world.clients) == 2


def alone(wishes, pace_s=(0.0, 0.0), **changes):
    """A world in which nobody else computes prompts; the gateway knows, since it has no stream to it."""
    scenario = quiet(wishes, pace_s=pace_s, **changes)
    dead = tuple(Fault(Kind.KILL, 0.01, (name,), 60.0, 0.5) for name in scenario.prefills())
    return World(replace(scenario, faults=dead))


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 17, 40])
@pytest.mark.parametrize("count", [1, 2, 11])
def test_without_any_prefill_worker_answers_are_the_same(length, count):
    world = alone([wish(length, length, count)])
    assert answer_to(world) == golden(prompt_of(length, length), count)
    assert (world.clients[0].outcome, world.clients[0].attempts) == ("length", 1)


def test_many_kinds_of_answers_come_from_decode_workers_alone():
    wishes = [wish(n, 5 + n, 9, temperature=1.0, n=1 + n % 3) for n in range(6)]
    wishes += [replace(wish(9, 12, 6, n=2), beam=Beam(width=3)), wish(10, 7, 1, n=3, temperature=1.0)]
    world = alone(wishes, decodes=2)
    world.run()
    assert {client.outcome for client in world.clients} == {"length"}
    assert world.counts["attempts"] == world.counts["attempts on one worker"] == len(wishes)
    assert world.counts["commits"] == 0


@pytest.mark.parametrize("turn", range(0, 120, 6))
def test_the_last_prefill_worker_may_die_at_any_moment(turn):
    world = World(quiet([wish(turn, 21, 14)], budget_tokens=3))
    with world.begun():
        world.until(lambda: world.agenda.now >= STARTED_S)
        for _ in range(turn):
            world.step()
        world.kill("p0", stream_notice_s=NOTICE_S, data_notice_s=NOTICE_S)
        world.finish()
    assert world.clients[0].tokens == golden(prompt_of(turn, 21), 14)


@pytest.mark.parametrize("turn", range(0, 60, 4))
def test_a_decode_worker_that_serves_alone_may_die_at_any_moment_if_there_is_another(turn):
    world = alone([wish(turn, 21, 14)], decodes=2)
    with world.begun():
        world.until(lambda: world.agenda.now >= STARTED_S)
        for _ in range(turn):
            world.step()
        world.kill("d0", stream_notice_s=NOTICE_S, data_notice_s=NOTICE_S)
        world.finish()
    assert world.clients[0].tokens == golden(prompt_of(turn, 21), 14)


@pytest.mark.parametrize("swap_blocks", [0, 64])
def test_prompts_and_answers_that_outgrow_the_pool_together_end_exactly(swap_blocks):
    world = alone([wish(n, 8, 40) for n in range(20)], blocks=18, swap_blocks=swap_blocks)
    world.run()
    for n, client in enumerate(world.clients):
        assert client.tokens == golden(prompt_of(n, 8), 40)
        assert client.preemptions <= PREEMPTIONS_MAX
    assert world.counts["given back" if swap_blocks == 0 else "swapped out"] > 0


def test_who_has_time_enough_is_not_refused_for_want_of_it():
    wishes = [wish(n, 9, 5, at=STARTED_S + n % 3, deadline_s=30.0) for n in range(9)]
    world = World(quiet(wishes, pace_s=(0.02, 0.002)))
    world.run()
    assert [client.outcome for client in world.clients] == ["length"] * 9
    assert world.counts["refused early"] == 0


def test_once_steps_are_measured_short_prompts_do_not_trouble_the_prefill_worker():
    first, short, long = wish(0, 9, 5), wish(1, 9, 5, at=STARTED_S + 1), wish(2, 60, 5, at=STARTED_S + 2)
    world = World(quiet([first, short, long], pace_s=(0.02, 0.002)))
    world.run()
    assert [client.outcome for client in world.clients] == ["length"] * 3
    assert (world.counts["attempts on one worker"], world.counts["commits"]) == (1, 2)
    assert world.processes["p0"].worker.tokens().computed == 9 + 60
