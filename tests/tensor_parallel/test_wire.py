"""What ranks say to each other comes through as it was said, and nothing else does."""

from dataclasses import fields, replace

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Batch, BlockCopy
from engine.ranks import FromHost, ToHost
from tensor_parallel.wire import (
    MESSAGE_BYTES_MAX,
    Bounds,
    Done,
    Loaded,
    MalformedMessage,
    Open,
    Ready,
    Refused,
    Stop,
    batch_bytes_max,
    decode,
    encode,
)
from tests.fakes.batches import BatchItem, batch_of

BOUNDS = Bounds(vocab_size=50, positions=64, num_blocks=9, block_size=4)
MESSAGES = [
    Loaded(free_bytes=None),
    Loaded(free_bytes=3 << 40),
    Refused(text="no room: 5 GiB — and more"),
    Open(num_blocks=7),
    Ready(threads=(3, 99)),
    Done(),
    Stop(),
    ToHost(blocks=(8, 0)),
    FromHost(blocks=()),
]


def batch(**changes):
    items = (
        BatchItem(tokens=(1, 49, 7), first_position=3, block_table=(8, 2), wants_logits=True),
        BatchItem(tokens=(5,), first_position=0, block_table=(1,), wants_logits=False),
    )
    made = batch_of(*items, block_size=4)
    return replace(made, copies=(BlockCopy(source=4, target=8),), **changes)


def same(one, two):
    return all(
        np.array_equal(getattr(one, field.name), getattr(two, field.name))
        and getattr(getattr(one, field.name), "dtype", None)
        == getattr(getattr(two, field.name), "dtype", None)
        for field in fields(Batch)
    )


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_a_message_comes_through_as_it_was_said(message):
    assert decode(encode(message), BOUNDS) == message


def test_a_batch_comes_through_and_its_arrays_may_be_written():
    heard = decode(encode(batch(), 4), BOUNDS)
    assert isinstance(heard, Batch) and same(heard, batch())
    assert all(array.flags.writeable for array in (heard.token_ids, heard.positions, heard.slots))


def test_of_block_tables_only_what_runs_need_is_said():
    tables = np.array([[8, 2, 5], [1, 7, 3]], np.int32)
    heard = decode(encode(batch(block_tables=tables), 4), BOUNDS)
    assert heard.block_tables.tolist() == [[8, 2], [1, -1]]


@pytest.mark.parametrize(("runs", "tokens"), [(1, 1), (3, 40), (200, 1)])
def test_no_batch_is_longer_than_the_longest_that_is_promised(runs, tokens):
    table = tuple(range(16))
    item = BatchItem(tokens=(1,) * tokens, first_position=64 - tokens, block_table=table, wants_logits=True)
    largest = replace(
        batch_of(*[item] * runs, block_size=4),
        rows=np.arange(runs * tokens),
        copies=(BlockCopy(source=4, target=8),) * runs,
    )
    promised = batch_bytes_max(runs=runs, tokens=runs * tokens, blocks=16)
    assert promised - 256 < len(encode(largest, 4)) <= promised


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_ids": np.array([1, 50, 7, 5])}, r"token_ids outside \[0, 50\)"),
        ({"token_ids": np.array([1, -1, 7, 5])}, r"token_ids outside"),
        ({"positions": np.array([3, 4, 64, 0], np.int32)}, r"positions outside \[0, 64\)"),
        ({"positions": np.array([3, 4], np.int32)}, "2 positions rather than 4"),
        ({"slots": np.array([32, 33, 36, 4])}, r"slots outside \[0, 36\)"),
        ({"query_starts": np.array([0, 3, 3], np.int32)}, "query_starts"),
        ({"query_starts": np.array([1, 3, 4], np.int32)}, "query_starts"),
        ({"query_starts": np.array([], np.int32)}, "query_starts"),
        ({"context_lengths": np.array([6, 2], np.int32)}, "context_lengths"),
        ({"block_tables": np.array([[8, 9], [1, -1]], np.int32)}, r"block_tables outside \[0, 9\)"),
        ({"block_tables": np.array([[8, -1], [1, -1]], np.int32)}, "block_tables outside"),
        ({"block_tables": np.array([[8], [1]], np.int32)}, "2 block_tables rather than 3"),
        ({"rows": np.array([4])}, r"rows outside \[0, 4\)"),
        ({"copies": (BlockCopy(source=0, target=9),)}, r"copies outside \[0, 9\)"),
    ],
)
def test_a_batch_whose_numbers_are_not_this_engines_is_refused(changes, said):
    with pytest.raises(MalformedMessage, match=said):
        decode(encode(replace(batch(), **changes), 4), BOUNDS)


@pytest.mark.parametrize(
    "work", [batch(), ToHost(blocks=(1,)), FromHost(blocks=(1,))], ids=["batch", "to", "from"]
)
def test_there_is_no_work_before_there_is_a_cache(work):
    with pytest.raises(MalformedMessage, match="before there is a cache"):
        decode(encode(work, 4))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb([]),
        msgpack.packb([5]),
        msgpack.packb(["Nothing"]),
        msgpack.packb(["Open"]),
        msgpack.packb(["Open", 1, 2]),
        msgpack.packb(["Open", 0]),
        msgpack.packb(["Open", True]),
        msgpack.packb(["Open", {}]),
        msgpack.packb(["Open", msgpack.ExtType(4, b"")]),
        msgpack.packb(["Ready", 4]),
        msgpack.packb(["Ready", list(range(1, 2000))]),
        msgpack.packb(["ToHost", b"1234567"]),
        msgpack.packb(["ToHost", [1]]),
        msgpack.packb(["ToHost", np.array([9]).tobytes()]),
        msgpack.packb(["Refused", b"bytes"]),
        bytes(MESSAGE_BYTES_MAX + 1),
    ],
    ids=lambda content: repr(content[:16]),
)
def test_what_no_rank_says_is_refused(content):
    with pytest.raises(MalformedMessage):
        decode(content, BOUNDS)


@given(st.binary(max_size=64), st.integers(0, 400))
def test_a_batch_with_bytes_put_in_is_refused_or_within_the_bounds(noise, place):
    whole = encode(batch(), 4)
    try:
        heard = decode(whole[:place] + noise + whole[place + len(noise) :], BOUNDS)
    except MalformedMessage:
        return
    if isinstance(heard, Batch):
        assert heard.token_ids.min() >= 0 and heard.token_ids.max() < BOUNDS.vocab_size
        assert heard.slots.min() >= 0 and heard.slots.max() < BOUNDS.num_blocks * BOUNDS.block_size
        assert heard.block_tables.max() < BOUNDS.num_blocks
