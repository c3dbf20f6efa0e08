"""The runner lays a batch out so that each sequence's logits are its own, however its tokens were cut."""

import pytest
import torch
import transformers as hf

from engine.errors import ModelError
from engine.model.load import load_model
from tests.engine.conftest import BLOCK_SIZE
from tests.fakes.batches import BatchItem, batch_of

TOKENS = [3, 17, 5, 91, 2, 44, 44, 8, 60, 23, 71, 1, 39, 12, 88, 64, 30, 7]
OTHER = [9, 9, 81, 4, 27, 36]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(5)
    config = hf.MistralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        sliding_window=6,
        initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("model")
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder, backend):
    return load_model(folder, backend, max_model_len=64)


def item(tokens, first, table, wants_logits=True):
    return BatchItem(
        tokens=tuple(tokens), first_position=first, block_table=tuple(table), wants_logits=wants_logits
    )


def batch(*items):
    return batch_of(*items, block_size=BLOCK_SIZE)


def test_a_prompt_cut_into_chunks_ends_in_the_logits_of_the_whole_prompt(model, runner_of):
    (whole,) = runner_of(model, 8).run(batch(item(TOKENS, 0, (7, 2, 4, 0, 5))))
    runner = runner_of(model, 8)
    first = runner.run(batch(item(TOKENS[:7], 0, (1, 6), wants_logits=False)))
    assert first.shape == (0, 96)
    runner.run(batch(item(TOKENS[7:8], 7, (1, 6))))
    (last,) = runner.run(batch(item(TOKENS[8:], 8, (1, 6, 3, 0, 5))))
    assert torch.equal(last, whole)


def test_sequences_in_one_batch_do_not_see_each_other(model, runner_of):
    (alone,) = runner_of(model, 8).run(batch(item(TOKENS, 0, range(5))))
    (other,) = runner_of(model, 8).run(batch(item(OTHER, 0, range(2))))
    runner = runner_of(model, 10)
    runner.run(batch(item(OTHER[:5], 0, (9, 3)), item(TOKENS[:4], 0, (6,))))
    both = runner.run(batch(item(TOKENS[4:], 4, (6, 0, 8, 1, 2)), item(OTHER[5:], 5, (9, 3))))
    assert torch.equal(both, torch.stack([alone, other]))


def test_rows_come_in_item_order_and_only_for_the_items_that_want_them(model, runner_of):
    def first_of(tokens):
        return runner_of(model, 8).run(batch(item(tokens, 0, (0, 1))))[0]

    mixed = batch(
        item(OTHER, 0, (0, 1)),
        item(TOKENS[:3], 0, (2,), wants_logits=False),
        item(TOKENS[:5], 0, (5, 3)),
    )
    logits = runner_of(model, 8).run(mixed)
    assert logits.dtype is torch.float32
    assert torch.equal(logits, torch.stack([first_of(OTHER), first_of(TOKENS[:5])]))


def test_a_table_too_short_for_its_tokens_is_a_mistake_of_the_caller(model, runner_of):
    with pytest.raises(AssertionError, match="block table"):
        runner_of(model, 8).run(batch(item(OTHER, 0, (0,)), item(OTHER, 0, (1, 2))))


@pytest.mark.parametrize("length", [0, 65])
def test_a_model_is_not_loaded_for_more_positions_than_it_knows(folder, backend, length):
    with pytest.raises(ModelError, match=rf"max_model_len {length} is outside \[1, 64\]"):
        load_model(folder, backend, max_model_len=length)
