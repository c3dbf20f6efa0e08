"""Short prompts pass long ones, and nobody starves: the prefill policy over a virtual clock."""

import math
import random
from dataclasses import dataclass
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.policy import SequenceView, View
from prefill_worker.policy import PrefillPolicy

STEP_S = 0.25
BUDGET = 256


@dataclass(frozen=True)
class Prompt:
    """comes: seconds; ahead_s: how much earlier it counts as having come, for its priority."""

    number: int
    tokens: int
    comes: float
    ahead_s: float = 0.0

    def view(self):
        return SequenceView(
            id=(f"{self.number:04}", 1, 0),
            uncomputed=self.tokens,
            blocks_to_start=1,
            arrived=self.comes - self.ahead_s,
        )


def first_tokens(policy, prompts):
    """When each prompt is done, in seconds since it came, by number. Every step takes its time, full or not."""
    coming = sorted(prompts, key=lambda prompt: prompt.comes)
    comes = {prompt.view().id: prompt.comes for prompt in prompts}
    waiting, running, done, now = {}, {}, {}, 0.0
    while coming or waiting or running:
        while coming and coming[0].comes <= now:
            view = coming.pop(0).view()
            waiting[view.id] = view
        view = View(waiting=tuple(waiting.values()), running=tuple(running.values()), available_blocks=10_000)
        plan = policy.plan(view, now)
        assert sum(work.tokens for work in plan.work) == min(
            policy.budget_tokens, sum(one.uncomputed for one in (*view.running, *view.waiting))
        ), "no part of a step is wasted"
        now += STEP_S
        for work in plan.work:
            one = running.pop(work.id, None) or waiting.pop(work.id)
            if work.tokens == one.uncomputed:
                done[int(work.id[0])] = now - comes[work.id]
            else:
                running[work.id] = one._replace(uncomputed=one.uncomputed - work.tokens)
    return done


def policy_of(share=0.5, **changes):
    return PrefillPolicy(**{"budget_tokens": BUDGET, "seats": 1000, "oldest_share": share, **changes})


@pytest.mark.parametrize("came_before_s", [0.25, 2.0, 3.0])
def test_a_short_prompt_behind_a_long_one_is_done_with_the_next_step(came_before_s):
    done = first_tokens(policy_of(), [Prompt(0, 4096, 0.0), Prompt(1, 64, came_before_s)])
    assert done[1] == STEP_S
    assert done[0] == 4096 / BUDGET * STEP_S + STEP_S, "and the long one is a step later"


def test_of_two_long_prompts_the_first_is_not_slowed_down_by_the_second():
    done = first_tokens(policy_of(), [Prompt(0, 4096, 0.0), Prompt(1, 4096, STEP_S)])
    assert done[0] == 4096 / BUDGET * STEP_S


def test_a_long_prompt_keeps_its_share_under_an_endless_stream_of_short_ones():
    """As much short work comes as all steps can do: without a share the long one would wait for its end."""
    shorts = [Prompt(n, 64, n // 4 * STEP_S) for n in range(1, 2000)]
    done = first_tokens(policy_of(ageing_tokens_per_s=0.0), [Prompt(0, 4096, 0.0), *shorts])
    assert done[0] == 4096 / (BUDGET / 2) * STEP_S
    least = first_tokens(policy_of(0.01, ageing_tokens_per_s=0.0), [Prompt(0, 4096, 0.0), *shorts])
    assert least[0] > 100.0


def test_a_priority_counts_as_waiting():
    """Whoever goes first has the guaranteed share, however long it is."""
    crowd = [Prompt(n, 512, 0.0) for n in range(8)]
    done = first_tokens(
        policy_of(), [*crowd, Prompt(8, 512, 0.5, ahead_s=5.0), Prompt(9, 512, 0.5, ahead_s=-5.0)]
    )
    assert done[8] <= 512 / (BUDGET / 2) * STEP_S
    assert done[9] == max(done.values())


def mix(seed):
    """Eight of ten prompts are short, and a machine that is busy four fifths of the time."""
    dice, now, prompts = random.Random(seed), 0.0, []
    for number in range(300):
        tokens = dice.randrange(2000, 4097) if dice.random() < 0.1 else dice.randrange(16, 400)
        now += dice.expovariate(1.0) * tokens_per_prompt() * STEP_S / BUDGET / 0.8
        prompts.append(Prompt(number, tokens, now))
    return prompts


def tokens_per_prompt():
    return 0.1 * (2000 + 4096) / 2 + 0.9 * 208


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_time_to_the_first_token_of_a_mix_falls(seed):
    prompts = mix(seed)
    fair, in_order = (
        first_tokens(policy_of(), prompts),
        first_tokens(policy_of(1.0, ageing_tokens_per_s=1e9), prompts),
    )
    assert mean(fair.values()) < 0.6 * mean(in_order.values())
    long = [prompt.number for prompt in prompts if prompt.tokens >= 2000]
    assert mean(fair[n] for n in long) < 1.5 * mean(in_order[n] for n in long), "and the long ones pay little"


PROMPTS = st.lists(
    st.tuples(st.integers(1, 3000), st.integers(0, 40), st.sampled_from([0.0, 0.0, 5.0, -5.0])),
    min_size=1,
    max_size=25,
).map(lambda all_: [Prompt(n, tokens, step * STEP_S, ahead) for n, (tokens, step, ahead) in enumerate(all_)])


@given(prompts=PROMPTS, share=st.sampled_from([0.1, 0.5, 1.0]), ageing=st.sampled_from([0.0, 64.0, 1000.0]))
def test_nobody_waits_longer_than_it_and_the_older_ones_take_in_the_guaranteed_share(prompts, share, ageing):
    policy = policy_of(share, ageing_tokens_per_s=ageing)
    done = first_tokens(policy, prompts)
    assert set(done) == {prompt.number for prompt in prompts}
    for prompt in prompts:
        mine = prompt.view()
        older = [each for each in prompts if (each.view().arrived, each.view().id) <= (mine.arrived, mine.id)]
        steps = sum(math.ceil(each.tokens / policy.guaranteed_tokens()) for each in older)
        assert done[prompt.number] <= steps * STEP_S, "it comes between two steps, and waits for none"
