"""Host memory for blocks: what was stored comes back, and the books balance after whatever happens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.kv_cache import KVCache
from engine.cache.staged_cache import StagedKVCache
from engine.cache.swap_space import SwapSpace
from engine.scheduling.headroom import DECAY, RISE, Headroom
from tests.fakes.hash_model import hash_layout
from tests.fakes.lagging_lane import LaggingLane

BLOCKS, PLACES = 8, 5


def bytes_of(cache, block):
    return cache.tensor[block].view(torch.uint8)


@given(
    st.lists(
        st.tuples(st.sampled_from(["store", "restore", "drop"]), st.sampled_from("abc"), st.integers(1, 4))
    ),
    st.booleans(),
)
def test_what_is_stored_comes_back_as_it_was_and_nothing_is_lost(events, staged):
    layout = hash_layout()
    cache = StagedKVCache(layout, BLOCKS, LaggingLane()) if staged else KVCache(layout, BLOCKS)
    swap, kept = SwapSpace(cache, PLACES), {}
    for turn, (event, name, count) in enumerate(events):
        who = (name, 1, 0)
        if event == "store" and who not in kept and count <= swap.free:
            for block in range(count):
                bytes_of(cache, block).fill_(turn + block & 255)
            kept[who] = [bytes_of(cache, block).clone() for block in range(count)]
            swap.store(who, range(count))
        elif event == "restore" and who in kept:
            first = min(1, len(kept[who]) - 1)
            blocks = range(4, 4 + len(kept[who]) - first)
            swap.restore(who, first, blocks)
            for block, wanted in zip(blocks, kept.pop(who)[first:], strict=True):
                assert torch.equal(bytes_of(cache, block), wanted)
        elif event == "drop" and who in kept:
            swap.drop(who)
            del kept[who]
        assert swap.violations() == ()
        assert {each.owner.request_id: each.blocks for each in swap.owners()} == {
            who[0]: len(stored) for who, stored in kept.items()
        }
        assert swap.free == PLACES - sum(map(len, kept.values()))


def test_more_than_fits_is_not_stored_and_a_lost_place_is_noticed():
    swap = SwapSpace(KVCache(hash_layout(), BLOCKS), 2)
    with pytest.raises(AssertionError):
        swap.store(("a", 1, 0), range(3))
    assert swap.violations() == ()
    swap._free.pop()
    assert swap.violations() == ("1 swapped blocks are nowhere",)
    swap._free += swap._free
    assert len(swap.violations()) == 2


def test_headroom_rises_with_each_preemption_and_slowly_falls_without_in_its_bounds():
    one = Headroom(0.4, least=0.2)
    assert one.after_step(preempted=0) == Headroom(0.4 * DECAY, least=0.2)
    assert one.after_step(preempted=2).share == pytest.approx(0.4 + 2 * RISE)
    assert one.after_step(preempted=9).share == 1.0
    for _ in range(1000):
        one = one.after_step(preempted=0)
    assert one.share == 0.2
