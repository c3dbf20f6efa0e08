"""Sequences that are given up for want of blocks: exact when they go on, whoever else runs, and nothing is left."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from decode_worker.policy import DecodePolicy
from engine.cache.block_pool import BlockPool
from engine.cache.kv_cache import KVCache
from engine.cache.swap_space import SwapSpace
from engine.core import EngineCore
from engine.policy import Plan, Work
from engine.sampling import Sampler
from engine.scheduling.headroom import Headroom
from engine.sequence import PREEMPTIONS_MAX, SamplingParams, Sequence, State, StopRules
from tests.fakes.forcing_policy import Forcing
from tests.fakes.hash_model import VOCAB, HashRunner, golden, hash_layout
from tests.simulation import oracle

PROMPT = [5, 17, 3, 88, 41, 9, 2]
COUNT = 11
LIMIT = len(PROMPT) + COUNT
POLICY = DecodePolicy(budget_tokens=64, seats=16)
SEEDED = {"temperature": 1.0, "seed": 1234}


def make_core(policy, *, blocks=64, block_size=4, swap_blocks=0, share=0.4):
    cache = KVCache(hash_layout(block_size), blocks)
    core = EngineCore(
        pool=BlockPool(blocks),
        block_size=block_size,
        runner=HashRunner(cache),
        sampler=Sampler(),
        policy=policy,
        swap=SwapSpace(cache, swap_blocks) if swap_blocks else None,
        headroom=Headroom(share, least=0.0),
    )
    if isinstance(policy, Forcing):
        policy.watch(SimpleNamespace(core=core))
    return core


def make_sequence(core, name="s", tokens=PROMPT, limit=LIMIT, *, scope=b"", sampling=(), **fields):
    return Sequence(
        id=(name, 1, 0),
        tokens=list(tokens),
        sampling=SamplingParams(**dict(sampling)),
        stop=StopRules(length_limit=limit),
        chain=core.chain(scope),
        **{"arrived": 0.0, **fields},
    )


def run(core, *, again=None):
    """Until all is over. again: makes the next attempt of one that was given back. Returns all that was sampled."""
    sampled, now = {}, 0.0
    while not core.idle():
        result = core.step(now)
        assert not result.empty(), "nothing can run"
        assert core.ledger().violations == ()
        for output in result.outputs:
            sampled.setdefault(output.sequence.id[0], []).append((output.position, output.sampled.token))
            if output.sequence.end_reason is not None:
                done = core.detach(output.sequence.id)
                core.pool.waive(done.credit)
                core.pool.release(done.table)
        for given_back in result.preempted:
            if given_back.state is State.DETACHED:
                assert given_back.table is None and given_back.credit is None
                core.submit(again(given_back))
        now += 0.01
    ledger = core.ledger()
    assert (ledger.owned, ledger.promised, ledger.owners) == (0, 0, ())
    return sampled


def attempt_after(core):
    """As a gateway makes it: prompt and all that was said, and how often that has happened."""
    return lambda old: make_sequence(
        core,
        old.id[0],
        old.tokens,
        old.stop.length_limit,
        sampling={"temperature": old.sampling.temperature, "seed": old.sampling.seed},
        arrived=old.arrived,
        preemptions=old.preemptions,
    )


def uninterrupted(sampling):
    answer = oracle.answer(
        PROMPT,
        max_tokens=COUNT,
        min_tokens=0,
        stop=frozenset(),
        temperature=sampling.get("temperature", 0.0),
        top_p=1.0,
        top_k=0,
        seed=sampling.get("seed", 0),
    )
    return list(enumerate(answer.tokens, len(PROMPT)))


@pytest.mark.parametrize("length", range(len(PROMPT) + 1, len(PROMPT) + COUNT))
@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("swap_blocks", "scope"), [(0, b""), (16, b""), (16, b"s"), (1, b"s")])
@pytest.mark.parametrize("block_size", [2, 4])
def test_given_up_at_any_position_it_goes_on_with_the_very_same_tokens(
    length, sampling, swap_blocks, scope, block_size
):
    """Case 51 and case 52."""
    core = make_core(Forcing(POLICY, length), block_size=block_size, swap_blocks=swap_blocks)
    core.submit(make_sequence(core, scope=scope, sampling=sampling))
    assert run(core, again=attempt_after(core))["s"] == uninterrupted(sampling)


@pytest.mark.parametrize("swap_blocks", [0, 16])
def test_given_up_twice_in_a_row_it_goes_on_and_may_not_be_given_up_again(swap_blocks):
    core = make_core(Forcing(POLICY, 9, 10), swap_blocks=swap_blocks)
    core.submit(make_sequence(core, sampling=SEEDED))
    assert run(core, again=attempt_after(core))["s"] == uninterrupted(SEEDED)
    steadfast = make_core(Forcing(POLICY, 9))
    steadfast.submit(make_sequence(steadfast, preemptions=PREEMPTIONS_MAX))
    with pytest.raises(AssertionError, match="may not be given up"):
        run(steadfast)


def test_a_prompt_that_is_being_computed_is_not_given_up():
    class Hasty:
        def plan(self, view, now):
            preempt = tuple(one.id for one in view.running)
            return Plan(work=tuple(Work(id=one.id, tokens=2) for one in view.waiting), preempt=preempt)

    core = make_core(Hasty())
    core.submit(make_sequence(core))
    core.step(0.0)
    with pytest.raises(AssertionError, match="may not be given up"):
        core.step(0.0)


@pytest.mark.parametrize("swap_blocks", [0, 3, 64])
@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("scope", [b"", b"s"])
def test_a_pool_of_one_and_a_half_requests_serves_twenty_that_wait(swap_blocks, share, scope):
    """Case 41, and case 42: in one process."""
    policy = DecodePolicy(budget_tokens=16, seats=16, passing_s=0.05)
    core = make_core(policy, blocks=10, swap_blocks=swap_blocks, share=share)
    prompts = [[(n * 7 + k) % VOCAB for k in range(6)] for n in range(20)]
    for n, prompt in enumerate(prompts):
        core.submit(make_sequence(core, f"r{n}", prompt, 26, scope=scope, arrived=n / 1000))
    ended = run_counting(core)
    assert len(ended) == 20
    for name, tokens, _ in ended:
        assert tokens[6:] == golden(prompts[int(name[1:])], 20)
    times = [preemptions for _, _, preemptions in ended]
    assert max(times) <= PREEMPTIONS_MAX
    assert sum(times) > 0 or share > 0, "memory was short"


def run_counting(core):
    """(name, tokens, preemptions) of all, in the order in which they end."""
    ended, now = [], 0.0
    while not core.idle():
        result = core.step(now)
        assert not result.empty() and core.ledger().violations == ()
        for output in result.outputs:
            if output.sequence.end_reason is not None:
                done = core.detach(output.sequence.id)
                core.pool.waive(done.credit)
                core.pool.release(done.table)
                ended.append((done.id[0], done.tokens, done.preemptions))
        for old in result.preempted:
            if old.state is State.DETACHED:
                core.submit(replace(old, state=State.WAITING, computed=0, cached=0))
        now += 0.01
    return ended


def test_a_sequence_that_leaves_while_it_is_swapped_out_leaves_nothing():
    core = make_core(Forcing(POLICY, 9), swap_blocks=8)
    core.submit(make_sequence(core, scope=b"s"))
    while not core.swapping():
        core.step(0.0)
    (owner,) = core.ledger().owners
    assert (owner.owner.kind, owner.owner.request_id, owner.blocks) == ("swapped", "s", 2)
    gone = core.detach(("s", 1, 0))
    assert gone.table is None and gone.credit is None
    assert core.ledger().owners == () and core.idle() and not core.swapping()


def test_what_is_still_cached_is_not_copied_back():
    core = make_core(Forcing(POLICY, 16), swap_blocks=8)
    copied = []
    core._swap.restore = lambda who, first, blocks, restore=core._swap.restore: (
        copied.append(len(blocks)),
        restore(who, first, blocks),
    )
    core.submit(make_sequence(core, scope=b"s"))
    assert run(core)["s"] == uninterrupted({})
    assert copied == [1], "of four blocks the three full ones were still there"


def test_the_victim_is_the_one_that_costs_least_and_the_first_runs_on():
    core = make_core(DecodePolicy(budget_tokens=64, seats=8), blocks=9, share=0.0)
    for name, length, arrived in (("first", 4, 0.0), ("long", 12, 1.0), ("short", 4, 2.0)):
        core.submit(make_sequence(core, name, range(length), length + 12, arrived=arrived))
    given_up = []
    while not given_up:
        given_up += [each.id[0] for each in core.step(9.0).preempted]
    assert given_up == ["short"]


def test_blocks_that_were_promised_are_no_longer_needed_to_start():
    """Whole answers of ten blocks each, in twelve blocks: both run at once."""
    core = make_core(DecodePolicy(budget_tokens=64, seats=8), blocks=12, share=0.0)
    for name in "ab":
        core.submit(make_sequence(core, name, PROMPT, 40))
    core.step(0.0)
    assert len(core.view().running) == 2
