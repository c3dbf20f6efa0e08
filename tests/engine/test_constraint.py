"""What a constraint allows is all that is drawn; a sequence that can have no token ends, and nobody else notices."""

from functools import partial

import numpy as np
import pytest
import torch

from decode_worker.policy import DecodePolicy
from engine.constraint import admits
from engine.sequence import EndReason, SamplingParams, State
from tests.engine.test_core import make_core, make_sequence, prompt_of, run_to_end
from tests.fakes import constraints
from tests.fakes.constraints import END, Odd, follows
from tests.fakes.hash_model import golden
from tests.fakes.sampled_rows import SampleRow, sample

VOCAB = 4999
GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=1.3, top_p=0.9, seed=5, logprobs=2)


mask_of = partial(constraints.mask_of, vocab=VOCAB)


def sampled(logits, params, position=0, **rules):
    return sample(logits[None], [SampleRow(params, position, **rules)])[0]


@pytest.fixture
def logits():
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 3


def test_a_mask_says_for_every_token_whether_it_is_admitted():
    assert np.flatnonzero(admits(mask_of(0, 31, 32, 4998), VOCAB)).tolist() == [0, 31, 32, 4998]


def test_a_greedy_row_takes_the_likeliest_token_that_is_allowed(logits):
    assert sampled(logits, GREEDY, allowed=mask_of(7, 40, 4998)).token == max(
        (7, 40, 4998), key=logits.tolist().__getitem__
    )


def test_a_seeded_row_draws_only_what_is_allowed_and_reports_the_models_own_logprobs(logits):
    allowed = mask_of(*range(100, 200))
    free = torch.log_softmax(logits.double(), 0)
    for position in range(200):
        drawn = sampled(logits, SEEDED, position, allowed=allowed)
        assert 100 <= drawn.token < 200
        assert drawn.logprob == pytest.approx(float(free[drawn.token]), abs=1e-5)
        assert [token for token, _ in drawn.top] == torch.topk(logits, 2).indices.tolist()


def test_a_row_without_a_constraint_is_drawn_as_if_its_neighbours_had_none(logits):
    rows = [SampleRow(SEEDED, 4), SampleRow(SEEDED, 4, allowed=mask_of(1)), SampleRow(SEEDED, 4)]
    first, _, third = sample(logits.expand(3, -1).contiguous(), rows)
    assert first == third == sampled(logits, SEEDED, 4)


def test_a_ban_gives_way_where_it_would_leave_nothing_that_is_allowed(logits):
    banned = frozenset({7, 9})
    assert sampled(logits, GREEDY, banned=banned, allowed=mask_of(7, 30)).token == 30
    assert sampled(logits, GREEDY, banned=banned, allowed=mask_of(7)).token == 7
    assert sampled(logits, SEEDED, banned=banned, allowed=mask_of(9)).token == 9


def test_what_alone_is_allowed_can_be_drawn_even_where_the_model_calls_it_impossible(logits):
    logits[5] = -torch.inf
    for params in (GREEDY, SEEDED):
        assert sampled(logits, params, allowed=mask_of(5)).token == 5


def constrained(name, prompt, count, constraint, **rules):
    sequence = make_sequence(name, prompt, count, final_token_ids=constraint.ends, **rules)
    sequence.constraint = constraint
    return sequence


def test_a_constrained_sequence_follows_its_constraint_to_the_end_beside_a_free_one():
    core, _ = make_core(DecodePolicy(budget_tokens=64, seats=4))
    prompt = prompt_of(1, 6)
    guided, free = constrained("guided", prompt, 50, Odd(length=9)), make_sequence("free", prompt, 20)
    core.submit(guided)
    core.submit(free)
    run_to_end(core)
    answer = guided.tokens[6:]
    assert guided.end_reason is EndReason.STOP and len(answer) == 10 and answer[-1] == END
    assert follows(answer)
    assert free.tokens[6:] == golden(prompt, 20)


@pytest.mark.parametrize(("rule", "value"), [("min_length", 40), ("stop_token_ids", frozenset({3}))])
def test_a_complete_sequence_ends_whatever_puts_its_end_off(rule, value):
    core, _ = make_core(DecodePolicy(budget_tokens=64, seats=4))
    sequence = constrained("a", prompt_of(1, 6), 50, Odd(length=4), **{rule: value})
    core.submit(sequence)
    run_to_end(core)
    assert sequence.end_reason is EndReason.STOP and sequence.tokens[-1] == END


def test_what_ends_a_sequence_is_not_drawn_before_its_time_while_anything_else_is_allowed():
    """As with min_tokens: END is banned, and is allowed beside others."""

    class Either(Odd):
        def _allowed(self):
            return [END, *super()._allowed()] if len(self.tokens) < 9 else [END]

    core, _ = make_core(DecodePolicy(budget_tokens=64, seats=4))
    sequences = [
        constrained("ignored", prompt_of(2, 6), 50, Either()),
        constrained("early", prompt_of(2, 6), 50, Either(), stop_token_ids=Odd.ends, min_length=6 + 9),
    ]
    for sequence in sequences:
        core.submit(sequence)
    run_to_end(core)
    for sequence in sequences:
        assert END not in sequence.tokens[6:15] and sequence.tokens[15] == END


def test_a_dead_end_ends_its_own_sequence_without_a_token_and_others_go_on():
    core, _ = make_core(DecodePolicy(budget_tokens=64, seats=4))
    prompt = prompt_of(1, 6)
    stuck, free = constrained("stuck", prompt, 50, Odd(dead_end=3)), make_sequence("free", prompt, 20)
    core.submit(stuck)
    core.submit(free)
    ended = []
    while not core.idle():
        result = core.step(0.0)
        ended += result.dead_ends
        assert all(output.sequence is not stuck for output in result.outputs) or not result.dead_ends
    assert ended == [stuck]
    assert (stuck.end_reason, stuck.state, len(stuck.tokens)) == (EndReason.DEAD_END, State.FINISHED, 6 + 3)
    assert free.tokens[6:] == golden(prompt, 20)
    core.detach(stuck.id)
