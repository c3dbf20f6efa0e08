"""An engine that keeps prefixes: the answers are those of one that does not, and nothing is computed twice."""

import random

import pytest

from decode_worker.policy import DecodePolicy
from engine.cache.block_pool import BlockPool
from engine.cache.kv_cache import KVCache
from engine.core import EngineCore
from engine.sampling import Sampler
from engine.sequence import SamplingParams, Sequence, StopRules
from prefill_worker.policy import PrefillPolicy
from tests.fakes.hash_model import VOCAB, HashRunner, golden, hash_layout

SIZE = 4
SCOPE = b"one tenant"
AROUND_BLOCKS = sorted({SIZE * blocks + more for blocks in (1, 2, 3, 4) for more in (-1, 0, 1)})
GREEDY, SEEDED = {"logprobs": 2}, {"logprobs": 2, "temperature": 1.0, "seed": 5}


def prompt_of(seed, length):
    dice = random.Random(f"{seed}")
    return [dice.randrange(VOCAB) for _ in range(length)]


class Rig:
    """heard: per name what was sampled."""

    def __init__(self, *, blocks=64, budget=64, seats=8, caching=True, policy=DecodePolicy):
        cache = KVCache(hash_layout(SIZE), blocks)
        self.runner = HashRunner(cache)
        self.core = EngineCore(
            pool=BlockPool(blocks),
            block_size=SIZE,
            runner=self.runner,
            sampler=Sampler(),
            policy=policy(budget_tokens=budget, seats=seats),
            caching=caching,
        )
        self.now, self.heard, self.live = 0.0, {}, {}

    def submit(self, name, prompt, count=5, scope=SCOPE, sampling=GREEDY):
        sequence = Sequence(
            id=(name, 1, 0),
            tokens=list(prompt),
            sampling=SamplingParams(**sampling),
            stop=StopRules(length_limit=len(prompt) + count),
            arrived=self.now,
            chain=self.core.chain(scope),
        )
        self.live[name], self.heard[name] = sequence, []
        self.core.submit(sequence)
        return sequence

    def step(self):
        """One step; what has ended is let go. Returns how many tokens were computed."""
        result = self.core.step(self.now)
        self.now += 0.01
        for output in result.outputs:
            self.heard[output.sequence.id[0]].append(output.sampled)
            if output.sequence.end_reason is not None:
                self.let_go(output.sequence.id[0])
        assert self.core.pool.ledger().violations == ()
        return sum(each.tokens for each in result.progress)

    def run(self):
        """To the end. Returns how many tokens were computed."""
        computed = 0
        while not self.core.idle():
            step = self.step()
            assert step, "somebody waits for nothing"
            computed += step
        return computed

    def let_go(self, name):
        sequence = self.core.detach(self.live.pop(name).id)
        if sequence.table is not None:
            self.core.pool.waive(sequence.credit)
            self.core.pool.release(sequence.table)

    def answer(self, name, prompt, count=5, **changes):
        """(what was sampled, tokens found in the cache, tokens computed)."""
        sequence = self.submit(name, prompt, count, **changes)
        computed = self.run()
        return self.heard[name], sequence.cached, computed


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", AROUND_BLOCKS)
def test_a_hit_changes_no_bit_and_counts_all_full_blocks_before_the_last_token(length, sampling):
    """Case 58 and case 81. Exact multiples of the block size are among the lengths."""
    rig, prompt = Rig(), prompt_of("warm", length)
    right, nothing, _ = Rig(caching=False).answer("r", prompt, sampling=sampling)
    cold = rig.answer("cold", prompt, sampling=sampling)
    warm = rig.answer("warm", prompt, sampling=sampling)
    hit = (length - 1) // SIZE * SIZE
    assert (cold, nothing) == ((right, 0, length + 4), 0)
    assert warm == (right, hit, length + 4 - hit)


@pytest.mark.parametrize("common", range(18))
def test_a_partial_hit_is_what_two_prompts_have_in_common_in_full_blocks(common):
    first = prompt_of("partial", 17)
    second = [*first[:common], *((token + 1) % VOCAB for token in first[common:])]
    right, _, _ = Rig(caching=False).answer("r", second)
    rig = Rig()
    rig.answer("first", first)
    found = min(common, 16) // SIZE * SIZE
    assert rig.answer("second", second) == (right, found, 17 + 4 - found)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8])
def test_the_next_turn_of_a_conversation_finds_the_answer_too(count):
    rig, prompt = Rig(), prompt_of("turn", 9)
    answer, _, _ = rig.answer("first", prompt, count)
    longer = [*prompt, *(each.token for each in answer), *prompt_of("more", 6)]
    right, _, _ = Rig(caching=False).answer("r", longer)
    found = (9 + count - 1) // SIZE * SIZE
    assert rig.answer("second", longer) == (right, found, len(longer) + 4 - found)


def test_a_scope_shares_with_no_other_and_without_one_nothing_is_shared():
    rig, prompt = Rig(), prompt_of("scopes", 13)
    rig.answer("a", prompt, scope=b"a")
    assert rig.answer("b", prompt, scope=b"b")[1] == 0
    assert rig.answer("none", prompt, scope=b"")[1] == 0
    assert rig.answer("again", prompt, scope=b"a")[1] == 12


def test_without_caching_nothing_is_kept():
    rig, prompt = Rig(caching=False), prompt_of("off", 13)
    assert rig.answer("first", prompt) == rig.answer("second", prompt)
    ledger = rig.core.pool.ledger()
    assert (ledger.cached, len(rig.core.pool.index), ledger.free) == (0, 0, ledger.total)


@pytest.mark.parametrize("policy", [DecodePolicy, PrefillPolicy])
@pytest.mark.parametrize("budget", [3, 64])
def test_a_prefix_that_many_want_at_once_is_computed_once(policy, budget):
    rig, opening = Rig(policy=policy, budget=budget, blocks=200), prompt_of("system", 40)
    prompts = {f"r{n}": [*opening, *prompt_of(n, 1 + n % 4)] for n in range(8)}
    for name, prompt in prompts.items():
        rig.submit(name, prompt, 3)
    ends = sum(len(prompt) - 40 for prompt in prompts.values())
    assert rig.run() == 40 + ends + 8 * 2
    for name, prompt in prompts.items():
        assert [each.token for each in rig.heard[name]] == golden(prompt, 3)


def waiting(rig):
    return [view.id[0] for view in rig.core.view().waiting]


def test_who_waits_for_a_prefix_starts_when_it_is_there():
    rig, prompt = Rig(budget=4), prompt_of("coming", 17)
    rig.submit("provider", prompt)
    rig.step()
    second = rig.submit("second", prompt)
    while len(rig.heard["provider"]) == 0:
        assert waiting(rig) == ["second"]
        rig.step()
    rig.run()
    assert second.cached == 16
    assert [each.token for each in rig.heard["second"]] == golden(prompt, 5)


def test_who_waits_for_a_prefix_starts_when_nobody_computes_it_any_more():
    rig, prompt = Rig(budget=4), prompt_of("coming", 17)
    rig.submit("provider", prompt)
    rig.step()
    second = rig.submit("second", prompt)
    rig.step()
    rig.let_go("provider")
    rig.step()
    assert waiting(rig) == []
    assert second.cached == 8, "what the provider had computed is there"
    rig.run()
    assert [each.token for each in rig.heard["second"]] == golden(prompt, 5)


def test_the_next_of_those_who_wait_provides_for_the_others():
    rig, prompt = Rig(budget=4), prompt_of("coming", 33)
    for name in "abcd":
        rig.submit(name, prompt, 2)
        rig.step()
    rig.let_go("a")
    rig.step()
    assert waiting(rig) == ["c", "d"]
    rig.let_go("b")
    rig.let_go("c")
    rig.run()
    assert [each.token for each in rig.heard["d"]] == golden(prompt, 2)


def test_who_has_most_of_its_prompt_to_compute_anyway_does_not_wait():
    rig, opening = Rig(budget=4), prompt_of("short", 8)
    rig.submit("provider", opening)
    rig.step()
    rig.submit("second", [*opening, *prompt_of("long", 20)])
    rig.step()
    rig.step()
    assert waiting(rig) == []


@pytest.mark.parametrize("seed", range(12))
def test_memory_pressure_evicts_what_nobody_owns_and_nothing_else(seed):
    """Case 20 and case 64: many prefixes come, go and come back through a pool that holds few."""
    dice = random.Random(seed)
    rig = Rig(blocks=dice.choice((9, 14, 20)), budget=dice.choice((3, 7, 40)), seats=4)
    openings = [prompt_of(n, dice.randint(4, 16)) for n in range(4)]
    prompts, cancelled, found = {}, set(), 0
    for number in range(60):
        name, scope = f"r{number}", dice.choice((b"a", b"a", b"b"))
        prompts[name] = [*dice.choice(openings), *prompt_of(name, dice.randint(1, 9))]
        rig.submit(name, prompts[name], dice.randint(1, 8), scope=scope)
        for _ in range(dice.randint(0, 4)):
            rig.step()
        if rig.live and dice.random() < 0.1:
            cancelled.add(gone := dice.choice(sorted(rig.live)))
            rig.let_go(gone)
        found += sum(each.cached for each in rig.live.values())
    rig.run()
    assert found
    for name in prompts.keys() - cancelled:
        sampled = [each.token for each in rig.heard[name]]
        assert sampled == golden(prompts[name], len(sampled))
    ledger = rig.core.pool.ledger()
    assert (ledger.owned, ledger.promised, ledger.free + ledger.cached) == (0, 0, ledger.total)


def test_what_was_evicted_is_computed_again_and_found_again():
    rig, prompt, other = Rig(blocks=8), prompt_of("evicted", 17), prompt_of("other", 25)
    right = rig.answer("first", prompt)[0]
    assert rig.answer("warm", prompt)[:2] == (right, 16)
    rig.answer("other", other)
    again, found, _ = rig.answer("again", prompt)
    assert (again, found < 16) == (right, True)
    assert rig.answer("and again", prompt)[:2] == (right, 16)
