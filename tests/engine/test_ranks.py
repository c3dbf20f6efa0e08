"""Ranks that share a model say, to the bit, what one rank says that has all of it."""

import mmap
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import transformers as hf
from gguf import GGMLQuantizationType as Type

from engine.batch import BlockCopy
from engine.cache.copying import nothing
from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from engine.cache.staged_cache import StagedKVCache
from engine.collective import ALONE, Share
from engine.errors import ModelError
from engine.kernels.triton.backend import TritonBackend
from engine.model.load import load_model
from engine.model.transformer import Quantization
from engine.runner import TransformerRunner
from tests.engine.conftest import BLOCK_SIZE
from tests.engine.test_model_gguf import write_model
from tests.fakes.batches import BatchItem, batch_of
from tests.fakes.lagging_lane import LaggingLane
from tests.fakes.ranks import ThreadRanks

SMALL = {
    "vocab_size": 70,  # which four ranks cannot share evenly
    "hidden_size": 64,
    "intermediate_size": 160,  # 40 outputs of each of four ranks are no whole number of vectors
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
MODELS = {
    "biases and a window": hf.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "norms of heads": hf.Qwen3Config(**SMALL, head_dim=12, tie_word_embeddings=True),
}
FILES = {"Q8_0": Type.Q8_0, "Q4_1": Type.Q4_1}
LONG, SHORT = list(range(3, 24)), [9, 60, 27, 1, 44]
STEPS = [[(LONG, 0, 6), (SHORT, 0, 3)], [(LONG, 6, 14)], [(LONG, 14, 20)], [(LONG, 20, 21), (SHORT, 3, 5)]]
"""Runs of each step: of whose tokens, from where to where. Nobody wants to know what comes after
those that end at 6 and 14."""
BLOCKS = 12
COPIES = (BlockCopy(source=0, target=1), BlockCopy(source=11, target=3))
"""Before each step: from the first block of each sequence to one that nobody has."""


@pytest.fixture(scope="module")
def folder_of(random_model_of, tmp_path_factory):
    """Of a model by its name, or the path of a file of a stored type."""
    made = {}

    def path(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("model")
            if name in FILES:
                made[name] /= f"{name}.gguf"
                write_model(made[name], random_model_of(hf.LlamaConfig(**SMALL)), quantization=FILES[name])
            else:
                random_model_of(MODELS[name]).save_pretrained(made[name])
        return made[name]

    return path


def layout_of(config, dtype):
    return KVLayout(
        model_digest="",
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
        dtype=dtype,
    )


def batches(steps=STEPS):
    """Both sequences have every other block, one from the front and one from the back."""
    tables = {id(LONG): range(0, BLOCKS, 2), id(SHORT): range(BLOCKS - 1, 0, -2)}
    for runs in steps:
        items = [
            BatchItem(
                tokens=tuple(tokens[first:end]),
                first_position=first,
                block_table=tuple(tables[id(tokens)][: -(-end // BLOCK_SIZE)]),
                wants_logits=end not in (6, 14),
            )
            for tokens, first, end in runs
        ]
        yield replace(batch_of(*items, block_size=BLOCK_SIZE), copies=COPIES)


def answer(backend, path, kv_dtype, memory=None, *, quantization, collective=ALONE):
    """(logits of all steps, the cache with what was computed)."""
    model = load_model(path, backend, 64, quantization, collective=collective)
    cache = KVCache(layout_of(model.config, kv_dtype), BLOCKS, memory, collective.share)
    runner = TransformerRunner(model, cache)
    return torch.cat([runner.run(batch) for batch in batches()]), cache


def answers(backend_of_rank, path, kv_dtype, ranks, quantization):
    """Of each rank, in order, over one memory."""
    layout = layout_of(load_model(path, backend_of_rank(), 64).config, kv_dtype)
    memory = mmap.mmap(-1, BLOCKS * layout.block_bytes())
    together = ThreadRanks(ranks)
    said = together.run(
        lambda each: answer(
            backend_of_rank(), path, kv_dtype, memory, quantization=quantization, collective=each
        )
    )
    assert together.gathered == sum(2 * 4 + 1 if len(each.rows) else 2 * 4 - 2 for each in batches())
    return said


def whole(cache):
    return torch.frombuffer(
        bytearray(b"".join(cache.block_view(i) for i in range(BLOCKS))), dtype=torch.uint8
    )


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.int8),
    ],
)
@pytest.mark.parametrize("name", [*MODELS, *FILES])
def test_ranks_say_what_one_says(backend_of, folder_of, name, dtype, kv_dtype):
    if backend_of(torch.float32, 1).name == "reference":
        pytest.skip("plain torch promises no bits of a part of a product")
    modes = (Quantization.STORED,) if name in FILES else tuple(set(Quantization) - {Quantization.STORED})
    for mode in modes:
        path = folder_of(name)
        wanted, one = answer(backend_of(dtype, 1), path, kv_dtype, quantization=mode)
        for ranks in (2, 4):
            for logits, cache in answers(lambda: backend_of(dtype, 1), path, kv_dtype, ranks, mode):
                assert logits.isfinite().all() and torch.equal(logits, wanted), (mode, ranks)
                assert torch.equal(whole(cache), whole(one)), (mode, ranks)


def test_ranks_on_the_kernels_of_a_gpu_say_what_one_says(folder_of, dots_in_order):
    backend = TritonBackend(torch.float32, torch.device("cpu"))
    path, mode = folder_of("norms of heads"), Quantization.INT8
    (batch,) = batches([[(SHORT, 0, 3)]])

    def on_own_heads(collective):
        model = load_model(path, backend, 64, mode, collective=collective)
        cache = StagedKVCache(
            layout_of(model.config, torch.float32), BLOCKS, LaggingLane(), share=collective.share
        )
        return TransformerRunner(model, cache).run(batch)

    wanted = on_own_heads(ALONE)
    together = ThreadRanks(2, in_turns=True)
    for logits in together.run(on_own_heads):
        assert torch.equal(logits, wanted)


@pytest.mark.parametrize("staged", [False, True])
def test_a_block_of_host_memory_has_the_heads_of_all_ranks(staged):
    layout = KVLayout(
        model_digest="", layers=2, kv_heads=4, head_dim=6, block_size=BLOCK_SIZE, dtype=torch.float32
    )
    memory = mmap.mmap(-1, BLOCKS * layout.block_bytes())
    shares = [Share(rank=rank, size=2) for rank in range(2)]
    if staged:
        caches = [StagedKVCache(layout, BLOCKS, LaggingLane(), memory, share) for share in shares]
    else:
        caches = [KVCache(layout, BLOCKS, memory, share) for share in shares]
    content = torch.randn(layout.block_shape())
    for cache, share in zip(caches, shares, strict=True):
        cache.tensor[3] = content[..., share.of(4), :]
        cache.to_host([3], nothing, nothing)
    held = torch.frombuffer(bytearray(caches[0].block_view(3)), dtype=torch.float32)
    assert torch.equal(held, content.flatten())
    for cache in caches:
        cache.block_view(5)[:] = caches[0].block_view(3)
        cache.from_host([5], nothing)
        assert torch.equal(cache.tensor[5], cache.tensor[3])
        assert not cache.tensor[4].any()


def test_ranks_that_cannot_share_a_model_evenly_are_refused_by_the_numbers(folder_of, backend):
    collective = ThreadRanks(3).of(1)
    said = "tensor_parallel_size 3 does not divide the model's heads 8, kv_heads 4, hidden_size 64, "
    with pytest.raises(ModelError, match=said + "intermediate_size 160"):
        load_model(folder_of("norms of heads"), backend, 64, collective=collective)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 70])
def test_shares_are_all_there_is_once_and_in_order(count):
    for size in (1, 2, 3, 8):
        slices = [Share(rank=rank, size=size).of(count) for rank in range(size)]
        assert slices[0].start == 0 and slices[-1].stop == count
        assert all(one.stop == two.start for one, two in pairwise(slices))
