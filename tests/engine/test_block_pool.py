"""The ledger of blocks against a model of it, verb by verb."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.cache.block_pool import BlockPool, Match
from engine.cache.block_table import Owner, OwnerKind
from tests.engine.pool_model import PoolModel, Table, links_of

KINDS = [kind for kind in OwnerKind if kind is not OwnerKind.QUARANTINE]
OWNERS = [Owner(kind, request) for kind in KINDS for request in ("a", "b")]
RUNS = st.lists(st.integers(0, 1), max_size=4)
SHARES = st.sampled_from((1.0, 0.5, 0.3, 0.0))


class PoolMachine(RuleBasedStateMachine):
    credits = Bundle("credits")
    tables = Bundle("tables")
    locked_tables = Bundle("locked_tables")
    spent_credits = Bundle("spent_credits")
    spent_tables = Bundle("spent_tables")

    @initialize(total=st.integers(1, 12))
    def start(self, total):
        self.pool = BlockPool(total)
        self.model = PoolModel(total)

    @rule(target=credits, owner=st.sampled_from(OWNERS), share=SHARES)
    def grant(self, owner, share):
        blocks = round(share * self.model.available())
        credit = self.pool.grant(owner, blocks)
        assert (credit.owner, credit.blocks) == (owner, blocks)
        self.model.credits[credit] = blocks
        return credit

    @rule(target=spent_credits, credit=consumes(credits))
    def waive(self, credit):
        self.pool.waive(credit)
        assert credit.blocks == 0
        del self.model.credits[credit]
        return credit

    @rule(target=tables, credit=credits, owner=st.sampled_from(OWNERS), share=SHARES)
    def allocate(self, credit, owner, share):
        blocks = round(share * self.model.credits[credit])
        table = self.pool.allocate(owner, blocks, credit)
        assert len(table) == blocks
        self.model.drawn(credit, table.ids())
        return self.known(table, owner)

    @rule(table=tables, credit=credits, share=SHARES)
    def extend(self, table, credit, share):
        blocks = round(share * self.model.credits[credit])
        before = table.ids()
        self.pool.extend(table, blocks, credit)
        assert table.ids()[: len(before)] == before, "a table grows at its end"
        taken = table.ids()[len(before) :]
        assert len(taken) == blocks
        self.model.drawn(credit, taken)
        self.model.tables[table].blocks += taken

    @rule(table=tables, share=SHARES)
    def grow(self, table, share):
        blocks = round(share * self.model.available())
        before = table.ids()
        self.pool.grow(table, blocks)
        assert table.ids()[: len(before)] == before, "a table grows at its end"
        taken = table.ids()[len(before) :]
        assert len(taken) == blocks
        self.model.taken(taken)
        self.model.tables[table].blocks += taken

    @rule(run=RUNS)
    def match(self, run):
        found = self.model.found(run)
        owned = sum(self.model.references()[block] > 0 for block in found)
        assert self.pool.match(links_of(run)) == Match(blocks=len(found), owned=owned)

    @rule(target=tables, owner=st.sampled_from(OWNERS), run=RUNS)
    def share(self, owner, run):
        found = self.model.found(run)
        if sum(block in self.model.idle for block in found) > self.model.available():
            with pytest.raises(AssertionError):
                self.pool.share(owner, links_of(run))
            run, found = [], []
        table = self.pool.share(owner, links_of(run))
        assert list(table.ids()) == found
        self.model.shared(found)
        return self.known(table, owner)

    @rule(run=RUNS)
    def share_what_was_promised_to_others(self, run):
        idle = any(block in self.model.idle for block in self.model.found(run))
        everything = self.pool.grant(OWNERS[0], self.model.available())
        if idle:
            with pytest.raises(AssertionError):
                self.pool.share(OWNERS[1], links_of(run))
        self.pool.waive(everything)

    @rule(target=tables, table=tables, owner=st.sampled_from(OWNERS))
    def fork(self, table, owner):
        twin = self.pool.fork(table, owner)
        assert twin.ids() == table.ids()
        return self.known(twin, owner)

    @precondition(lambda self: self.model.available())
    @rule(table=tables, place=st.floats(0, 1, exclude_max=True))
    def unshare(self, table, place):
        blocks = self.model.tables[table].blocks
        if not blocks:
            return
        position = int(place * len(blocks))
        if self.model.references()[blocks[position]] == 1:
            with pytest.raises(AssertionError):
                self.pool.unshare(table, position, self.pool.grant(OWNERS[0], 0))
            return
        contents = self.model.contents.get(blocks[position])
        credit = self.grant(OWNERS[0], 1.0)
        old, new = self.pool.unshare(table, position, credit)
        assert (old, table.ids()[position]) == (blocks[position], new)
        self.model.drawn(credit, [new])
        self.waive(credit)
        blocks[position] = new
        self.model.let_go([old])
        if contents is not None:
            self.model.contents[new] = contents

    @rule(table=tables, place=st.floats(0, 1, exclude_max=True))
    def unpublish(self, table, place):
        blocks = self.model.tables[table].blocks
        if not blocks:
            return
        position = int(place * len(blocks))
        if any(block in self.model.contents for block in blocks[position + 1 :]):
            return  # what is written again is the end of what is known
        if self.model.references()[blocks[position]] > 1:
            with pytest.raises(AssertionError):
                self.pool.unpublish(table, position)
            return
        self.pool.unpublish(table, position)
        self.model.unpublish(blocks[position])

    @rule(table=tables, tokens=st.lists(st.integers(0, 1), max_size=12), share=SHARES)
    def publish(self, table, tokens, share):
        run = self.model.run_of(table, tokens)
        first = round(share * sum(block in self.model.contents for block in table.ids()[: len(run)]))
        links = links_of(run)[first:]
        self.pool.publish(table, first, links)
        self.model.publish(table, first, links)

    @rule()
    def look_at_what_changed(self):
        changes, now = self.pool.index.changes(), self.model.hashes()
        assert Counter(changes.added) == Counter(now - self.model.seen)
        assert Counter(changes.removed) == Counter(self.model.seen - now)
        self.model.seen = now

    @rule(table=tables, credit=credits, excess=st.integers(1, 3))
    def draw_more_than_was_promised(self, table, credit, excess):
        with pytest.raises(AssertionError):
            self.pool.grant(OWNERS[0], self.model.available() + excess)
        blocks = self.model.credits[credit] + excess
        with pytest.raises(AssertionError):
            self.pool.allocate(OWNERS[0], blocks, credit)
        with pytest.raises(AssertionError):
            self.pool.extend(table, blocks, credit)
        if not self.model.credits[credit] and len(table):
            with pytest.raises(AssertionError):
                self.pool.unshare(table, 0, credit)

    @rule(target=tables, table=consumes(tables), owner=st.sampled_from(OWNERS))
    def transfer(self, table, owner):
        moved = self.pool.transfer(table, owner)
        return self.moved(table, moved, owner)

    @rule(target=locked_tables, table=consumes(tables))
    def quarantine(self, table):
        locked = self.pool.quarantine(table)
        return self.moved(table, locked, Owner(OwnerKind.QUARANTINE, table.owner.request_id))

    @rule(target=spent_tables, table=st.one_of(consumes(tables), consumes(locked_tables)))
    def release(self, table):
        self.pool.release(table)
        self.model.let_go(reversed(self.model.tables.pop(table).blocks))
        return table

    @rule(credit=spent_credits, table=tables, spent=spent_tables)
    def use_what_is_spent(self, credit, table, spent):
        self.check_spent(spent)
        for use in (
            lambda: self.pool.allocate(OWNERS[0], 0, credit),
            lambda: self.pool.extend(table, 0, credit),
            lambda: self.pool.waive(credit),
        ):
            with pytest.raises(AssertionError):
                use()

    @rule(table=tables, credit=credits)
    def take_handles_to_another_pool(self, table, credit):
        other = BlockPool(12)
        own = other.grant(OWNERS[0], 12)
        for use in (
            lambda: other.release(table),
            lambda: other.extend(table, 1, own),
            lambda: other.fork(table, OWNERS[0]),
            lambda: other.publish(table, 0, []),
            lambda: other.unshare(table, 0, own),
            lambda: other.unpublish(table, 0),
            lambda: other.allocate(OWNERS[0], 0, credit),
            lambda: other.waive(credit),
        ):
            with pytest.raises(AssertionError):
                use()
        assert not other.ledger().violations

    @rule(owner=st.sampled_from(OWNERS), run=RUNS)
    def compute_a_run_and_let_it_go(self, owner, run):
        if len(run) > self.model.available():
            return
        credit = self.pool.grant(owner, len(run))
        self.model.credits[credit] = len(run)
        table = self.pool.allocate(owner, len(run), credit)
        self.model.drawn(credit, table.ids())
        self.waive(credit)
        self.known(table, owner)
        self.pool.publish(table, 0, links_of(run))
        self.model.publish(table, 0, links_of(run))
        self.release(table)

    @invariant()
    def books_balance_and_agree_with_the_model(self):
        if not hasattr(self, "pool"):
            return
        ledger, model = self.pool.ledger(), self.model
        assert ledger.violations == ()
        assert ledger.free + ledger.cached + ledger.owned + ledger.quarantined == ledger.total
        assert ledger.total == self.pool.total == model.total
        assert (ledger.free, ledger.cached) == (len(model.free), len(model.idle))
        assert self.pool.unowned == ledger.free + ledger.cached
        assert ledger.owned == len(model.owned())
        assert ledger.quarantined == len(model.locked_away())
        assert ledger.promised == model.promised()
        assert self.pool.available == model.available() >= 0
        by_owner = Counter()
        for table in model.tables.values():
            by_owner[table.owner] += len(table.blocks)
        assert {each.owner: each.blocks for each in ledger.owners} == by_owner
        assert {credit: credit.blocks for credit in model.credits} == model.credits

    @invariant()
    def tables_and_what_can_be_found_are_as_the_model_has_them(self):
        if not hasattr(self, "pool"):
            return
        for handle, table in self.model.tables.items():
            assert (handle.owner, list(handle.ids()), len(handle)) == (
                table.owner,
                table.blocks,
                len(table.blocks),
            )
            unwritable = [at for at, block in enumerate(table.blocks) if not self.model.writable(block)]
            assert self.pool.unwritable(np.array(table.blocks, np.int32)) == unwritable
        assert Counter(self.pool.index.hashes()) == Counter(self.model.hashes())
        assert len(self.pool.index) == len(self.model.published)
        for link, block in self.model.published.items():
            assert self.pool.index.find([link]) == [block]

    def known(self, table, owner):
        """A new table is the model's too."""
        assert table.owner == owner
        self.model.tables[table] = Table(owner, list(table.ids()))
        return table

    def moved(self, before, after, owner):
        blocks = self.model.tables.pop(before).blocks
        assert list(after.ids()) == blocks
        self.check_spent(before)
        return self.known(after, owner)

    def check_spent(self, table):
        """Every use of the handle raises; that it changes nothing is the invariants' to see."""
        assert table.spent()
        credit = self.pool.grant(OWNERS[0], 0)
        for use in (
            table.ids,
            lambda: len(table),
            lambda: self.pool.extend(table, 0, credit),
            lambda: self.pool.fork(table, OWNERS[0]),
            lambda: self.pool.publish(table, 0, []),
            lambda: self.pool.transfer(table, OWNERS[0]),
            lambda: self.pool.release(table),
            lambda: self.pool.quarantine(table),
        ):
            with pytest.raises(AssertionError):
                use()
        self.pool.waive(credit)


PoolMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
test_any_sequence_of_verbs_keeps_the_books = PoolMachine.TestCase


def test_a_quarantined_block_is_not_given_out_before_it_is_released():
    pool = BlockPool(2)
    table = pool.allocate(OWNERS[0], 1, pool.grant(OWNERS[0], 1))
    (block,) = table.ids()
    locked = pool.quarantine(table)
    everything = pool.allocate(OWNERS[1], 1, pool.grant(OWNERS[1], 1))
    assert pool.available == 0
    assert block not in everything.ids()
    pool.release(locked)
    assert pool.allocate(OWNERS[1], 1, pool.grant(OWNERS[1], 1)).ids() == (block,)


def test_of_a_run_that_is_let_go_the_end_is_evicted_first():
    pool = BlockPool(4)
    table = pool.allocate(OWNERS[0], 4, pool.grant(OWNERS[0], 4))
    pool.publish(table, 0, links_of([0, 1, 0, 1]))
    pool.release(table)
    for left in (3, 2, 1, 0):
        pool.allocate(OWNERS[1], 1, pool.grant(OWNERS[1], 1))
        assert pool.match(links_of([0, 1, 0, 1])) == Match(blocks=left, owned=0)


def test_a_prefix_that_was_used_last_stays_longest():
    pool = BlockPool(2)
    for run in ([0], [1]):
        table = pool.allocate(OWNERS[0], 1, pool.grant(OWNERS[0], 1))
        pool.publish(table, 0, links_of(run))
        pool.release(table)
    pool.release(pool.share(OWNERS[0], links_of([0])))
    pool.allocate(OWNERS[1], 1, pool.grant(OWNERS[1], 1))
    assert [pool.match(links_of(run)).blocks for run in ([0], [1])] == [1, 0]


def test_a_pool_of_no_blocks_is_a_mistake():
    with pytest.raises(AssertionError):
        BlockPool(0)
