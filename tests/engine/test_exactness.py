"""The real model: one answer, to the bit, whatever else the engine does at the same time."""

import random

import pytest
import torch

from decode_worker.policy import DecodePolicy
from engine.assembly import EngineWishes, assemble
from engine.model.transformer import Quantization
from engine.sequence import SamplingParams, Sequence, StopRules
from service.model_source import resolve_model

GREEDY = SamplingParams(logprobs=3)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, min_p=0.01, seed=123, logprobs=3)


def tokens_of(seed, length):
    return [random.Random(seed).randrange(1000, 40000) for _ in range(length)]


def engine_of(mode, budget_tokens, threads=1):
    dtype, quantization = mode
    policy = DecodePolicy(budget_tokens=budget_tokens, seats=64)
    wishes = EngineWishes(
        model=resolve_model("smollm2-135m-instruct"),
        dtype=dtype,
        quantization=quantization,
        threads=threads,
        max_model_len=512,
        num_blocks=256,
    )
    return assemble(wishes, policy, memory_bytes=4 << 30)


MODES = {
    "float32": (torch.float32, Quantization.NONE),
    "bfloat16": (torch.bfloat16, Quantization.NONE),
    "gguf": (None, None),
    "int8": (torch.bfloat16, Quantization.INT8),
    "int4": (torch.bfloat16, Quantization.INT4),
}


@pytest.fixture(scope="module", params=MODES.values(), ids=MODES)
def engine(request):
    return engine_of(request.param, 256)


def answers(engine, budget_tokens, crowd):
    """Tokens, log-probabilities and alternatives of two watched requests among a crowd of others."""
    engine.core._policy = DecodePolicy(budget_tokens=budget_tokens, seats=64)
    watched = [sequence_of("greedy", 130, 10, GREEDY), sequence_of("seeded", 130, 10, SEEDED)]
    others = [sequence_of(f"other{n}", 3 + 7 * n, 8, SEEDED) for n in range(crowd)]
    for sequence in (*others[: crowd // 2], *watched, *others[crowd // 2 :]):
        engine.core.submit(sequence)
    heard = {sequence.id: [] for sequence in watched}
    while not engine.core.idle():
        for output in engine.core.step(0.0).outputs:
            if output.sequence.id in heard:
                heard[output.sequence.id].append(output.sampled)
    for sequence in (*watched, *others):
        engine.core.pool.waive(engine.core.detach(sequence.id).credit)
        engine.core.pool.release(sequence.table)
    return list(heard.values())


def sequence_of(name, length, count, sampling):
    prompt = tokens_of(7 if name in ("greedy", "seeded") else name, length)
    return Sequence(
        id=(name, 1, 0),
        tokens=prompt,
        sampling=sampling,
        stop=StopRules(length_limit=length + count),
        arrived=0.0,
    )


def test_an_answer_is_the_same_in_a_crowd_of_16_and_with_every_chunk_size(engine):
    alone = answers(engine, budget_tokens=512, crowd=0)
    assert [len(each) for each in alone] == [10, 10]
    assert [each.token for each in alone[0]] != [each.token for each in alone[1]]
    for chunk in (16, 64, 512):
        assert answers(engine, chunk, crowd=0) == alone, f"alone, chunks of {chunk}"
        assert answers(engine, chunk, crowd=16) == alone, f"in a crowd, chunks of {chunk}"


@pytest.mark.parametrize("mode", ["bfloat16", "gguf"])
def test_two_threads_give_the_bits_of_one(mode):
    one = answers(engine_of(MODES[mode], 256, threads=1), 64, crowd=4)
    two = answers(engine_of(MODES[mode], 256, threads=2), 64, crowd=4)
    assert two == one
