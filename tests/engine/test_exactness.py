"""One answer, to the bit, whatever else the engine does at the same time."""

import random
from dataclasses import replace

import pytest
import torch
import transformers as hf

from benchmarks.packed_folder import write_packed_folder
from benchmarks.quality import PACKINGS
from decode_worker.policy import DecodePolicy
from engine.assembly import assemble
from engine.kernels.core_share import ANY_CORES
from engine.model.transformer import Quantization
from engine.sequence import SamplingParams, Sequence, State, StopRules
from engine.wishes import EngineWishes
from tests.fakes.forcing_policy import Forcing

GREEDY = SamplingParams(logprobs=3)
SEEDED = SamplingParams(
    temperature=0.9,
    top_p=0.9,
    top_k=40,
    min_p=0.01,
    seed=123,
    logprobs=3,
    presence_penalty=0.6,
    frequency_penalty=-0.8,
    repetition_penalty=1.1,
    logit_bias=((28, 3.0), (30, -100.0)),
)


def tokens_of(seed, length):
    return random.Random(seed).choices(range(1000, 40000), k=length)


def engine_of(model, mode, threads=1, cores=ANY_CORES, **more):
    dtype, quantization, kv_dtype = mode
    wishes = EngineWishes(
        model=model,
        dtype=dtype,
        quantization=quantization,
        kv_dtype=kv_dtype,
        max_model_len=512,
        num_blocks=256,
        threads=threads,
        cores=cores,
        **more,
    )
    return assemble(wishes, DecodePolicy(budget_tokens=256, seats=64), memory_bytes=4 << 30)


MODES = {
    "float32": (torch.float32, Quantization.NONE, None),
    "bfloat16": (torch.bfloat16, Quantization.NONE, None),
    "gguf": (None, None, None),
    "int8": (torch.bfloat16, Quantization.INT8, None),
    "int4": (torch.bfloat16, Quantization.INT4, None),
    "float32, int8 KV": (torch.float32, Quantization.NONE, torch.int8),
    "gguf, int8 KV": (None, None, torch.int8),
}
"""dtype, quantization and KV dtype."""

SMALL = hf.LlamaConfig(
    vocab_size=49152,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.3,
)


@pytest.fixture(scope="module", params=["default", *MODES])
def engine(request, default_model_path, shallow_model_path):
    """The default model as it is served, and in each mode with few of its layers."""
    if request.param == "default":
        return engine_of(default_model_path, MODES["gguf"])
    return engine_of(shallow_model_path, MODES[request.param])


@pytest.fixture(scope="module", params=PACKINGS.values(), ids=PACKINGS)
def packed_engine(request, random_model_of, tmp_path_factory):
    """A small random model, of the built-in one's vocabulary."""
    floats, packed = tmp_path_factory.mktemp("floats"), tmp_path_factory.mktemp("packed")
    random_model_of(SMALL).save_pretrained(floats)
    write_packed_folder(floats, packed, request.param)
    return engine_of(packed, (None, None, None))


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
        prompt_tokens=length,
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


def test_an_answer_of_packed_weights_is_the_same_in_a_crowd_and_with_every_chunk_size(packed_engine):
    alone = answers(packed_engine, budget_tokens=512, crowd=0)
    assert [each.token for each in alone[0]] != [each.token for each in alone[1]]
    for chunk in (16, 64):
        assert answers(packed_engine, chunk, crowd=16) == alone, f"in a crowd, chunks of {chunk}"


@pytest.mark.parametrize("mode", ["bfloat16", "gguf", "gguf, int8 KV"])
def test_two_threads_give_the_bits_of_one(mode, shallow_model_path):
    one, two = (
        answers(engine_of(shallow_model_path, MODES[mode], threads), 64, crowd=4) for threads in (1, 2)
    )
    assert two == one


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("swap_bytes", [0, 64 << 20], ids=["given back", "swapped"])
def test_an_answer_that_is_given_up_and_resumed_is_the_same_to_the_bit(
    swap_bytes, kv_dtype, shallow_model_path
):
    """At the edges of a block and within one; prompt and answer are read again as one prompt, or copied back."""
    engine = engine_of(shallow_model_path, (None, None, kv_dtype), swap_bytes=swap_bytes)
    alone = answers(engine, budget_tokens=256, crowd=0)
    for length in (131, 135, 139):
        assert resumed(engine, length, GREEDY) == alone[0], length
        assert resumed(engine, length, SEEDED) == alone[1], length


def resumed(engine, length, sampling):
    """What is sampled by a sequence that is given up when it has so many tokens."""
    policy = engine.core._policy
    engine.core._policy = Forcing(policy, length).watch(engine)
    sequence = sequence_of("seeded", 130, 10, sampling)
    engine.core.submit(sequence)
    heard = []
    while not engine.core.idle():
        result = engine.core.step(0.0)
        heard += [output.sampled for output in result.outputs]
        for given_back in result.preempted:
            if given_back.state is State.DETACHED:
                sequence = replace(given_back, state=State.WAITING, computed=0)
                engine.core.submit(sequence)
    engine.core._policy = policy
    assert sequence.preemptions == 1
    engine.core.pool.waive(engine.core.detach(sequence.id).credit)
    engine.core.pool.release(sequence.table)
    return heard
