"""Steps that are recorded and replayed give the logits and the KV of steps that are not, to the bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf
from torch.overrides import TorchFunctionMode

from engine.batch import Unread
from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from engine.kernels.reference import ReferenceBackend
from engine.model.load import load_model
from engine.recorded_runner import ROWS, RecordedRunner
from engine.runner import TransformerRunner
from tests.engine.conftest import BLOCK_SIZE
from tests.fakes.batches import BatchItem, batch_of
from tests.fakes.lagging_lane import LaggingLane
from tests.fakes.tape import Tape

BLOCKS = 64


class LaterCopies(TorchFunctionMode):
    """Copies that need not be waited for are steps of a lane, which does them when somebody waits."""

    def __init__(self, lane):
        super().__init__()
        self.lane = lane

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.Tensor.copy_ or not (kwargs or {}).get("non_blocking"):
            return function(*args, **(kwargs or {}))
        self.lane.step(lambda: function(*args))
        return args[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(5)
    config = hf.Qwen2Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("model")
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return load_model(path, ReferenceBackend(torch.float32), max_model_len=256)


def cache_of(model):
    shape = {"layers": model.config.layers, "kv_heads": model.config.kv_heads}
    return KVCache(
        KVLayout(
            model_digest="test",
            head_dim=model.config.head_dim,
            block_size=BLOCK_SIZE,
            dtype=torch.float32,
            **shape,
        ),
        BLOCKS,
    )


def recorded(model, rows_max):
    """A runner that records, its tape, and a plain one; each on a cache of its own."""
    tape, cache = Tape(), cache_of(model)
    runner = RecordedRunner(model, cache, tape, rows_max=rows_max, blocks_max=40)
    runner.record_all()
    plain_cache = cache_of(model)
    return runner, tape, cache, TransformerRunner(model, plain_cache), plain_cache


def prompt(number, length):
    return [(7 * number + 3 * place) % 96 for place in range(length)]


def test_batches_of_any_size_are_replayed_with_the_bits_of_the_plain_runner(model):
    runner, tape, cache, plain, plain_cache = recorded(model, rows_max=12)
    sizes = tape.recorded
    assert sizes == len([rows for rows in ROWS if rows < 12] + [12]) * len([16, 32, 64])
    tables = [tuple(range(3 * number + 1, 3 * number + 4)) for number in range(13)]
    contexts = {number: prompt(number, 1 + number % 5) for number in range(13)}
    for each in (runner, plain):
        for number, known in contexts.items():
            each.run(batch(item(known, 0, tables[number])))
    before = tape.replayed
    for count in (1, 2, 3, 5, 8, 9, 12, 11, 1):
        chosen = list(contexts)[:count]
        step = batch(*(item([40 + number], len(contexts[number]), tables[number]) for number in chosen))
        assert torch.equal(runner.run(step).clone(), plain.run(step)), count
        for number in chosen:
            contexts[number] = [*contexts[number], 40 + number]
    assert tape.replayed - before == 9 and tape.recorded == sizes
    assert same_from_the_second_block_on(cache, plain_cache)


@pytest.mark.parametrize("count", [1, 3, 4, 9, 12])
def test_tokens_that_nobody_has_read_are_put_in_on_the_way(model, count):
    """Some of a batch, in any order; what is repeated to fill a recording is the last one, read or not."""
    runner, tape, _, plain, _ = recorded(model, rows_max=12)
    tables = [(2 * number + 1, 2 * number + 2) for number in range(count)]
    for each in (runner, plain):
        for number, table in enumerate(tables):
            each.run(batch(item(prompt(number, 2), 0, table)))
    step = batch(*(item([50 + number], 2, table) for number, table in enumerate(tables)))
    unread = [*range(0, count, 2)][::-1] + [count - 1] * (count % 2 == 0)
    hidden = step.token_ids.copy()
    hidden[unread] = 0
    drawn = torch.tensor([50 + number for number in range(count)][::-1])
    places, indices = np.array(unread), count - 1 - np.array(unread)
    told = Unread(places=places, indices=indices, drawn=drawn)
    before = tape.replayed
    for each in (runner, plain):
        found = each.run(replace(step, token_ids=hidden.copy(), unread=told)).clone()
        assert torch.equal(found, each.run(step))
    assert tape.replayed == before + 2


def test_the_inputs_of_a_step_are_filled_while_those_of_the_one_before_it_are_on_their_way(model):
    """As on a GPU, which takes them over when it comes to that step."""
    lane, cache, plain = LaggingLane(), cache_of(model), TransformerRunner(model, cache_of(model))

    def record(work):
        work()
        return lambda: lane.step(work)

    runner = RecordedRunner(model, cache, record, rows_max=4, blocks_max=40)
    runner.record_all()
    steps = [
        batch(item([20], 0, (1,)), item([21], 0, (2,))),
        batch(item([30], 1, (1,)), item([31], 1, (2,)), item([32], 0, (3,))),
        batch(item([40], 0, (4,))),
        batch(item([50], 2, (1,)), item([51], 1, (4,))),
    ]
    found, asked = [], []
    with torch.inference_mode(), LaterCopies(lane):
        for step in steps:
            logits = runner.run(step)
            lane.step(lambda logits=logits: found.append(logits.clone()))
            asked.append(lane.steps())
            for before in asked[:-1]:
                before.wait()
            assert len(found) == len(asked) - 1, "while one is computed, the next has been asked for"
        asked[-1].wait()
    for step, logits in zip(steps, found, strict=True):
        assert torch.equal(logits, plain.run(step))


@pytest.mark.parametrize("rows_max", [1, 2, 7, 12, 64])
def test_recorded_kernels_read_where_tensors_of_their_own_would_begin(model, rows_max):
    """Else others are compiled for them than are checked."""
    seen = []

    class Watching:
        config, max_model_len = model.config, model.max_model_len

        def forward(self, token_ids, kv, meta, rows):
            seen.extend(
                (
                    token_ids,
                    meta.positions,
                    meta.slots,
                    meta.query_starts,
                    meta.context_lengths,
                    meta.block_tables,
                )
            )
            return model.forward(token_ids, kv, meta, rows)

    RecordedRunner(Watching(), cache_of(model), Tape(), rows_max=rows_max, blocks_max=40).record_all()
    assert len(seen) > 0 and {tensor.data_ptr() % 16 for tensor in seen} == {0}


def test_what_no_recording_is_for_is_computed_all_the_same(model):
    runner, tape, cache, plain, plain_cache = recorded(model, rows_max=2)
    many = batch(*(item([number], 0, (1 + number,)) for number in range(3)))
    chunk = batch(item(prompt(1, 9), 0, (10, 11, 12)))
    mixed = batch(item([5], 9, (10, 11, 12)), item(prompt(2, 3), 0, (20,)))
    unfinished = batch(item([6], 0, (30,), wants_logits=False))
    for step in (many, chunk, mixed, unfinished):
        assert torch.equal(runner.run(step), plain.run(step))
    assert tape.replayed == 0
    assert same_from_the_second_block_on(cache, plain_cache)


def test_a_longer_sequence_takes_a_wider_recording_and_forgets_the_tables_before_it(model):
    runner, tape, _, plain, _ = recorded(model, rows_max=2)
    long, short = prompt(3, 100), prompt(4, 2)
    for each in (runner, plain):
        each.run(batch(item(long, 0, tuple(range(1, 26)))))
        each.run(batch(item(short, 0, (40,))))
    steps = [
        batch(item([9], 100, tuple(range(1, 27)))),
        batch(item([8], 2, (40,))),
        batch(item([7], 101, tuple(range(1, 27))), item([6], 3, (40,))),
        batch(item([5], 4, (40, 41))),
    ]
    for step in steps:
        assert torch.equal(runner.run(step).clone(), plain.run(step))
    assert tape.replayed == len(steps)


def item(tokens, first, table, wants_logits=True):
    needed = -(-(first + len(tokens)) // BLOCK_SIZE)
    return BatchItem(
        tokens=tuple(tokens), first_position=first, block_table=table[:needed], wants_logits=wants_logits
    )


def batch(*items):
    return batch_of(*items, block_size=BLOCK_SIZE)


def same_from_the_second_block_on(cache, other):
    """The first one is written when all is recorded."""
    return torch.equal(cache.tensor[1:], other.tensor[1:])
