"""The layout of a block and its fingerprint; the bytes of all blocks."""

import hashlib
import resource
from dataclasses import replace

import pytest
import torch

from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout

LAYOUT = KVLayout(model_digest="a1b2", layers=3, kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32)
LAYOUT = replace(LAYOUT, numerics=(("processor", "this"), ("weights", "float32")))
CHANGES = {
    "model": {"model_digest": "a1b3"},
    "layers": {"layers": 4},
    "kv_heads": {"kv_heads": 4},
    "head_dim": {"head_dim": 16},
    "block_size": {"block_size": 8},
    "dtype": {"dtype": torch.bfloat16},
    "processor": {"numerics": (("processor", "another"), ("weights", "float32"))},
    "weights": {"numerics": (("processor", "this"), ("weights", "bfloat16"))},
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_field_changes_the_fingerprint_and_is_named_by_fields(name):
    changed = replace(LAYOUT, **CHANGES[name])
    assert changed.fingerprint() != LAYOUT.fingerprint()
    differing = {key for key, value in LAYOUT.fields().items() if changed.fields()[key] != value}
    assert differing == {name}


def test_every_field_of_the_layout_is_covered_and_a_version_besides():
    assert set(LAYOUT.fields()) == {*CHANGES, "version"}
    assert {name for change in CHANGES.values() for name in change} == set(KVLayout.__dataclass_fields__)


def test_a_name_of_numerics_that_the_layout_has_already_is_a_mistake():
    with pytest.raises(AssertionError):
        replace(LAYOUT, numerics=(("dtype", "x"),)).fields()


def test_layouts_that_are_equal_have_one_fingerprint_of_32_bytes():
    assert replace(LAYOUT).fingerprint() == LAYOUT.fingerprint()
    assert len(LAYOUT.fingerprint()) == 32


def test_the_fingerprint_is_a_hash_of_length_prefixed_names_and_values():
    """Written out, since another process, of another version perhaps, computes it too."""
    parts = (
        b"\0\0\0\x0ablock_size\0\0\0\x014"
        b"\0\0\0\x05dtype\0\0\0\x07float32"
        b"\0\0\0\x08head_dim\0\0\0\x018"
        b"\0\0\0\x08kv_heads\0\0\0\x012"
        b"\0\0\0\x06layers\0\0\0\x013"
        b"\0\0\0\x05model\0\0\0\x04a1b2"
        b"\0\0\0\x09processor\0\0\0\x04this"
        b"\0\0\0\x07version\0\0\0\x012"
        b"\0\0\0\x07weights\0\0\0\x07float32"
    )
    assert LAYOUT.fingerprint() == hashlib.sha256(parts).digest()


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_rounds_up(tokens, blocks):
    assert LAYOUT.blocks_for(tokens) == blocks


def test_block_bytes_count_all_layers_keys_and_values():
    assert LAYOUT.block_bytes() == 3 * 2 * 4 * 2 * 8 * 4
    assert replace(LAYOUT, dtype=torch.bfloat16).block_bytes() == 3 * 2 * 4 * 2 * 8 * 2


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_block_of_bytes_has_a_float32_for_each_head_of_each_position(dtype):
    assert replace(LAYOUT, dtype=dtype).block_bytes() == 3 * 2 * 4 * 2 * (8 + 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_block_is_one_run_of_bytes_and_nobody_elses(dtype):
    cache = KVCache(replace(LAYOUT, dtype=dtype), num_blocks=5)
    zeros = bytes(cache.layout.block_bytes())
    values = torch.arange(cache.tensor[2].numel()).remainder(97).add(1).to(dtype)
    cache.tensor[2] = values.view(cache.layout.block_shape())
    assert [bytes(cache.block_view(block)) == zeros for block in range(5)] == [True, True, False, True, True]
    assert bytes(cache.block_view(2)) == values.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_bytes_written_through_the_view_are_the_blocks_values(dtype):
    cache = KVCache(replace(LAYOUT, dtype=dtype), num_blocks=3)
    values = torch.arange(cache.tensor[1].numel()).remainder(89).to(dtype)
    view = cache.block_view(1)
    assert (view.format, view.ndim, view.nbytes) == ("B", 1, cache.layout.block_bytes())
    view[:] = values.view(torch.uint8).numpy().tobytes()
    assert torch.equal(cache.tensor[1].flatten(), values)
    assert not cache.tensor[0].any()
    assert not cache.tensor[2].any()


@pytest.mark.parametrize("block", [-1, 3])
def test_a_block_that_does_not_exist_has_no_view(block):
    with pytest.raises(AssertionError):
        KVCache(LAYOUT, num_blocks=3).block_view(block)


def test_memory_that_was_populated_is_there_before_it_is_written_and_zero_like_all_other():
    cache = KVCache(LAYOUT, num_blocks=(24 << 20) // LAYOUT.block_bytes())
    before, pieces = resident_bytes(), 0
    while cache.populate():
        pieces += 1
    assert pieces == 12
    assert resident_bytes() - before > 20 << 20
    assert not cache.tensor.any()


def resident_bytes() -> int:
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * resource.getpagesize()
