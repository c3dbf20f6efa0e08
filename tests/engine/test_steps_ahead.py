"""Steps that are begun before anybody has read what the last one drew: the same answers, token by token."""

import random

import pytest
import torch

from decode_worker.policy import DecodePolicy
from engine.cache.block_pool import BlockPool
from engine.cache.kv_cache import KVCache
from engine.cache.prefix_chain import prefix_scope
from engine.cache.swap_space import SwapSpace
from engine.core import EngineCore
from engine.errors import NonFiniteLogits
from engine.sampling import Sampler
from engine.scheduling.pace import Load
from engine.sequence import EndReason, SamplingParams, Sequence, State, StopRules
from tests.fakes.hash_model import VOCAB, HashRunner, golden, hash_layout

SCOPE = prefix_scope(bytes(32), model="m", tenant="t", salt="s")


class Watched(HashRunner):
    """Counts the batches in which some token was not read yet."""

    unread = 0

    def run(self, batch):
        self.unread += batch.unread is not None
        return super().run(batch)


class Device(Sampler):
    """One whose tokens are not there before somebody waits for them."""

    def begin(self, *asked):
        return super().begin(*asked)._replace(settled=False)


def make_core(*, blocks=64, ahead=True, swap_blocks=0, seats=8, budget=16, sampler=None):
    cache = KVCache(hash_layout(4), blocks)
    runner = Watched(cache)
    core = EngineCore(
        pool=BlockPool(blocks),
        block_size=4,
        runner=runner,
        sampler=sampler or Sampler(),
        policy=DecodePolicy(budget_tokens=budget, seats=seats),
        swap=SwapSpace(cache, swap_blocks) if swap_blocks else None,
        ahead=ahead,
    )
    return core, runner


def sequence_of(core, name, prompt, count, *, arrived=0.0, sampling=None, **rules):
    return Sequence(
        id=(name, 1, 0),
        tokens=list(prompt),
        sampling=SamplingParams(**(sampling or {})),
        stop=StopRules(length_limit=len(prompt) + count, **rules),
        arrived=arrived,
        prompt_tokens=len(prompt),
        chain=core.chain(SCOPE),
    )


def prompt_of(seed, length):
    return random.Random(seed).choices(range(VOCAB), k=length)


def run(core, until=lambda step: False):
    """Steps until nothing is left, or as long as the test says. Every output, in order."""
    outputs, steps = [], 0
    while not core.idle() and not until(steps):
        result = core.step(0.01 * steps)
        assert not result.empty()
        assert core.pool.ledger().violations == ()
        outputs += result.outputs
        steps += 1
        assert steps < 10_000
    return outputs


def release(core, sequence):
    core.detach(sequence.id)
    core.pool.waive(sequence.credit)
    core.pool.release(sequence.table)


def test_answers_are_the_golden_ones_and_their_positions_count_up_while_tokens_are_unread():
    core, runner = make_core()
    sequences = [sequence_of(core, f"r{n}", prompt_of(n, 1 + 5 * n), 3 + n) for n in range(6)]
    for sequence in sequences:
        core.submit(sequence)
    outputs = run(core)
    assert runner.unread > 0
    for n, sequence in enumerate(sequences):
        prompt = prompt_of(n, 1 + 5 * n)
        own = [each for each in outputs if each.sequence is sequence]
        assert [each.sampled.token for each in own] == golden(prompt, 3 + n) == sequence.tokens[len(prompt) :]
        assert [each.position for each in own] == list(range(len(prompt), len(prompt) + 3 + n))
        assert sequence.end_reason is EndReason.LENGTH and sequence.pending == 0
        release(core, sequence)
    assert core.pool.ledger().owned == core.pool.ledger().promised == 0


def test_the_token_that_ends_an_answer_is_its_last_although_another_step_had_begun():
    prompt = prompt_of(5, 6)
    answer = golden(prompt, 12)
    core, runner = make_core()
    ended = sequence_of(core, "ended", prompt, 12, stop_token_ids=frozenset({answer[5]}))
    other = sequence_of(core, "other", prompt_of(6, 9), 20)
    core.submit(ended)
    core.submit(other)
    outputs = run(core)
    told = [each.sampled.token for each in outputs if each.sequence is ended]
    assert told == answer[: answer.index(answer[5]) + 1] == ended.tokens[6:]
    assert ended.state is State.FINISHED and ended.end_reason is EndReason.STOP
    assert other.tokens[9:] == golden(prompt_of(6, 9), 20)
    computed = sum(batch.num_tokens() for batch in runner.batches)
    assert computed == len(prompt) + len(told) + 9 + 19, "one token was computed in vain, no more"


def test_nothing_is_computed_for_an_answer_that_has_come_to_its_length():
    core, runner = make_core()
    core.submit(sequence_of(core, "a", prompt_of(1, 5), 4))
    run(core)
    assert sum(batch.num_tokens() for batch in runner.batches) == 5 + 3


@pytest.mark.parametrize(
    "needs",
    [
        {"sampling": {"presence_penalty": 0.5}},
        {"sampling": {"logprobs": 2}},
        {"sampling": {"logit_bias": ((3, 5.0),)}},
        {"min_length": 1000, "stop_token_ids": frozenset({1})},
    ],
)
def test_while_somebody_needs_every_token_read_no_step_is_begun_ahead(needs):
    alone, _ = make_core(ahead=False)
    wanted = sequence_of(alone, "s", prompt_of(3, 6), 8, **needs)
    alone.submit(wanted)
    run(alone)
    core, runner = make_core()
    core.submit(sequence_of(core, "before", prompt_of(2, 6), 30))
    run(core, until=lambda step: step == 5)
    assert runner.unread > 0
    begun = runner.unread
    needing = sequence_of(core, "s", prompt_of(3, 6), 8, **needs)
    core.submit(needing)
    run(core, until=lambda step: needing.state is State.FINISHED)
    assert runner.unread == begun
    assert needing.tokens == wanted.tokens
    run(core)
    assert runner.unread > begun


def test_one_that_is_taken_out_while_its_token_is_drawn_gets_nothing_and_gives_back_all():
    core, _ = make_core(blocks=20)
    gone = sequence_of(core, "gone", prompt_of(1, 6), 20)
    stays = sequence_of(core, "stays", prompt_of(2, 6), 20)
    core.submit(gone)
    core.submit(stays)
    run(core, until=lambda step: step == 6)
    assert gone.pending == 1
    known = list(gone.tokens)
    release(core, gone)
    late = sequence_of(core, "late", prompt_of(4, 20), 6)
    core.submit(late)
    outputs = run(core)
    assert gone.tokens == known and not [each for each in outputs if each.sequence is gone]
    assert stays.tokens[6:] == golden(prompt_of(2, 6), 20)
    assert late.tokens[20:] == golden(prompt_of(4, 20), 6)


def test_an_idle_engine_has_told_everything():
    core, _ = make_core()
    core.submit(sequence_of(core, "a", prompt_of(1, 5), 1))
    first = core.step(0.0)
    assert not first.outputs and not core.idle()
    second = core.step(0.01)
    assert [each.sampled.token for each in second.outputs] == golden(prompt_of(1, 5), 1)
    assert second.landed and not second.empty() and core.idle()


def test_a_token_that_nobody_wants_any_more_does_not_stop_the_engine():
    """The step that lands it did something, though it tells nothing."""
    core, _ = make_core()
    gone = sequence_of(core, "gone", prompt_of(1, 5), 9)
    core.submit(gone)
    core.step(0.0)
    release(core, gone)
    core.submit(sequence_of(core, "next", prompt_of(2, 5), 2, sampling={"logprobs": 1}))
    result = core.step(0.01)
    assert result.landed and not result.empty() and not result.outputs


def test_one_who_waits_for_a_seat_and_needs_every_token_read_stops_nobody_before_it_has_one():
    core, runner = make_core(seats=1)
    first = sequence_of(core, "first", prompt_of(1, 5), 12)
    picky = sequence_of(core, "picky", prompt_of(2, 5), 4, arrived=1.0, sampling={"logprobs": 1})
    core.submit(first)
    core.submit(picky)
    run(core, until=lambda step: first.state is State.FINISHED)
    assert runner.unread == 11, "of twelve steps all but the first go on from what nobody had read"
    release(core, first)
    run(core)
    assert runner.unread == 11 and picky.tokens[5:] == golden(prompt_of(2, 5), 4)


@pytest.mark.parametrize("gone", [False, True])
def test_a_row_without_numbers_fails_the_engine_only_where_somebody_wants_its_token(gone):
    core, runner = make_core()
    broken, fine = (
        sequence_of(core, name, prompt_of(at, 4), 9) for at, name in enumerate(("broken", "fine"))
    )
    core.submit(broken)
    core.submit(fine)
    run(core, until=lambda step: step == 3)
    compute = runner.run
    runner.run = lambda batch: compute(batch).index_fill_(0, torch.tensor([0]), torch.nan)
    core.step(1.0)
    runner.run = compute
    if gone:
        release(core, broken)
        run(core)
        assert fine.tokens[4:] == golden(prompt_of(1, 4), 9)
    else:
        with pytest.raises(NonFiniteLogits, match="row 0"):
            run(core)


def loads(core):
    """Of each step: what its time went to, and whether that was begun in an earlier one."""
    told = []
    while not core.idle():
        result = core.step(0.0)
        told.append((result.load, result.overlapped))
    return told


PROMPT_LOADS = [Load(0, 8), Load(0, 8), Load(0, 2)]


def test_a_device_that_computes_beside_the_host_is_timed_when_it_is_known_to_be_done():
    core, _ = make_core(sampler=Device(), budget=8)
    core.submit(sequence_of(core, "a", prompt_of(1, 18), 3))
    assert loads(core) == [(None, False), *((load, True) for load in (*PROMPT_LOADS, Load(1, 0), Load(1, 0)))]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_device_that_computes_at_once_is_timed_in_the_step_that_begins(ahead):
    core, _ = make_core(ahead=ahead, budget=8)
    core.submit(sequence_of(core, "a", prompt_of(1, 18), 3))
    told = [(load, False) for load in (*PROMPT_LOADS, Load(1, 0), Load(1, 0))]
    assert loads(core) == told + [(None, False)] * ahead


def test_a_step_that_draws_nothing_is_waited_for_where_every_step_is():
    """Else its time would be the next one's."""
    waited = []

    class Waiting(Sampler):
        def begin(self, logits, params, positions):
            waited.append(len(params))
            return super().begin(logits, params, positions)

    core, _ = make_core(ahead=False, budget=8, sampler=Waiting())
    core.submit(sequence_of(core, "a", prompt_of(1, 18), 2))
    assert [load for load, _ in loads(core)] == [*PROMPT_LOADS, Load(1, 0)]
    assert waited == [0, 0]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("swap_blocks", [0, 12])
def test_any_workload_gives_what_it_gives_when_every_token_is_read_at_once(seed, swap_blocks):
    """Sizes, limits, stops, temperatures, penalties and prefixes at random, in a pool that is too small for all."""
    answers = [workload(seed, swap_blocks, ahead=ahead) for ahead in (False, True)]
    assert answers[0] == answers[1]


def workload(seed, swap_blocks, *, ahead):
    dice = random.Random(seed)
    core, runner = make_core(blocks=24, ahead=ahead, swap_blocks=swap_blocks, seats=5, budget=9)
    shared = prompt_of(seed, 8)
    everybody = []
    for number in range(10):
        prompt = (shared if dice.random() < 0.5 else []) + prompt_of(dice.random(), dice.randint(1, 14))
        sampling = {"temperature": dice.choice((0.0, 1.0)), "seed": number}
        if dice.random() < 0.15:
            sampling["frequency_penalty"] = 0.7
        stop = frozenset(dice.sample(range(VOCAB), dice.choice((0, 0, 8))))
        rules = {"arrived": float(number), "sampling": sampling, "stop_token_ids": stop}
        everybody.append(sequence_of(core, f"r{number}", prompt, dice.randint(1, 25), **rules))
    answers, waiting, steps = {}, list(everybody), 0
    while waiting or not core.idle():
        while waiting and dice.random() < 0.6:
            core.submit(waiting.pop(0))
        result = core.step(0.01 * steps)
        assert core.pool.ledger().violations == ()
        steps += 1
        assert steps < 5_000
        lost = (one for one in result.preempted if one.state is State.DETACHED)
        waiting.extend(begun_again(core, one) for one in lost)
        for output in result.outputs:
            sequence = output.sequence
            if sequence.end_reason is not None:
                answers[sequence.id[0]] = (sequence.tokens, sequence.end_reason)
                release(core, sequence)
    assert not ahead or runner.unread > 0
    return answers


def begun_again(core, given_up):
    """As a gateway does it: all its tokens are known now."""
    name, attempt, choice = given_up.id
    return Sequence(
        id=(name, attempt + 1, choice),
        tokens=list(given_up.tokens),
        sampling=given_up.sampling,
        stop=given_up.stop,
        arrived=given_up.arrived,
        prompt_tokens=given_up.prompt_tokens,
        preemptions=given_up.preemptions,
        chain=core.chain(SCOPE),
    )
