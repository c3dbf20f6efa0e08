"""The default model without most of its layers: what is found in the cache gives the bits that computing it gives."""

import random

import pytest
import torch

from decode_worker.policy import DecodePolicy
from engine.assembly import assemble
from engine.sequence import SamplingParams, Sequence, StopRules
from engine.wishes import EngineWishes

GREEDY = SamplingParams(logprobs=3)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=123, logprobs=3)
SIZE = 16
AROUND_BLOCKS = [SIZE * blocks + more for blocks in (1, 4) for more in (-1, 0, 1)]
COUNT = 6
UNNAMED = b""


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16, torch.int8], ids=str)
def core(request, shallow_model_path):
    wishes = EngineWishes(
        model=shallow_model_path,
        dtype=None if request.param == torch.int8 else request.param,
        kv_dtype=request.param,
        max_model_len=512,
        block_size=SIZE,
        num_blocks=256,
    )
    return assemble(wishes, DecodePolicy(budget_tokens=40, seats=64), memory_bytes=4 << 30).core


def prompt_of(seed, length):
    dice = random.Random(f"{seed}")
    return [dice.randrange(1000, 40000) for _ in range(length)]


def answers(core, prompt, scope):
    """(tokens, log-probabilities and alternatives, greedy and seeded; tokens found), one after the other."""
    heard, found = [], []
    for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED)):
        sequence = Sequence(
            id=(name, 1, 0),
            tokens=list(prompt),
            sampling=sampling,
            stop=StopRules(length_limit=len(prompt) + COUNT),
            arrived=0.0,
            chain=core.chain(scope),
        )
        core.submit(sequence)
        while not core.idle():
            heard += [output.sampled for output in core.step(0.0).outputs]
        core.pool.waive(core.detach(sequence.id).credit)
        core.pool.release(sequence.table)
        found.append(sequence.cached)
    return heard, found


@pytest.mark.parametrize("length", AROUND_BLOCKS)
def test_cold_and_warm_are_one_answer_to_the_bit(core, length):
    prompt, hit = prompt_of(length, length), (length - 1) // SIZE * SIZE
    right, nothing = answers(core, prompt, UNNAMED)
    assert (len(right), nothing) == (2 * COUNT, [0, 0])
    assert answers(core, prompt, b"warm") == (right, [0, hit])
    assert answers(core, prompt, b"warm") == (right, [hit, hit])


def test_a_partial_hit_is_the_same_answer_to_the_bit(core):
    first = prompt_of("first", 100)
    second = [*first[:70], *prompt_of("second", 30)]
    right, _ = answers(core, second, UNNAMED)
    answers(core, first, b"partial")
    assert answers(core, second, b"partial") == (right, [64, 96])


def test_the_next_turn_finds_what_was_generated_and_is_the_same_answer_to_the_bit(core):
    prompt = prompt_of("turn", 60)
    heard, _ = answers(core, prompt, b"turn")
    longer = [*prompt, *(each.token for each in heard[:COUNT]), *prompt_of("more", 20)]
    right, _ = answers(core, longer, UNNAMED)
    assert answers(core, longer, b"turn") == (right, [64, 80])
