"""A gateway's map of a worker's cache: right or empty, whatever the stream goes through, and never too large."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.prefix_index import PrefixChanges
from gateway import prefix_map
from gateway.prefix_map import PrefixMap
from service.cache_events import CacheEvents, from_wire
from service.cache_feed import CacheFeed
from service.outbox import Outbox

ROOM = 3


def hash_of(number):
    return number.to_bytes(16, "big")


def events(sequence, added=(), removed=(), *, snapshot=False):
    return CacheEvents(
        sequence=sequence,
        snapshot=snapshot,
        added=tuple(map(hash_of, added)),
        removed=tuple(map(hash_of, removed)),
    )


def told(*messages, room=100):
    found = PrefixMap(room)
    for each in messages:
        found.take(each)
    return found


def content(found, numbers=range(20)):
    return {number for number in numbers if hash_of(number) in found}


SNAPSHOT = events(7, [1, 2], snapshot=True)


def test_it_knows_nothing_before_a_snapshot():
    found = told(events(1, [1]))
    assert (content(found), found.known, len(found)) == (set(), False, 0)


def test_it_follows_the_changes_after_a_snapshot():
    found = told(SNAPSHOT, events(8, [3], [1]), events(9, [4]))
    assert (content(found), found.known, len(found)) == ({2, 3, 4}, True, 3)


def test_a_missing_number_makes_all_of_it_unknown_until_the_next_snapshot():
    found = told(SNAPSHOT, events(9, [3]))
    assert (content(found), found.known) == (set(), False)
    found.take(events(10, [4]))
    assert content(found) == set()
    found.take(events(8, [4], snapshot=True))
    found.take(events(9, [5]))
    assert (content(found), found.known) == ({4, 5}, True)


def test_a_number_that_comes_again_is_a_gap_too():
    assert not told(SNAPSHOT, SNAPSHOT, events(7, [3])).known


def test_a_snapshot_makes_void_what_was_said_before():
    assert content(told(SNAPSHOT, events(8, [9], snapshot=True))) == {9}


def test_it_keeps_no_more_than_the_worker_has_blocks():
    found = told(SNAPSHOT, events(8, [3, 4, 5, 6]), events(9, [7]), room=3)
    assert len(found) == 3 and content(found) >= {1, 2}
    found.take(events(10, [8], [1]))
    assert content(found) >= {2, 8} and len(found) == 3


def test_a_worker_that_claims_the_world_is_not_given_it(monkeypatch):
    monkeypatch.setattr(prefix_map, "BYTES_MAX", 32)
    assert len(told(events(1, range(10), snapshot=True), room=2**32 - 1)) == 2


def test_only_the_leading_ones_count():
    found = told(events(1, [1, 2, 4], snapshot=True))
    assert [found.leading(map(hash_of, numbers)) for numbers in ([1, 2, 3, 4], [3, 1], [], [4, 1, 2])] == [
        2,
        0,
        0,
        3,
    ]


class CacheAndMap(RuleBasedStateMachine):
    """A worker's feed and a gateway's map at the two ends of a stream that may stall and break."""

    def __init__(self):
        super().__init__()
        self.truth = set()
        self.feed = CacheFeed(lambda message: message, ROOM)
        self.outbox = None

    @precondition(lambda self: self.outbox is None)
    @rule()
    def attach(self):
        self.outbox, self.map = Outbox(1000), PrefixMap(100)
        self.messages = self.outbox.drain()
        self.feed.open("g", self.outbox)

    @precondition(lambda self: self.outbox is not None)
    @rule()
    def break_off(self):
        self.feed.close("g")
        self.outbox = None

    @rule(come=st.sets(st.integers(0, 9)), gone=st.sets(st.integers(0, 9)))
    def change(self, come, gone):
        come, gone = come - self.truth, (gone & self.truth) - come
        self.truth = (self.truth - gone) | come
        self.feed.change(
            PrefixChanges(added=tuple(map(hash_of, come)), removed=tuple(map(hash_of, gone))),
        )

    @rule()
    def look(self):
        self.feed.catch_up()

    @precondition(lambda self: self.outbox is not None)
    @rule(count=st.integers(1, 5))
    def read(self, count):
        for _ in range(min(count, len(self.outbox))):
            self._read_one()

    @precondition(lambda self: self.outbox is not None)
    @rule()
    def settle(self):
        """Everything is read, and the worker has looked once more."""
        while len(self.outbox):
            self._read_one()
        self.feed.catch_up()
        while len(self.outbox):
            self._read_one()
        assert self.map.known and content(self.map) == self.truth

    @invariant()
    def little_waits(self):
        assert self.outbox is None or len(self.outbox) <= ROOM

    def _read_one(self):
        try:
            self.messages.__anext__().send(None)
        except StopIteration as message:
            self.map.take(from_wire(message.value))


TestCacheAndMap = CacheAndMap.TestCase
TestCacheAndMap.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
