"""Who is told what of a worker's cache: a snapshot, then each change, and a snapshot again for whoever was too slow."""

import pytest

from crossdock.worker.v1 import worker_pb2 as pb
from engine.cache.prefix_index import PrefixChanges
from service import cache_events
from service.cache_events import from_wire
from service.cache_feed import CacheFeed
from service.outbox import Outbox


def hash_of(name):
    return name.encode().ljust(16, b".")


def changes(added="", removed=""):
    """One hash for each letter."""
    return PrefixChanges(added=tuple(map(hash_of, added)), removed=tuple(map(hash_of, removed)))


class Stream:
    """One gateway's stream, read when the test says so."""

    def __init__(self, feed, name):
        self.outbox = Outbox(1000)
        self._messages = self.outbox.drain()
        feed.open(name, self.outbox)

    async def read(self):
        """(number, snapshot, added, removed) of each message that waits."""
        read = []
        while len(self.outbox):
            each = from_wire(await anext(self._messages))
            read.append((each.sequence, each.snapshot, letters(each.added), letters(each.removed)))
        return read


def letters(hashes):
    return "".join(sorted(each.decode().strip(".") for each in hashes))


def feed_of(letters="", room=3):
    feed: CacheFeed[pb.CacheEvents] = CacheFeed(lambda events: events, room)
    feed.change(changes(letters))
    return feed


async def test_a_stream_begins_with_all_that_is_cached_and_goes_on_with_what_changes():
    feed = feed_of("ab")
    stream = Stream(feed, "g")
    feed.change(changes("c", "a"))
    feed.change(changes("d"))
    assert await stream.read() == [(1, True, "ab", ""), (2, False, "c", "a"), (3, False, "d", "")]


async def test_an_empty_cache_is_a_snapshot_too_and_no_change_is_no_message():
    feed = feed_of()
    stream = Stream(feed, "g")
    feed.change(changes())
    feed.catch_up()
    assert await stream.read() == [(1, True, "", "")]


async def test_each_stream_has_numbers_of_its_own():
    feed = feed_of()
    first = Stream(feed, "g")
    feed.change(changes("a"))
    second = Stream(feed, "h")
    feed.change(changes("b"))
    assert [number for number, *_ in await first.read()] == [1, 2, 3]
    assert await second.read() == [(1, True, "a", ""), (2, False, "b", "")]


async def test_a_stream_on_which_too_much_waits_is_told_no_more_until_there_is_room():
    feed = feed_of(room=2)
    slow, quick = Stream(feed, "slow"), Stream(feed, "quick")
    for letter in "abcd":
        feed.change(changes(letter))
        feed.catch_up()
        await quick.read()
    assert len(slow.outbox) == 2, "a gateway that does not read costs no memory"
    assert await slow.read() == [(1, True, "", ""), (2, False, "a", "")]
    feed.change(changes("e", "b"))
    assert await slow.read() == []
    assert await quick.read() == [(6, False, "e", "b")]
    feed.catch_up()
    assert await slow.read() == [(7, True, "acde", "")]
    feed.change(changes("f"))
    assert await slow.read() == [(8, False, "f", "")]


async def test_a_large_snapshot_comes_in_pieces(monkeypatch):
    monkeypatch.setattr(cache_events, "HASHES_PER_MESSAGE_MAX", 2)
    stream = Stream(feed_of("abcde"), "g")
    read = await stream.read()
    assert [(number, snapshot) for number, snapshot, *_ in read] == [(1, True), (2, False), (3, False)]
    assert sorted("".join(added for _, _, added, _ in read)) == list("abcde")


async def test_a_stream_that_ended_is_told_nothing_and_a_new_one_begins_anew():
    feed = feed_of("a")
    ended = Stream(feed, "g")
    await ended.read()
    feed.close("g")
    feed.change(changes("b"))
    again = Stream(feed, "g")
    assert await ended.read() == []
    assert await again.read() == [(1, True, "ab", "")]
    with pytest.raises(KeyError):
        feed.close("nobody")
