"""What an engine on a GPU is put together from, without one."""

from types import SimpleNamespace

import pytest
import torch

from decode_worker.role import DecodeRole
from engine.assembly import assemble
from engine.cache.staged_cache import StagedKVCache
from engine.errors import CapacityError
from engine.loading import step_bytes
from engine.model.config import read_config
from engine.sequence import SamplingParams, Sequence, StopRules
from engine.wishes import EngineWishes
from prefill_worker.role import PrefillRole
from tests.fakes.pretended_gpu import PretendedGpu
from tests.fakes.tiny_checkpoint import BLOCK_BYTES, BLOCK_SIZE

GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch):
    made = PretendedGpu()
    made.install(monkeypatch)
    return made


@pytest.fixture
def engine_of(checkpoint):
    """As a worker of a role has it."""

    def make(role, *, enforce_eager=False, memory_bytes=GIB, num_blocks=16, **wishes):
        options = SimpleNamespace(enforce_eager=enforce_eager, max_num_seqs=4, max_num_batched_tokens=32)
        given = {"dtype": torch.float32, "block_size": BLOCK_SIZE, "step_tokens": 32, "step_sequences": 4}
        asked = EngineWishes(model=checkpoint, num_blocks=num_blocks, **given, **wishes)
        return assemble(role.wishes(asked, options), role.policy(options), memory_bytes=memory_bytes)

    return make


def answer(engine):
    """(tokens, whether the first of them was told by the step that computed it)."""
    sequence = Sequence(
        id=("r", 1, 0),
        tokens=[1, 2, 3, 4, 5],
        sampling=SamplingParams(temperature=1.0, seed=3),
        stop=StopRules(length_limit=9),
        arrived=0.0,
    )
    engine.core.submit(sequence)
    at_once = len(engine.core.step(0.0).outputs) > 0
    while not engine.core.idle():
        engine.core.step(0.0)
    return sequence.tokens, at_once


def test_a_decode_worker_on_a_gpu_replays_steps_begins_them_ahead_and_draws_there(
    engine_of, gpu, monkeypatch
):
    engine = engine_of(DecodeRole())
    assert engine.device == "cuda:0"
    assert isinstance(engine.cache, StagedKVCache)
    assert gpu.tape.recorded == len([1, 2, 4]) and gpu.tape.replayed > 0, "to warm up"
    replayed, drawn = gpu.tape.replayed, gpu.drawn
    tokens, at_once = answer(engine)
    assert not at_once
    assert (gpu.tape.replayed - replayed, gpu.drawn - drawn) == (3, 4), "the first token comes of the prompt"
    monkeypatch.undo()
    assert answer(engine_of(DecodeRole())) == (tokens, True), "as the processor says it"


def test_an_eager_one_does_all_but_record(engine_of, gpu):
    engine = engine_of(DecodeRole(), enforce_eager=True)
    assert isinstance(engine.cache, StagedKVCache)
    _, at_once = answer(engine)
    assert (gpu.tape.recorded, at_once) == (0, False) and gpu.drawn > 0


def test_one_that_shall_not_begin_ahead_tells_every_token_at_once(engine_of, gpu):
    _, at_once = answer(engine_of(DecodeRole(), ahead=False))
    assert at_once and gpu.tape.replayed > 0


def test_a_prefill_worker_records_nothing_and_tells_its_tokens_at_once(engine_of, gpu):
    engine = engine_of(PrefillRole())
    assert isinstance(engine.cache, StagedKVCache) and gpu.tape.recorded == 0
    drawn = gpu.drawn
    _, at_once = answer(engine)
    assert at_once and gpu.drawn > drawn


@pytest.mark.parametrize(
    ("role", "work", "said"),
    [
        (DecodeRole(), "record", "no memory is left to record steps in: .*enforce_eager"),
        (PrefillRole(), "step", "no memory is left for steps of 32 tokens and 4 .*max_num_batched_tokens"),
        (PrefillRole(), "take", "no memory is left for steps of 32 tokens and 4 .*max_num_batched_tokens"),
    ],
)
def test_memory_that_steps_lack_is_missed_before_anybody_is_served(engine_of, gpu, role, work, said):
    gpu.short_of_memory.add(work)
    with pytest.raises(CapacityError, match=said) as refusal:
        engine_of(role)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("host_blocks", "expected"), [(1000, 10), (7, 7)])
def test_the_cache_is_the_gpus_share_without_what_steps_need_and_has_a_place_on_the_host(
    engine_of, gpu, checkpoint, host_blocks, expected
):
    steps = step_bytes(read_config(checkpoint), 32, 4)
    gpu.free_bytes = 2 * (10 * BLOCK_BYTES + steps)
    wishes = {"num_blocks": None, "kv_share": 0.5, "memory_bytes": host_blocks * BLOCK_BYTES}
    assert engine_of(DecodeRole(), enforce_eager=True, **wishes).capacity.num_blocks == expected
    assert gpu.taken_bytes == steps, "before anybody is served"
