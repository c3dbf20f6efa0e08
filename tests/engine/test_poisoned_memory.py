"""What another request left in a block is never read: memory full of NaN changes no bit of an answer."""

import math

import pytest
import torch

from decode_worker.policy import DecodePolicy
from engine.assembly import assemble
from engine.sequence import SamplingParams, Sequence, StopRules
from engine.wishes import EngineWishes
from service.model_source import resolve_model

PROMPT = [1000 + 37 * number for number in range(45)]
"""Ends in the middle of a block of 16."""
WISHES = EngineWishes(model=resolve_model("smollm2-135m-instruct"), max_model_len=128, num_blocks=16)


@pytest.fixture(scope="module")
def engine():
    policy = DecodePolicy(budget_tokens=32, seats=4)
    return assemble(WISHES, policy, memory_bytes=4 << 30)


def answer(engine, name):
    """Tokens and log-probabilities, with nothing cached."""
    sequence = Sequence(
        id=(name, 1, 0),
        tokens=list(PROMPT),
        sampling=SamplingParams(logprobs=3),
        stop=StopRules(length_limit=len(PROMPT) + 8),
        arrived=0.0,
        chain=engine.core.chain(b""),
    )
    engine.core.submit(sequence)
    heard = []
    while not engine.core.idle():
        heard += [output.sampled for output in engine.core.step(0.0).outputs]
    engine.core.pool.waive(engine.core.detach(sequence.id).credit)
    engine.core.pool.release(sequence.table)
    return heard


def test_the_memory_of_freed_blocks_is_never_read(engine):
    """SEC-12."""
    clean = answer(engine, "clean")
    assert len(clean) == 8 and all(math.isfinite(each.logprob) for each in clean)
    for poison in (torch.nan, torch.inf):
        engine.cache.tensor.fill_(poison)
        assert answer(engine, str(poison)) == clean
