"""Sampling on a device, in Triton's interpreter: a row goes to the host where it must, and the answer is the host's."""

import numpy as np
import pytest
import torch

from decode_worker.policy import DecodePolicy
from engine.cache.block_pool import BlockPool
from engine.cache.kv_cache import KVCache
from engine.core import EngineCore
from engine.device_sampler import DeviceSampler
from engine.distribution import PlainSampling
from engine.errors import NonFiniteLogits
from engine.kernels.triton.sampling import draw, settle
from engine.sampling import Rule, Sampler
from engine.sequence import SamplingParams, Sequence, StopRules
from tests.fakes.constraints import Odd
from tests.fakes.hash_model import HashRunner, golden, hash_layout

SEEDED = SamplingParams(temperature=0.9, top_p=0.8, seed=11)


@pytest.fixture
def drawn_there():
    """Places of the rows that were drawn on the device, call by call."""
    return []


@pytest.fixture
def sampler(drawn_there):
    def watched(logits, places, *wishes):
        drawn_there.append(places)
        return draw(logits, places, *wishes)

    return DeviceSampler(PlainSampling(), watched, settle)


def logits_of(rows, vocab=60):
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5))


def test_rows_that_want_more_than_a_token_of_the_models_own_are_drawn_on_the_host(sampler, drawn_there):
    logits = logits_of(7)
    allowed = np.array([1 << 4 | 1 << 9, 0], np.int32)
    params = [
        SEEDED,
        SEEDED,
        SamplingParams(logprobs=0),
        SamplingParams(temperature=1.0, seed=2, logprobs=4),
        SEEDED,
        SamplingParams(temperature=1.2, seed=8, min_p=0.1),
        SamplingParams(candidates=2),
    ]
    rules = {1: Rule(allowed=allowed), 4: Rule(banned=frozenset({int(logits[4].argmax())}))}
    positions = [3, 4, 1, 9, 7, 2**63, 0]
    asked = (logits, params, positions, rules)
    assert sampler.sample(*asked) == Sampler().sample(*asked)
    assert drawn_there == [[0, 2, 5]]


def test_where_every_row_needs_the_host_nothing_is_drawn_on_the_device(sampler, drawn_there):
    asked = (logits_of(1), [SamplingParams(logprobs=2)], [0])
    assert sampler.sample(*asked) == Sampler().sample(*asked)
    assert drawn_there == []


def test_broken_rows_of_both_kinds_are_named_together(sampler):
    logits = logits_of(5)
    logits[1, 7], logits[2], logits[4, 0] = torch.nan, -torch.inf, torch.inf
    with pytest.raises(NonFiniteLogits) as refusal:
        sampler.sample(logits, [SamplingParams(logprobs=at % 2 * 3) for at in range(5)], range(5))
    assert refusal.value.rows == (1, 2, 4)


def test_a_row_that_is_broken_gives_a_token_to_go_on_with_and_fails_who_reads_it(sampler):
    """Both kinds of sampler: what is begun ahead looks a token up before anybody has read it."""
    logits = logits_of(3)
    logits[1] = torch.nan
    params = [SEEDED, SamplingParams(logprobs=0), SamplingParams(temperature=1.0, logprobs=0)]
    for each in (sampler, Sampler()):
        drawing = each.begin(logits, params, [0, 1, 2])
        wanted = Sampler().sample(logits[::2], params[::2], [0, 2])
        assert drawing.tokens.tolist() == [wanted[0].token, 0, wanted[1].token]
        assert drawing.read([0, 2]) == wanted
        with pytest.raises(NonFiniteLogits) as refusal:
            drawing.read([0, 1])
        assert refusal.value.rows == (1,)


def test_nothing_is_drawn_where_nobody_wants_a_token(sampler):
    drawing = sampler.begin(logits_of(0), [], [])
    assert drawing.tokens.tolist() == drawing.read([]) == []


def test_a_row_is_drawn_alike_in_any_company(sampler):
    logits = logits_of(4)
    params = [SamplingParams(temperature=1.5, seed=at) for at in range(4)]
    together = sampler.sample(logits, params, range(4))
    alone = [sampler.sample(logits[at : at + 1], [params[at]], [at])[0] for at in (3, 0)]
    assert alone == [together[3], together[0]]


class LateRunner(HashRunner):
    """Logits that are not there before somebody has waited for them."""

    def __init__(self, cache):
        super().__init__(cache)
        self._late = []

    def run(self, batch):
        there = super().run(batch)
        self._late.append((torch.full(there.shape, torch.nan), there))
        return self._late[-1][0]

    def settle(self, logits):
        for late, there in self._late:
            late.copy_(there)
        self._late.clear()

    def draw(self, logits, *wishes):
        """On the device, which does one thing after the other."""
        self.settle(logits)
        return draw(logits, *wishes)


@pytest.mark.parametrize(
    "wanted",
    [
        {"sampling": SamplingParams(logprobs=2)},
        {"constraint": Odd(length=8)},
        {"scored": 1},
        {"twins": (SamplingParams(candidates=1),)},
    ],
    ids=lambda wanted: next(iter(wanted)),
)
def test_the_host_waits_for_logits_before_it_reads_any(wanted):
    """Beside somebody who comes to a dead end, whose row is left out."""
    core = EngineCore(
        pool=BlockPool(64),
        block_size=4,
        runner=(runner := LateRunner(KVCache(hash_layout(4), 64))),
        sampler=DeviceSampler(PlainSampling(), runner.draw, runner.settle),
        policy=DecodePolicy(budget_tokens=5, seats=2),
    )
    prompt = list(range(9))
    ways = {"read": wanted, "stuck": {"constraint": Odd(dead_end=2)}}
    for name, given in ways.items():
        fields = {"sampling": SamplingParams(), "arrived": 0.0, **given}
        stop = StopRules(length_limit=len(prompt) + 6)
        core.submit(Sequence(id=(name, 1, 0), tokens=list(prompt), stop=stop, **fields))
    answers = {"read": [], "stuck": []}
    while not core.idle():
        for output in core.step(0.0).outputs:
            answers[output.sequence.id[0]].append(output.sampled.token)
    assert len(answers["stuck"]) == 2 and len(answers["read"]) == 6
    if "constraint" not in wanted:
        assert answers["read"] == golden(prompt, 6)
