"""Names of prefixes, written out; the index of cached blocks and what is coming, each against a model."""

from collections import Counter
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.coming import Coming
from engine.cache.prefix_chain import PrefixChain, PrefixLink, prefix_scope
from engine.cache.prefix_index import PrefixIndex

KEY = bytes(range(32))
SCOPE = prefix_scope(KEY, model="m", tenant="t", salt="s")

# --- the chain


def test_a_scope_is_a_keyed_hash_of_length_prefixed_fields():
    """Written out, since gateways of another version compute it too."""
    fields = b"\0\0\0\x01m" + b"\0\0\0\x01t" + b"\0\0\0\x01s"
    assert blake2b(fields, digest_size=16, key=KEY, person=b"crossdock scope").digest() == SCOPE
    assert SCOPE.hex() == "289ff8d44d6bf56778b308dafb1502fb"


def test_a_link_is_a_hash_of_the_one_before_it_and_of_its_tokens():
    first, second = PrefixChain(SCOPE, 2).links([1, 2, 70_000, 4, 5], 0, 2)
    own = b"\x01\0\0\0\x02\0\0\0"
    named = b"\0\0\0\x10" + SCOPE + b"\0\0\0\x08" + own
    assert first == PrefixLink(blake2b(named, digest_size=16, person=b"crossdock block").digest(), SCOPE, own)
    assert first.hash.hex() == "7684a646104f9aa227a9d0ca2bfef79a"
    assert (second.parent, second.tokens) == (first.hash, b"\x70\x11\x01\0\x04\0\0\0")
    assert second.hash.hex() == "b097cb992f53287c230f43df79bc108a"


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        (KEY[:-1] + b"\0", {}),
        (KEY[:-1], {}),
        (KEY, {"model": "M"}),
        (KEY, {"tenant": ""}),
        (KEY, {"salt": "s\0"}),
        (KEY, {"model": "mt", "tenant": ""}),
        (KEY, {"tenant": "ts", "salt": ""}),
        (KEY, {"model": "", "tenant": "mt"}),
    ],
)
def test_each_field_of_a_scope_changes_it_and_none_runs_into_the_next(key, fields):
    assert prefix_scope(key, **{"model": "m", "tenant": "t", "salt": "s", **fields}) != SCOPE


def test_a_field_does_not_run_into_the_next_one():
    pairs = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]
    assert len({prefix_scope(KEY, model="m", tenant=one, salt=other) for one, other in pairs}) == 4


def test_a_short_key_is_a_mistake():
    with pytest.raises(AssertionError):
        prefix_scope(KEY[:15], model="m", tenant="t", salt="s")


def test_without_a_scope_nothing_has_a_name():
    assert PrefixChain(b"", 2).links([1, 2, 3, 4], 0, 2) == []


RUN = [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("place", range(8))
def test_each_token_changes_its_link_and_all_after_it_and_none_before(place):
    other = [*RUN[:place], RUN[place] + 1, *RUN[place + 1 :]]
    ours, theirs = (PrefixChain(SCOPE, 4).links(run, 0, 2) for run in (RUN, other))
    same = [one.hash == two.hash for one, two in zip(ours, theirs, strict=True)]
    assert same == [place >= 4, False]


def test_the_same_tokens_after_another_parent_have_another_name():
    first, second = PrefixChain(SCOPE, 2).links([3, 4, 3, 4], 0, 2)
    assert first.tokens == second.tokens
    assert first.hash != second.hash


@given(run=st.lists(st.integers(0, 2**32 - 1), max_size=24), size=st.integers(1, 5), cuts=st.data())
def test_a_chain_that_grows_gives_what_a_whole_one_gives(run, size, cuts):
    whole = PrefixChain(SCOPE, size).links(run, 0, len(run) // size)
    growing, known = PrefixChain(SCOPE, size), []
    while len(known) < len(run):
        known += run[len(known) : len(known) + cuts.draw(st.integers(1, 7))]
        end = len(known) // size
        first = cuts.draw(st.integers(0, end))
        assert growing.links(known, first, end) == whole[first:end]


def test_a_link_of_tokens_that_are_not_there_yet_is_a_mistake():
    with pytest.raises(AssertionError):
        PrefixChain(SCOPE, 4).links([1, 2, 3], 0, 1)


# --- the index

LINKS = [PrefixLink(bytes([n % 3]), bytes([n // 6]), bytes([n % 6])) for n in range(12)]
"""Twelve prefixes with three hashes: what each covers, in the parent's name and its tokens, tells them apart."""
BLOCKS = range(6)


class IndexMachine(RuleBasedStateMachine):
    """holders: which block holds which link, in the model."""

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex()
        self.holders = {}
        self.seen = set()

    def hashes(self):
        return {link.hash for link in self.holders.values()}

    @rule(link=st.sampled_from(LINKS), block=st.sampled_from(BLOCKS))
    def add(self, link, block):
        if self.holders.get(block, link) != link:
            with pytest.raises(AssertionError):
                self.index.add(link, block)
            return
        self.index.add(link, block)
        if link.hash not in self.hashes():
            self.holders[block] = link

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def remove(self, data):
        self.remove_one(data.draw(st.sampled_from(sorted(self.holders))))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), block=st.sampled_from(BLOCKS))
    def evict_and_add_again(self, data, block):
        before = data.draw(st.sampled_from(sorted(self.holders)))
        link = self.holders[before]
        self.remove_one(before)
        if block not in self.holders:
            self.add(link, block)
            assert self.index.find([link]) == [block]

    def remove_one(self, block):
        self.index.remove(block)
        del self.holders[block]

    @rule(links=st.lists(st.sampled_from(LINKS), max_size=4))
    def find(self, links):
        by_link = {link: block for block, link in self.holders.items()}
        there = [link in by_link for link in links]
        leading = there.index(False) if False in there else len(links)
        assert self.index.find(links) == [by_link[link] for link in links[:leading]]

    @rule()
    def look_at_what_changed(self):
        changes = self.index.changes()
        assert Counter(changes.added) == Counter(self.hashes() - self.seen)
        assert Counter(changes.removed) == Counter(self.seen - self.hashes())
        self.seen = self.hashes()

    @invariant()
    def it_holds_what_the_model_holds(self):
        assert Counter(self.index.hashes()) == Counter(self.hashes())
        assert len(self.index) == len(self.holders)
        assert [block for block in BLOCKS if block in self.index] == sorted(self.holders)
        for link in LINKS:
            holder = [block for block, held in self.holders.items() if held == link]
            assert self.index.find([link]) == holder


IndexMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_any_sequence_of_changes_keeps_the_index = IndexMachine.TestCase


def test_what_was_evicted_and_came_back_in_another_block_is_no_change():
    index, link = PrefixIndex(), LINKS[0]
    index.add(link, 1)
    assert index.changes().added == (link.hash,)
    index.remove(1)
    assert index.find([link]) == []
    index.add(link, 2)
    assert index.find([link]) == [2]
    changes = index.changes()
    assert (changes.added, changes.removed) == ((), ())


# --- what is coming

NAMES = ("a", "b", "c")
COMING = [PrefixLink(bytes([n]), b"", b"") for n in range(5)]


class ComingMachine(RuleBasedStateMachine):
    """expected: who is going to have which links, in the model."""

    def __init__(self):
        super().__init__()
        self.coming = Coming()
        self.expected = {}

    @rule(who=st.sampled_from(NAMES), links=st.lists(st.sampled_from(COMING), unique=True))
    def announce(self, who, links):
        if who in self.expected:
            with pytest.raises(AssertionError):
                self.coming.announce(who, links)
            return
        self.coming.announce(who, links)
        self.expected[who] = set(links)

    @rule(who=st.sampled_from(NAMES), links=st.lists(st.sampled_from(COMING)))
    def settle(self, who, links):
        self.coming.settle(who, links)
        if who in self.expected:
            self.expected[who] -= set(links)

    @rule(who=st.sampled_from(NAMES))
    def drop(self, who):
        self.coming.drop(who)
        self.expected.pop(who, None)

    @invariant()
    def it_counts_the_leading_links_that_somebody_has_announced(self):
        somebody = set().union(*self.expected.values())
        for first in range(len(COMING)):
            links = COMING[first:]
            there = [link in somebody for link in links]
            leading = there.index(False) if False in there else len(links)
            assert self.coming.count(links) == leading


ComingMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
test_any_sequence_of_announcements_is_counted = ComingMachine.TestCase
