"""A cache on a device: blocks go to host memory and back beside the steps, and nothing is read too early."""

from collections import deque
from queue import Queue

import pytest
import torch

from engine.cache.copying import Copying, nothing
from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from engine.cache.staged_cache import StagedKVCache
from tests.fakes.lagging_lane import LaggingLane

LAYOUT = KVLayout(model_digest="m", layers=2, kv_heads=1, head_dim=4, block_size=2, dtype=torch.float32)
BLOCKS = 9
PATIENCE_S = 60


@pytest.fixture
def lane():
    return LaggingLane()


@pytest.fixture(params=[1, 2, 4, 100], ids=lambda blocks: f"{blocks} at once")
def cache(request, lane):
    return StagedKVCache(LAYOUT, BLOCKS, lane, staged_bytes=request.param * LAYOUT.block_bytes())


class Beside:
    """Copies that go on only when they are told to. said: what was told, in order."""

    def __init__(self, cache):
        self.said, self._done = [], deque()
        self.copying = Copying(self._done.append, self.said.append)
        assert cache.copy_beside(self.copying.begin)

    def say(self, word):
        return lambda: self.said.append(word)

    def settle(self):
        while self.copying.due():
            self.turn()

    def turn(self):
        self.copying.turn()
        while self._done:
            self._done.popleft()()


@pytest.fixture
def beside(cache):
    return Beside(cache)


def filled(block, turn=0):
    return torch.full(LAYOUT.block_shape(), float(100 * turn + block + 1))


def put(cache, block, values):
    cache.block_view(block)[:] = values.numpy().tobytes()


def held(cache, block):
    return torch.frombuffer(cache.block_view(block), dtype=torch.float32).view(LAYOUT.block_shape())


def compute(cache, blocks):
    for block in blocks:
        cache.tensor[block].copy_(filled(block))


def test_what_steps_have_begun_to_compute_is_in_host_memory_and_nothing_else_is_touched(cache, lane):
    chosen, seen = [7, 0, 3, 8, 1], []
    lane.step(lambda: compute(cache, range(BLOCKS)))
    cache.to_host(chosen, lambda: seen.append(held(cache, 7).clone()), lambda: seen.append("then"))
    assert torch.equal(seen[0], filled(7)) and seen[1:] == ["then"]
    for block in range(BLOCKS):
        wanted = filled(block) if block in chosen else 0 * filled(block)
        assert torch.equal(held(cache, block), wanted)


def test_what_was_written_in_host_memory_is_there_for_the_next_step(cache):
    for turn, chosen in enumerate([[2, 5, 1], [4], [8, 7, 6, 0, 3], [2]]):
        for block in chosen:
            put(cache, block, filled(block, turn))
        cache.from_host(chosen, nothing)
        for block in chosen:
            put(cache, block, filled(0, 99))
            assert torch.equal(cache.tensor[block], filled(block, turn))


def test_a_step_that_has_begun_reads_what_was_there_before(cache, lane):
    seen = []
    lane.step(lambda: seen.append(cache.tensor[4].clone()))
    put(cache, 4, filled(4))
    cache.from_host([4], nothing)
    assert torch.equal(seen[0], 0 * filled(4)) and torch.equal(cache.tensor[4], filled(4))


def test_both_ways_in_turn_share_their_stages(cache):
    for turn in range(3):
        for block in range(5):
            put(cache, block, filled(block, turn))
        cache.from_host(range(5), nothing)
        cache.tensor[5:].copy_(cache.tensor[:4] + 1000)
        cache.to_host(range(5, 9), nothing, nothing)
        for block in range(4):
            assert torch.equal(held(cache, 5 + block), filled(block, turn) + 1000)


def test_no_blocks_are_no_copy(cache):
    cache.to_host([], nothing, nothing)
    cache.from_host([], nothing)
    assert not cache.tensor.any()


def test_who_asks_for_copies_goes_on_and_is_told_of_each_when_it_is_done_in_the_order_of_asking(
    cache, lane, beside
):
    say, blocks = beside.say, range(5)
    lane.step(lambda: compute(cache, blocks))
    cache.to_host(blocks, say("read 0-4"), say("then 0-4"))
    put(cache, 7, filled(7))
    cache.from_host([7, 8], say("then 7, 8"))
    cache.to_host([], say("read none"), say("then none"))
    assert beside.said == [] and not cache.tensor.any() and not held(cache, 0).any()
    while "then 0-4" not in beside.said:
        assert "read 0-4" not in beside.said or torch.equal(held(cache, 4), filled(4))
        beside.turn()
    for block in blocks:
        assert torch.equal(held(cache, block), filled(block))
    assert not cache.tensor[7].any(), "a copy that comes later has not been begun"
    beside.settle()
    assert torch.equal(cache.tensor[7], filled(7))
    assert beside.said == ["read 0-4", "then 0-4", "then 7, 8", "read none", "then none"]


def test_a_copy_comes_after_the_steps_before_it_and_before_no_others(cache, lane, beside):
    lane.step(lambda: compute(cache, [0]))
    cache.to_host([0], nothing, nothing)
    lane.step(lambda: cache.tensor[1].fill_(5.0))
    beside.settle()
    assert torch.equal(held(cache, 0), filled(0)) and not cache.tensor[1].any()


def test_what_is_swapped_is_copied_at_once_past_copies_that_wait(cache, lane, beside):
    memory = KVCache(LAYOUT, 3)
    compute(cache, range(BLOCKS))
    cache.to_host([0, 1, 2, 3], beside.say("read"), nothing)
    beside.turn()
    cache.store([4, 5], memory, [2, 0])
    cache.tensor.zero_()
    cache.restore([6, 7], memory, [2, 0])
    assert torch.equal(cache.tensor[6], filled(4)) and torch.equal(cache.tensor[7], filled(5))
    assert beside.said == []
    for block in (4, 5, 6, 7):
        assert not held(cache, block).any(), "what is swapped takes no way through the places of hand-offs"


def test_in_host_memory_there_is_nothing_to_copy_and_nobody_waits():
    said, cache = [], KVCache(LAYOUT, BLOCKS)
    assert not cache.copy_beside(lambda copy, then: said.append("begun"))
    cache.to_host([1], lambda: said.append("read"), lambda: said.append("then"))
    cache.from_host([1], lambda: said.append("then"))
    assert said == ["read", "then", "then"]


def test_a_thread_copies_in_order_and_is_ended(cache):
    told = Queue()
    copying = Copying(told.put, told.put, lambda: told.put("begun"))
    cache.copy_beside(copying.begin)
    compute(cache, range(BLOCKS))
    copying.start()
    cache.to_host(range(4), lambda: told.put("read"), "first")
    cache.from_host([8], "second")
    assert [told.get(timeout=PATIENCE_S) for _ in range(4)] == ["begun", "read", "first", "second"]
    copying.stop()
    cache.to_host([0], lambda: told.put("read"), "too late")
    assert told.empty() and torch.equal(held(cache, 3), filled(3))


def test_a_thread_that_fails_says_so_and_tells_nobody_that_a_copy_is_done(cache, lane, monkeypatch):
    told = Queue()
    copying = Copying(told.put, told.put)
    cache.copy_beside(copying.begin)

    def refuse(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(lane, "scatter", refuse)
    copying.start()
    cache.from_host([1], "done")
    assert isinstance(told.get(timeout=PATIENCE_S), ZeroDivisionError)
    copying.stop()
    assert told.empty()


def test_a_thread_that_was_never_started_is_ended_too():
    Copying(nothing, nothing).stop()
