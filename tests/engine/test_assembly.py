"""From wishes to what the device holds, and an engine that answers."""

from types import SimpleNamespace

import pytest
import torch

from decode_worker.policy import DecodePolicy
from engine.assembly import KV_BYTES_DEFAULT, KV_SHARE_OF_MEMORY, assemble
from engine.errors import CapacityError, ModelError
from engine.model.transformer import Quantization
from engine.sequence import SamplingParams, Sequence, StopRules
from engine.wishes import EngineWishes
from tests.fakes.tiny_checkpoint import BLOCK_BYTES, BLOCK_SIZE, POSITIONS, VOCAB

GIB = 1 << 30


@pytest.fixture
def engine_of(checkpoint):
    def make(memory_bytes=GIB, **wishes):
        given = {"model": checkpoint, "dtype": torch.float32, "block_size": BLOCK_SIZE, **wishes}
        return assemble(
            EngineWishes(**given), DecodePolicy(budget_tokens=64, seats=8), memory_bytes=memory_bytes
        )

    return make


@pytest.mark.parametrize(
    ("wishes", "memory_bytes", "blocks"),
    [
        ({"num_blocks": 7}, GIB, 7),
        ({"num_blocks": 7, "kv_bytes": 100 * BLOCK_BYTES}, GIB, 7),
        ({"num_blocks": 7}, 7 * BLOCK_BYTES, 7),
        ({"kv_bytes": 5 * BLOCK_BYTES}, GIB, 5),
        ({"kv_bytes": 6 * BLOCK_BYTES - 1}, GIB, 5),
        ({"kv_bytes": BLOCK_BYTES, "kv_dtype": torch.bfloat16}, GIB, 2),
        ({}, 100 * BLOCK_BYTES, int(100 * KV_SHARE_OF_MEMORY)),
        ({}, 2**50, KV_BYTES_DEFAULT // BLOCK_BYTES),
        ({"kv_share": 0.5}, 100 * BLOCK_BYTES, 50),
        ({"kv_share": 0.5, "kv_bytes": 7 * BLOCK_BYTES}, 100 * BLOCK_BYTES, 7),
    ],
)
def test_blocks_are_what_was_asked_for_or_a_bounded_share_of_the_memory(
    engine_of, wishes, memory_bytes, blocks
):
    engine = engine_of(memory_bytes, **wishes)
    assert engine.capacity.num_blocks == blocks
    assert engine.core.pool.total == engine.cache.num_blocks == blocks
    assert engine.cache.layout.block_size == BLOCK_SIZE


@pytest.mark.parametrize(
    ("max_model_len", "num_blocks", "expected"),
    [
        (None, 1000, (POSITIONS, POSITIONS)),
        (100, 1000, (100, 100)),
        (100, 10, (100, 40)),
        (None, 2, (POSITIONS, 8)),
    ],
)
def test_the_longest_sequence_is_bounded_by_the_model_the_operator_and_the_pool(
    engine_of, max_model_len, num_blocks, expected
):
    capacity = engine_of(max_model_len=max_model_len, num_blocks=num_blocks).capacity
    assert (capacity.max_model_len, capacity.tokens_max) == expected


@pytest.mark.parametrize(
    ("wishes", "memory_bytes", "said"),
    [
        ({"max_model_len": POSITIONS + 1}, GIB, f"max_model_len {POSITIONS + 1} .* {POSITIONS}"),
        ({"kv_bytes": BLOCK_BYTES - 1}, GIB, f"{BLOCK_BYTES - 1} bytes .* no block of {BLOCK_BYTES}"),
        ({}, BLOCK_BYTES, f"no block of {BLOCK_BYTES}"),
        ({"num_blocks": 7}, 7 * BLOCK_BYTES - 1, f"{7 * BLOCK_BYTES} bytes .* {7 * BLOCK_BYTES - 1}"),
        ({"kv_bytes": GIB + 1}, GIB, f"{GIB + 1} bytes .* {GIB}"),
        ({"swap_bytes": GIB, "num_blocks": 1}, GIB, f"{GIB} bytes of swap space .* {GIB - BLOCK_BYTES}"),
        ({"kv_dtype": torch.float8_e4m3fn}, GIB, "kv_cache_dtype fp8 .* cpu: it has bfloat16, float32, int8"),
        ({"swap_bytes": 4}, GIB, f"4 bytes of swap space hold no block of {BLOCK_BYTES}"),
    ],
)
def test_what_the_device_cannot_hold_is_refused_with_the_sizes(engine_of, wishes, memory_bytes, said):
    with pytest.raises(CapacityError, match=said) as refusal:
        engine_of(memory_bytes, **wishes)
    assert "\n" not in str(refusal.value)


def test_a_model_that_is_not_there_is_a_model_error(engine_of, tmp_path):
    with pytest.raises(ModelError):
        engine_of(model=tmp_path / "nowhere")


def test_flags_become_wishes():
    flags = SimpleNamespace(
        device="cpu",
        dtype="bfloat16",
        kv_cache_dtype="int8",
        quantization="int8",
        threads=3,
        max_model_len=9,
        block_size=8,
        num_gpu_blocks_override=5,
        kv_cache_memory_bytes=6,
        swap_space=7,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        async_scheduling=True,
        max_num_batched_tokens=11,
        max_num_seqs=12,
    )
    assert EngineWishes.of(flags, "path") == EngineWishes(
        model="path",
        device="cpu",
        dtype=torch.bfloat16,
        kv_dtype=torch.int8,
        quantization=Quantization.INT8,
        threads=3,
        max_model_len=9,
        block_size=8,
        num_blocks=5,
        kv_bytes=6,
        swap_bytes=7,
        kv_share=0.5,
        caching=False,
        step_tokens=11,
        step_sequences=12,
        ahead=True,
    )


def test_an_assembled_engine_answers_and_gives_back_what_it_took(engine_of):
    engine = engine_of(num_blocks=8)
    sequence = Sequence(
        id=("r", 1, 0),
        tokens=[1, 2, 3, 4, 5],
        sampling=SamplingParams(),
        stop=StopRules(length_limit=9),
        arrived=0.0,
    )
    engine.core.submit(sequence)
    while not engine.core.idle():
        engine.core.step(0.0)
    assert len(sequence.tokens) == 9 and all(0 <= token < VOCAB for token in sequence.tokens)
    engine.core.detach(sequence.id)
    engine.core.pool.release(sequence.table)
    engine.core.pool.waive(sequence.credit)
    assert engine.core.pool.available == 8
    assert engine.config.eos_token_ids == (2,)


def test_workers_whose_weights_are_kept_otherwise_differ_in_that_field_alone(engine_of):
    fields = engine_of(num_blocks=2).cache.layout.fields()
    for wishes, name, value in (
        ({"quantization": Quantization.INT4}, "quantization", "int4"),
        ({"dtype": torch.bfloat16, "kv_dtype": torch.float32}, "weights", "bfloat16"),
    ):
        others = engine_of(num_blocks=2, **wishes).cache.layout.fields()
        assert {key: each for key, each in others.items() if fields[key] != each} == {name: value}


def test_workers_of_the_same_model_have_the_same_fingerprint_and_others_do_not(engine_of):
    prints = [
        engine_of(num_blocks=2, **wishes).cache.layout.fingerprint()
        for wishes in (
            {},
            {"max_model_len": 50},
            {"block_size": 8},
            {"kv_dtype": torch.bfloat16},
            {"kv_dtype": torch.int8},
        )
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


@pytest.mark.parametrize("max_model_len", [1, BLOCK_SIZE - 1, BLOCK_SIZE + 1])
def test_an_engine_has_computed_before_it_is_asked_and_no_more_positions_than_its_model_has(
    engine_of, max_model_len
):
    engine = engine_of(num_blocks=2, max_model_len=max_model_len)
    written = engine.cache.tensor.abs().sum(dim=(1, 2, 4, 5))
    assert (written > 0).sum(dim=1).tolist() == [min(BLOCK_SIZE, max_model_len)] * 2
    assert engine.core.pool.ledger().free == 2
