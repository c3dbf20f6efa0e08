import random

import pytest

from decode_worker.policy import DecodePolicy
from engine.cache.block_pool import BlockPool
from engine.cache.block_table import Owner, OwnerKind
from engine.cache.kv_cache import KVCache
from engine.core import EngineCore
from engine.policy import Plan, View, Work
from engine.sampling import Sampler
from engine.sequence import EndReason, SamplingParams, Sequence, StopRules
from prefill_worker.policy import PrefillPolicy
from tests.fakes.hash_model import VOCAB, HashRunner, golden, hash_layout


def make_core(policy, *, blocks=64, block_size=4):
    cache = KVCache(hash_layout(block_size), blocks)
    runner = HashRunner(cache)
    pool = BlockPool(blocks)
    core = EngineCore(pool=pool, block_size=block_size, runner=runner, sampler=Sampler(), policy=policy)
    return core, runner


def make_sequence(name, prompt, count, *, arrived=0.0, **rules):
    return Sequence(
        id=(name, 1, 0),
        tokens=list(prompt),
        sampling=SamplingParams(**rules.pop("sampling", {})),
        stop=StopRules(length_limit=len(prompt) + count, **rules),
        arrived=arrived,
    )


def run_to_end(core):
    now, steps = 0.0, 0
    while not core.idle():
        result = core.step(now)
        assert not result.empty()
        assert core.pool.ledger().violations == ()
        now, steps = now + 0.01, steps + 1
        assert steps < 10_000
    return steps


def prompt_of(seed, length):
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.mark.parametrize("budget", [1, 3, 16, 1000])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_each_answer_is_the_golden_one_whatever_the_budget_and_the_block_size(budget, block_size):
    policy = DecodePolicy(budget_tokens=budget, seats=8)
    core, _ = make_core(policy, blocks=256, block_size=block_size)
    sequences = [make_sequence(f"r{n}", prompt_of(n, 1 + 5 * n), 3 + n) for n in range(6)]
    for sequence in sequences:
        core.submit(sequence)
    run_to_end(core)
    for n, sequence in enumerate(sequences):
        prompt = prompt_of(n, 1 + 5 * n)
        assert sequence.tokens[len(prompt) :] == golden(prompt, 3 + n)
        assert sequence.end_reason is EndReason.LENGTH


def test_a_started_sequence_gives_everything_back_when_it_is_detached():
    core, _ = make_core(DecodePolicy(budget_tokens=4, seats=4))
    core.submit(make_sequence("a", prompt_of(1, 10), 5))
    core.step(0.0)
    sequence = core.detach(("a", 1, 0))
    core.pool.waive(sequence.credit)
    core.pool.release(sequence.table)
    ledger = core.pool.ledger()
    assert (ledger.free, ledger.owned, ledger.promised) == (64, 0, 0)
    assert core.idle()


def test_a_stop_token_ends_a_sequence_and_min_length_puts_it_off():
    prompt = prompt_of(5, 6)
    answer = golden(prompt, 12)
    stop = answer[2]
    core, _ = make_core(DecodePolicy(budget_tokens=64, seats=4))
    ended = make_sequence("ended", prompt, 12, stop_token_ids=frozenset({stop}))
    later = make_sequence("later", prompt, 12, stop_token_ids=frozenset({stop}), min_length=len(prompt) + 4)
    core.submit(ended)
    core.submit(later)
    run_to_end(core)
    assert ended.tokens[len(prompt) :] == answer[: answer.index(stop) + 1]
    assert ended.end_reason is EndReason.STOP
    assert stop not in later.tokens[len(prompt) : len(prompt) + 4]


def test_an_adopted_sequence_goes_on_where_another_engine_stopped():
    prompt = prompt_of(9, 13)
    source, _ = make_core(PrefillPolicy(budget_tokens=5, seats=4))
    target, _ = make_core(DecodePolicy(budget_tokens=64, seats=4))
    first = make_sequence("s", prompt, 1)
    source.submit(first)
    run_to_end(source)
    owner = Owner(OwnerKind.RESERVATION, "s")
    credit = target.pool.grant(owner, 8)
    table = target.pool.allocate(owner, len(first.table), credit)
    for ours, theirs in zip(table.ids(), first.table.ids(), strict=True):
        target._runner.cache.block_view(ours)[:] = source._runner.cache.block_view(theirs)
    second = make_sequence("s", prompt, 9)
    second.tokens = list(first.tokens)
    second.computed, second.table, second.credit = len(prompt), table, credit
    target.adopt(second)
    run_to_end(target)
    assert second.tokens[len(prompt) :] == golden(prompt, 9)


def release(core, sequence):
    core.detach(sequence.id)
    core.pool.waive(sequence.credit)
    core.pool.release(sequence.table)


def forked(core, prompt, count, seeds, *, blocks_each):
    """The prompt once, with a first token for each seed, and then a running branch for each of them."""
    params = [SamplingParams(temperature=1.0, seed=seed, logprobs=2) for seed in seeds]
    trunk = make_sequence("trunk", prompt, 1)
    trunk.sampling, trunk.twins = params[0], tuple(params[1:])
    core.submit(trunk)
    outputs = []
    while not core.idle():
        outputs += core.step(0.0).outputs
    (output,) = outputs
    core.detach(trunk.id)
    core.pool.waive(trunk.credit)
    branches = []
    for n, (sampling, first) in enumerate(zip(params, (output.sampled, *output.twins), strict=True)):
        branch = make_sequence(f"branch{n}", prompt, count)
        branch.sampling, branch.computed = sampling, len(prompt)
        branch.tokens.append(first.token)
        branch.table = core.pool.fork(trunk.table, Owner(OwnerKind.SEQUENCE, branch.id[0]))
        branch.credit = core.pool.grant(branch.table.owner, blocks_each)
        branches.append(branch)
    core.pool.release(trunk.table)
    for branch in branches:
        core.adopt(branch)
    return branches


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 13])
@pytest.mark.parametrize("budget", [1, 2, 64])
def test_branches_of_one_prompt_are_what_single_sequences_are(length, budget):
    """Whoever writes first into the block that all share copies it, and the last one does not."""
    prompt, seeds = prompt_of(length, length), (1, 2, 3)
    core, runner = make_core(DecodePolicy(budget_tokens=budget, seats=8))
    branches = forked(core, prompt, 9, seeds, blocks_each=4)
    run_to_end(core)
    for seed, branch in zip(seeds, branches, strict=True):
        alone, _ = make_core(DecodePolicy(budget_tokens=64, seats=8))
        single = make_sequence("s", prompt, 9, sampling={"temperature": 1.0, "seed": seed, "logprobs": 2})
        alone.submit(single)
        run_to_end(alone)
        assert branch.tokens == single.tokens
    assert len({tuple(branch.tokens) for branch in branches}) == 3
    computed = sum(batch.num_tokens() for batch in runner.batches)
    assert computed == length + 3 * 8, "the prompt is computed once"
    copies = sum(len(batch.copies) for batch in runner.batches)
    assert copies == (2 if length % 4 else 0)
    for branch in branches:
        release(core, branch)
    assert core.pool.ledger().owned == core.pool.ledger().promised == 0


def test_a_branch_that_leaves_first_takes_nothing_from_the_others():
    prompt = prompt_of(6, 6)
    core, runner = make_core(DecodePolicy(budget_tokens=64, seats=8))
    gone, stays = forked(core, prompt, 9, (1, 2), blocks_each=4)
    release(core, gone)
    run_to_end(core)
    alone, _ = make_core(DecodePolicy(budget_tokens=64, seats=8))
    single = make_sequence("s", prompt, 9, sampling={"temperature": 1.0, "seed": 2})
    alone.submit(single)
    run_to_end(alone)
    assert stays.tokens == single.tokens
    assert all(batch.copies == () for batch in runner.batches), "nobody else has the block any more"


class Scripted:
    """A policy that proposes what the test says."""

    def __init__(self, *plans):
        self._plans = list(plans)

    def plan(self, view: View, now: float) -> Plan:
        return self._plans.pop(0)


def work(name, count):
    return Work(id=(name, 1, 0), tokens=count)


@pytest.mark.parametrize(
    "bad",
    [
        Plan(work=(work("a", 0),)),
        Plan(work=(work("a", 11),)),
        Plan(work=(work("a", 1), work("a", 1))),
    ],
)
def test_a_plan_that_asks_for_work_that_is_not_there_is_refused_and_moves_no_block(bad):
    core, runner = make_core(Scripted(bad))
    core.submit(make_sequence("a", prompt_of(1, 10), 2))
    with pytest.raises(AssertionError):
        core.step(0.0)
    assert runner.batches == []


def test_a_plan_that_starts_more_than_fits_is_refused():
    core, _ = make_core(Scripted(Plan(work=(work("a", 1), work("b", 1)))), blocks=4)
    core.submit(make_sequence("a", prompt_of(1, 10), 2))
    core.submit(make_sequence("b", prompt_of(2, 10), 2))
    with pytest.raises(AssertionError, match="available"):
        core.step(0.0)


def test_a_small_pool_serves_many_sequences_one_after_the_other():
    core, _ = make_core(DecodePolicy(budget_tokens=16, seats=16), blocks=6)
    sequences = [make_sequence(f"r{n}", prompt_of(n, 7), 6, arrived=float(n)) for n in range(12)]
    for sequence in sequences:
        core.submit(sequence)
    finished = 0
    now = 0.0
    while not core.idle():
        for output in core.step(now).outputs:
            if output.sequence.end_reason is not None:
                done = core.detach(output.sequence.id)
                core.pool.waive(done.credit)
                core.pool.release(done.table)
                finished += 1
        now += 0.01
    assert finished == 12
    assert core.pool.ledger().owned == 0
    for n, sequence in enumerate(sequences):
        assert sequence.tokens[7:] == golden(prompt_of(n, 7), 6)


def test_seeded_sampling_does_not_depend_on_what_else_is_in_the_batch():
    params = {"temperature": 1.0, "seed": 11}
    alone, _ = make_core(DecodePolicy(budget_tokens=64, seats=16))
    reference = make_sequence("x", prompt_of(3, 9), 20, sampling=params)
    alone.submit(reference)
    run_to_end(alone)
    crowded, _ = make_core(DecodePolicy(budget_tokens=3, seats=16), blocks=256)
    watched = make_sequence("x", prompt_of(3, 9), 20, sampling=params)
    for n in range(10):
        crowded.submit(
            make_sequence(f"o{n}", prompt_of(n, 5 + n), 10, sampling={"temperature": 1.0, "seed": n})
        )
    crowded.submit(watched)
    run_to_end(crowded)
    assert watched.tokens == reference.tokens
