"""The ledger of blocks against a model made of dictionaries; the layout; the bytes."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch
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

from engine.cache.block_pool import BlockPool
from engine.cache.block_table import Owner, OwnerKind
from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout

OWNERS = [Owner(kind, request) for kind in OwnerKind for request in ("a", "b")]


@dataclass
class Model:
    """What the pool should be: who owns which blocks, what is promised, what is in quarantine."""

    total: int
    tables: dict = field(default_factory=dict)  # handle -> [owner, block ids]
    credits: dict = field(default_factory=dict)  # handle -> blocks still promised
    quarantined: dict = field(default_factory=dict)  # receipt -> block ids

    def owned(self):
        return [block for _, blocks in self.tables.values() for block in blocks]

    def locked_away(self):
        return [block for blocks in self.quarantined.values() for block in blocks]

    def free(self):
        return self.total - len(self.owned()) - len(self.locked_away())

    def promised(self):
        return sum(self.credits.values())

    def available(self):
        return self.free() - self.promised()


class PoolMachine(RuleBasedStateMachine):
    credits = Bundle("credits")
    tables = Bundle("tables")
    spent_credits = Bundle("spent_credits")
    spent_tables = Bundle("spent_tables")
    receipts = Bundle("receipts")

    @initialize(total=st.integers(1, 12))
    def start(self, total):
        self.pool = BlockPool(total)
        self.model = Model(total)

    @rule(target=credits, owner=st.sampled_from(OWNERS), share=st.floats(0, 1))
    def grant(self, owner, share):
        blocks = round(share * self.model.available())
        credit = self.pool.grant(owner, blocks)
        assert (credit.owner, credit.blocks) == (owner, blocks)
        self.model.credits[credit] = blocks
        return credit

    @rule(owner=st.sampled_from(OWNERS), excess=st.integers(1, 3))
    def grant_more_than_is_available(self, owner, excess):
        with pytest.raises(AssertionError):
            self.pool.grant(owner, self.model.available() + excess)

    @rule(target=spent_credits, credit=consumes(credits))
    def waive(self, credit):
        self.pool.waive(credit)
        assert credit.blocks == 0
        del self.model.credits[credit]
        return credit

    @rule(target=tables, credit=credits, owner=st.sampled_from(OWNERS), share=st.floats(0, 1))
    def allocate(self, credit, owner, share):
        blocks = round(share * self.model.credits[credit])
        table = self.pool.allocate(owner, blocks, credit)
        self.model.credits[credit] -= blocks
        self.take(table.ids(), blocks)
        self.model.tables[table] = [owner, list(table.ids())]
        return table

    @rule(table=tables, credit=credits, share=st.floats(0, 1))
    def extend(self, table, credit, share):
        blocks = round(share * self.model.credits[credit])
        before = table.ids()
        self.pool.extend(table, blocks, credit)
        assert table.ids()[: len(before)] == before, "a table grows at its end"
        self.model.credits[credit] -= blocks
        self.take(table.ids()[len(before) :], blocks)
        self.model.tables[table][1] = list(table.ids())

    @rule(table=tables, credit=credits, excess=st.integers(1, 3))
    def draw_more_than_was_promised(self, table, credit, excess):
        blocks = self.model.credits[credit] + excess
        with pytest.raises(AssertionError):
            self.pool.allocate(OWNERS[0], blocks, credit)
        with pytest.raises(AssertionError):
            self.pool.extend(table, blocks, credit)

    @rule(target=tables, table=consumes(tables), owner=st.sampled_from(OWNERS))
    def transfer(self, table, owner):
        moved = self.pool.transfer(table, owner)
        _, blocks = self.model.tables.pop(table)
        assert moved.owner == owner
        assert list(moved.ids()) == blocks
        self.model.tables[moved] = [owner, blocks]
        self.check_spent(table)
        return moved

    @rule(target=spent_tables, table=consumes(tables))
    def release(self, table):
        self.pool.release(table)
        del self.model.tables[table]
        return table

    @rule(target=receipts, table=consumes(tables))
    def quarantine(self, table):
        receipt = self.pool.quarantine(table)
        assert receipt not in self.model.quarantined
        self.model.quarantined[receipt] = self.model.tables.pop(table)[1]
        self.check_spent(table)
        return receipt

    @rule(receipt=consumes(receipts))
    def restore(self, receipt):
        self.pool.restore(receipt)
        del self.model.quarantined[receipt]
        with pytest.raises((AssertionError, KeyError)):
            self.pool.restore(receipt)

    @rule(table=spent_tables)
    def use_a_spent_table(self, table):
        self.check_spent(table)

    @rule(credit=spent_credits, table=tables)
    def use_a_waived_credit(self, credit, table):
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
            lambda: other.allocate(OWNERS[0], 0, credit),
            lambda: other.waive(credit),
        ):
            with pytest.raises(AssertionError):
                use()
        assert not other.ledger().violations

    @precondition(lambda self: self.model.available())
    @rule(target=tables, owner=st.sampled_from(OWNERS))
    def take_everything_that_is_left(self, owner):
        credit = self.pool.grant(owner, self.model.available())
        table = self.pool.allocate(owner, credit.blocks, credit)
        self.pool.waive(credit)
        self.take(table.ids(), self.model.available())
        self.model.tables[table] = [owner, list(table.ids())]
        return table

    @invariant()
    def books_balance_and_agree_with_the_model(self):
        if not hasattr(self, "pool"):
            return
        ledger = self.pool.ledger()
        assert ledger.violations == ()
        assert ledger.free + ledger.cached + ledger.owned + ledger.quarantined == ledger.total
        assert ledger.total == self.pool.total == self.model.total
        assert ledger.free == self.pool.free == self.model.free()
        assert ledger.owned == len(self.model.owned())
        assert ledger.quarantined == len(self.model.locked_away())
        assert ledger.promised == self.model.promised()
        assert self.pool.available == self.model.available() >= 0
        by_owner = Counter()
        for owner, blocks in self.model.tables.values():
            by_owner[owner] += len(blocks)
        assert {each.owner: each.blocks for each in ledger.owners} == by_owner
        for table, (owner, blocks) in self.model.tables.items():
            assert (table.owner, list(table.ids()), len(table)) == (owner, blocks, len(blocks))
            assert not table.spent()
        assert {credit: credit.blocks for credit in self.model.credits} == self.model.credits

    def take(self, taken, blocks):
        """Fresh blocks exist, are as many as asked for, and were nobody's."""
        assert len(taken) == blocks
        assert set(taken) <= set(range(self.model.total))
        others = set(self.model.owned()) | set(self.model.locked_away())
        assert not others & set(taken), "a block has one owner"

    def check_spent(self, table):
        """Every use of the handle raises; that it changes nothing is the invariant's to see."""
        assert table.spent()
        credit = self.pool.grant(OWNERS[0], 0)
        for use in (
            table.ids,
            lambda: len(table),
            lambda: self.pool.extend(table, 0, credit),
            lambda: self.pool.transfer(table, OWNERS[0]),
            lambda: self.pool.release(table),
            lambda: self.pool.quarantine(table),
        ):
            with pytest.raises(AssertionError):
                use()
        self.pool.waive(credit)


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_any_sequence_of_verbs_keeps_the_books = PoolMachine.TestCase


def test_a_quarantined_block_is_not_given_out_before_it_is_restored():
    pool = BlockPool(2)
    credit = pool.grant(OWNERS[0], 1)
    table = pool.allocate(OWNERS[0], 1, credit)
    (block,) = table.ids()
    receipt = pool.quarantine(table)
    everything = pool.allocate(OWNERS[1], 1, pool.grant(OWNERS[1], 1))
    assert pool.available == 0
    assert block not in everything.ids()
    pool.restore(receipt)
    assert pool.allocate(OWNERS[1], 1, pool.grant(OWNERS[1], 1)).ids() == (block,)


def test_a_pool_of_no_blocks_is_a_mistake():
    with pytest.raises(AssertionError):
        BlockPool(0)


# --- layout

LAYOUT = KVLayout(model_digest="a1b2", layers=3, kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32)
CHANGES = {
    "model": {"model_digest": "a1b3"},
    "layers": {"layers": 4},
    "kv_heads": {"kv_heads": 4},
    "head_dim": {"head_dim": 16},
    "block_size": {"block_size": 8},
    "dtype": {"dtype": torch.bfloat16},
    "numerics": {"numerics": "another processor"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_field_changes_the_fingerprint_and_is_named_by_fields(name):
    changed = replace(LAYOUT, **CHANGES[name])
    assert changed.fingerprint() != LAYOUT.fingerprint()
    differing = {key for key, value in LAYOUT.fields().items() if changed.fields()[key] != value}
    assert differing == {name}


def test_every_field_of_the_layout_is_covered_and_a_version_besides():
    assert set(LAYOUT.fields()) == {*CHANGES, "version"}
    assert len(CHANGES) == len(KVLayout.__dataclass_fields__)


def test_layouts_that_are_equal_have_one_fingerprint_of_32_bytes():
    assert replace(LAYOUT).fingerprint() == LAYOUT.fingerprint()
    assert len(LAYOUT.fingerprint()) == 32


def test_the_fingerprint_is_a_hash_of_length_prefixed_names_and_values():
    """Written out, since another process, of another version perhaps, computes it too."""
    parts = (
        b"\0\0\0\x0ablock_size\0\0\0\x014"
        b"\0\0\0\x05dtype\0\0\0\x07float32"
        b"\0\0\0\x08head_dim\0\0\0\x018"
        b"\0\0\0\x08kv_heads\0\0\0\x012"
        b"\0\0\0\x06layers\0\0\0\x013"
        b"\0\0\0\x05model\0\0\0\x04a1b2"
        b"\0\0\0\x08numerics\0\0\0\x00"
        b"\0\0\0\x07version\0\0\0\x011"
    )
    assert LAYOUT.fingerprint() == hashlib.sha256(parts).digest()


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_rounds_up(tokens, blocks):
    assert LAYOUT.blocks_for(tokens) == blocks


def test_block_bytes_count_all_layers_keys_and_values():
    assert LAYOUT.block_bytes() == 3 * 2 * 4 * 2 * 8 * 4
    assert replace(LAYOUT, dtype=torch.bfloat16).block_bytes() == 3 * 2 * 4 * 2 * 8 * 2


# --- bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_is_one_run_of_bytes_and_nobody_elses(dtype):
    cache = KVCache(replace(LAYOUT, dtype=dtype), num_blocks=5)
    zeros = bytes(cache.layout.block_bytes())
    values = torch.arange(cache.tensor[2].numel()).remainder(97).add(1).to(dtype)
    cache.tensor[2] = values.view(cache.layout.block_shape())
    assert [bytes(cache.block_view(block)) == zeros for block in range(5)] == [True, True, False, True, True]
    assert bytes(cache.block_view(2)) == values.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_written_through_the_view_are_the_blocks_values(dtype):
    cache = KVCache(replace(LAYOUT, dtype=dtype), num_blocks=3)
    values = torch.arange(cache.tensor[1].numel()).remainder(89).to(dtype)
    view = cache.block_view(1)
    assert (view.format, view.ndim, view.nbytes) == ("B", 1, cache.layout.block_bytes())
    view[:] = values.view(torch.uint8).numpy().tobytes()
    assert torch.equal(cache.tensor[1].flatten(), values)
    assert not cache.tensor[0].any()
    assert not cache.tensor[2].any()


@pytest.mark.parametrize("block", [-1, 3])
def test_a_block_that_does_not_exist_has_no_view(block):
    with pytest.raises(AssertionError):
        KVCache(LAYOUT, num_blocks=3).block_view(block)
