"""What an engine takes of its memory before anybody waits."""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.cache.kv_cache import KVCache
from engine.kernels.triton.tiles import SPLIT_BYTES_MAX
from engine.loading import recorded_bytes, room_bytes, step_bytes
from engine.recorded_runner import ROWS
from engine.sampling import Sampler
from engine.scoring import ROWS_MAX
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


SIZES = SimpleNamespace(hidden_size=8, heads=2, kv_heads=1, head_dim=4, intermediate_size=16, vocab_size=100)
ROW = 4 * (3 * 8 + 2 * 16 + 3 * 16)
LOGITS = 2 * 4 * 100
"""Bytes of one row between kernels, and of its logits, as they are made and taken out."""


@pytest.mark.parametrize(
    ("tokens", "sequences", "rows", "logits"),
    [
        (1000, 3, 1000, 3 + ROWS_MAX),
        (1000, 900, 1000, 1000),
        (10, 3, 10, 10),
        (10, 64, 65, 65),
    ],
)
def test_a_step_is_kept_room_for_its_rows_all_logits_and_what_is_kept_between_two_passes(
    tokens, sequences, rows, logits
):
    """Rows that are scored among them; where everybody generates one prompt's token more than the budget."""
    assert step_bytes(SIZES, tokens, sequences) == rows * ROW + logits * LOGITS + SPLIT_BYTES_MAX


@pytest.mark.parametrize(("sequences", "rows"), [(1, 1), (64, 64), (5000, ROWS[-1])])
def test_recordings_are_kept_room_for_the_largest_of_them(sequences, rows):
    assert recorded_bytes(SIZES, sequences) == rows * (ROW + LOGITS) + SPLIT_BYTES_MAX
    assert recorded_bytes(SIZES, 0) == 0


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
