"""A cache on a device: blocks go to host memory and back beside the steps, and nothing is read too early."""

import pytest
import torch

from engine.cache.layout import KVLayout
from engine.cache.staged_cache import StagedKVCache
from tests.fakes.lagging_lane import LaggingLane

LAYOUT = KVLayout(model_digest="m", layers=2, kv_heads=1, head_dim=4, block_size=2, dtype=torch.float32)
BLOCKS = 9


@pytest.fixture
def lane():
    return LaggingLane()


@pytest.fixture(params=[1, 2, 4, 100], ids=lambda blocks: f"{blocks} at once")
def cache(request, lane):
    return StagedKVCache(LAYOUT, BLOCKS, lane, staged_bytes=request.param * LAYOUT.block_bytes())


def filled(block, turn=0):
    return torch.full(LAYOUT.block_shape(), float(100 * turn + block + 1))


def put(cache, block, values):
    cache.block_view(block)[:] = values.numpy().tobytes()


def held(cache, block):
    return torch.frombuffer(cache.block_view(block), dtype=torch.float32).view(LAYOUT.block_shape())


def test_what_steps_have_begun_to_compute_is_in_host_memory_and_nothing_else_is_touched(cache, lane):
    chosen = [7, 0, 3, 8, 1]
    lane.step(lambda: [cache.tensor[block].copy_(filled(block)) for block in range(BLOCKS)])
    cache.to_host(chosen)
    for block in range(BLOCKS):
        wanted = filled(block) if block in chosen else 0 * filled(block)
        assert torch.equal(held(cache, block), wanted)


def test_what_was_written_in_host_memory_is_there_for_the_next_step(cache):
    for turn, chosen in enumerate([[2, 5, 1], [4], [8, 7, 6, 0, 3], [2]]):
        for block in chosen:
            put(cache, block, filled(block, turn))
        cache.from_host(chosen)
        for block in chosen:
            put(cache, block, filled(0, 99))
            assert torch.equal(cache.tensor[block], filled(block, turn))


def test_a_step_that_has_begun_reads_what_was_there_before(cache, lane):
    seen = []
    lane.step(lambda: seen.append(cache.tensor[4].clone()))
    put(cache, 4, filled(4))
    cache.from_host([4])
    assert torch.equal(seen[0], 0 * filled(4)) and torch.equal(cache.tensor[4], filled(4))


def test_both_ways_in_turn_share_their_stages(cache):
    for turn in range(3):
        for block in range(5):
            put(cache, block, filled(block, turn))
        cache.from_host(range(5))
        cache.tensor[5:].copy_(cache.tensor[:4] + 1000)
        cache.to_host(range(5, 9))
        for block in range(4):
            assert torch.equal(held(cache, 5 + block), filled(block, turn) + 1000)


def test_no_blocks_are_no_copy(cache):
    cache.to_host([])
    cache.from_host([])
    assert not cache.tensor.any()
