"""What an engine takes of its memory before anybody waits."""

import numpy as np
import pytest

from engine.cache.kv_cache import KVCache
from engine.loading import room_bytes
from engine.sampling import Sampler
from engine.warm_up import warm_up
from tests.fakes.hash_model import HashRunner, hash_layout


@pytest.mark.parametrize(
    ("given", "room"),
    [
        ({"share": 0.9, "free": 900, "own": 100}, 790),
        ({"share": 0.45, "free": 900, "own": 100}, 340),
        ({"share": 0.9, "free": 300, "own": 100}, 290),
        ({"share": 0.05, "free": 900, "own": 100}, 0),
    ],
)
def test_a_cache_has_what_is_left_of_a_share_of_the_whole_and_steps_keep_theirs(given, room):
    """However much others have taken before: only what is not there cannot be had."""
    assert room_bytes(total=1000, steps=10, **given) == room


@pytest.mark.parametrize(
    ("blocks", "tokens_max", "step_tokens", "first"),
    [
        (20, 100, 50, [50]),
        (20, 100, 500, [80]),
        (20, 18, 50, [16, 16, 16, 2]),
        (20, 3, 7, [3, 3]),
        (20, 100, 4, [4]),
        (1, 100, 50, [4]),
        (2, 100, 50, [8]),
    ],
)
def test_the_largest_step_is_taken_once_before_anybody_waits(blocks, tokens_max, step_tokens, first):
    cache = KVCache(hash_layout(4), blocks)
    runner = HashRunner(cache)
    warm_up(runner, Sampler(), cache, tokens_max=tokens_max, step_tokens=step_tokens)
    counts = [np.diff(batch.query_starts).tolist() for batch in runner.batches]
    assert counts[0] == first
    assert counts[1][0] == 1 and counts[2] == [1]
    for batch in runner.batches:
        assert (
            len({*batch.slots.tolist()}) == batch.num_tokens() and batch.context_lengths.max() <= tokens_max
        )
