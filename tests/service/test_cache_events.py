"""What is cached, on the wire: in pieces of bounded size, and nothing odd is taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.worker.v1 import worker_pb2 as pb
from service import cache_events
from service.cache_events import HASH_BYTES, HASHES_PER_MESSAGE_MAX, from_wire, to_wire
from service.reports import BadReport


def hashes(numbers):
    return [number.to_bytes(HASH_BYTES, "big") for number in numbers]


@given(gone=st.integers(0, 12), come=st.integers(0, 12), snapshot=st.booleans(), step=st.integers(1, 9))
def test_what_does_not_fit_in_one_message_comes_in_several_that_say_the_same(gone, come, snapshot, step):
    removed, added = hashes(range(gone)), hashes(range(100, 100 + come))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_events, "HASHES_PER_MESSAGE_MAX", step)
        parts = [from_wire(each) for each in to_wire(5, snapshot=snapshot, removed=removed, added=added)]
    assert [hash_ for part in parts for hash_ in part.removed] == removed
    assert [hash_ for part in parts for hash_ in part.added] == added
    assert all(len(part.removed) + len(part.added) <= step for part in parts)
    assert [part.sequence for part in parts] == list(range(5, 5 + len(parts)))
    assert [part.snapshot for part in parts] == [snapshot] + [False] * (len(parts) - 1)


def test_nobody_holds_more_than_there_is_between_two_pieces(monkeypatch):
    monkeypatch.setattr(cache_events, "HASHES_PER_MESSAGE_MAX", 2)
    held = set(hashes(range(5)))
    for part in to_wire(1, snapshot=False, removed=hashes(range(5)), added=hashes(range(10, 15))):
        events = from_wire(part)
        held = held - set(events.removed) | set(events.added)
        assert len(held) <= 5


@pytest.mark.parametrize("field", ["added", "removed"])
@pytest.mark.parametrize(
    "size", [1, HASH_BYTES - 1, HASH_BYTES + 1, HASH_BYTES * (HASHES_PER_MESSAGE_MAX + 1)]
)
def test_what_is_no_list_of_hashes_is_not_taken(field, size):
    with pytest.raises(BadReport, match=field):
        from_wire(pb.CacheEvents(**{field: bytes(size)}))
