"""All blocks of a worker, and the ledger of who owns them.

free + cached + owned + quarantined = total, always, and credits never exceed what is free or cached. A block moves by
a named verb and by nothing else: grant, waive, share, allocate, extend, grow, fork, unshare, publish, unpublish,
transfer, release, quarantine. Several tables may own one block, which then nobody may write; neither may anybody write
what is published. What nobody owns is cached as long as nobody needs the room, least recently used first out. Called on
the step thread alone. Never touches the bytes, never decides who gets what.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.cache.block_table import BlockTable, Owner, OwnerKind
from engine.cache.prefix_chain import PrefixLink
from engine.cache.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedBlocks:
    """blocks: in the owner's tables; one that is shared counts for each of them."""

    owner: Owner
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """A recount of the pool. Counts are blocks, each counted once; promised is the part of free and cached that
    credits cover; violations is empty when the books balance."""

    total: int
    free: int
    cached: int
    owned: int
    quarantined: int
    promised: int
    owners: tuple[OwnedBlocks, ...]
    violations: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What of a prefix is in the pool. blocks: from its start; owned: how many of them somebody owns, which can be
    shared without taking any from what is available."""

    blocks: int
    owned: int


class Credit:
    """A promise of blocks that are not bound yet: a counter, not pages. Only the pool changes it."""

    __slots__ = ("_blocks", "_owner")

    def __init__(self, owner: Owner, blocks: int) -> None:
        self._owner = owner
        self._blocks = blocks

    @property
    def owner(self) -> Owner:
        return self._owner

    @property
    def blocks(self) -> int:
        """Blocks still promised."""
        return self._blocks

    def draw(self, blocks: int) -> None:
        """For the pool."""
        assert 0 <= blocks <= self._blocks, f"{blocks} blocks drawn on a credit of {self._blocks}"
        self._blocks -= blocks


class BlockPool:
    """Ledger of `total` blocks, ids 0 .. total - 1."""

    def __init__(self, total: int) -> None:
        assert total > 0, total
        self.index = PrefixIndex()
        self._total = total
        self._free = list(range(total - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = array("i", [0]) * total
        self._counts = np.frombuffer(self._references, np.int32)
        self._promised = 0
        self._credits: set[Credit] = set()
        self._tables: set[BlockTable] = set()

    @property
    def total(self) -> int:
        return self._total

    @property
    def unowned(self) -> int:
        """Blocks that nobody owns, cached ones among them."""
        return len(self._free) + len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that nobody owns and no credit covers: what can be granted now."""
        return self.unowned - self._promised

    def grant(self, owner: Owner, blocks: int) -> Credit:
        """Promise blocks. The caller has checked `available`."""
        assert 0 <= blocks <= self.available, f"{blocks} blocks wanted, {self.available} available"
        credit = Credit(owner, blocks)
        self._credits.add(credit)
        self._promised += blocks
        return credit

    def waive(self, credit: Credit) -> None:
        """Give back what is left of a credit."""
        assert credit in self._credits, f"credit of {credit.owner} is not in this pool"
        self._credits.remove(credit)
        self._promised -= credit.blocks
        credit.draw(credit.blocks)

    def match(self, links: Sequence[PrefixLink]) -> Match:
        """The longest leading part of these that is here. Keeps nothing."""
        found = self.index.find(links)
        return Match(blocks=len(found), owned=sum(self._references[block] > 0 for block in found))

    def share(self, owner: Owner, links: Sequence[PrefixLink]) -> BlockTable:
        """A new table of what `match` finds. The caller has checked that what nobody owns yet is available."""
        blocks = self.index.find(links)
        fresh = [block for block in blocks if not self._references[block]]
        assert len(fresh) <= self.available, f"{len(fresh)} blocks wanted, {self.available} available"
        for block in fresh:
            del self._cached[block]
        return self._new_table(owner, self._referenced(blocks))

    def allocate(self, owner: Owner, blocks: int, credit: Credit) -> BlockTable:
        """A new table of blocks drawn on a credit."""
        return self._new_table(owner, self._take(blocks, credit))

    def extend(self, table: BlockTable, blocks: int, credit: Credit) -> None:
        """Add blocks drawn on a credit at the table's end."""
        self._assert_known(table)
        table.extend(self._take(blocks, credit))

    def grow(self, table: BlockTable, blocks: int) -> None:
        """Add blocks that nobody was promised at the table's end. The caller has checked `available`."""
        assert 0 <= blocks <= self.available, f"{blocks} blocks wanted, {self.available} available"
        self._assert_known(table)
        table.extend(self._fresh(blocks))

    def fork(self, table: BlockTable, owner: Owner) -> BlockTable:
        """A second table of the same blocks."""
        self._assert_known(table)
        return self._new_table(owner, self._referenced(list(table.ids())))

    def unwritable(self, blocks: NDArray[np.integer]) -> list[int]:
        """Places in `blocks` of those that several tables own, or none, or that are published."""
        counts = self._counts.take(blocks)
        published = self.index.which(blocks.tolist())
        if not published and (counts == 1).all():
            return []
        return [at for at, block in enumerate(blocks.tolist()) if counts[at] != 1 or block in published]

    def sole(self, table: BlockTable) -> int:
        """How many blocks of a table are in no other: what its release makes available."""
        return sum(self._references[block] == 1 for block in table.ids())

    def shared(self, table: BlockTable, position: int) -> bool:
        """Whether this block of a table is in others, too."""
        return self._references[table.at(position)] > 1

    def unpublish(self, table: BlockTable, position: int) -> None:
        """A block that is the table's alone will be written: nobody finds it any more."""
        self._assert_known(table)
        block = table.at(position)
        assert self._references[block] == 1, f"block {block} is shared"
        if block in self.index:
            self.index.remove(block)

    def unshare(self, table: BlockTable, position: int, credit: Credit) -> tuple[int, int]:
        """Put a block of the table's own in place of one that others share. Returns (old, new); the caller has the
        bytes copied before either is written."""
        self._assert_known(table)
        old = table.at(position)
        assert self.shared(table, position), f"block {old} is this table's alone"
        (new,) = self._take(1, credit)
        table.replace(position, new)
        self._unreference(old)
        return old, new

    def publish(self, table: BlockTable, first: int, links: Sequence[PrefixLink]) -> None:
        """Blocks `first` and on of the table hold these prefixes and will not be written again."""
        self._assert_known(table)
        for block, link in zip(table.ids(first)[: len(links)], links, strict=True):
            self.index.add(link, block)

    def transfer(self, table: BlockTable, owner: Owner) -> BlockTable:
        """Give the table to another owner. The old handle is spent."""
        self._assert_known(table)
        self._tables.remove(table)
        return self._new_table(owner, table.spend())

    def release(self, table: BlockTable) -> None:
        """Give the table's blocks back. The handle is spent. Of what stays cached, the end of a run goes first."""
        self._assert_known(table)
        self._tables.remove(table)
        for block in reversed(table.spend()):
            self._unreference(block)

    def quarantine(self, table: BlockTable) -> BlockTable:
        """Its owner let go, but somebody outside may still touch the blocks: nobody gets them until the table that
        this returns is released. The old handle is spent."""
        return self.transfer(table, Owner(OwnerKind.QUARANTINE, table.owner.request_id))

    def ledger(self) -> Ledger:
        """Recount everything from the tables themselves."""
        owners: Counter[Owner] = Counter()
        owned: set[int] = set()
        quarantined: set[int] = set()
        for table in self._tables:
            owners[table.owner] += len(table)
            (quarantined if table.owner.kind is OwnerKind.QUARANTINE else owned).update(table.ids())
        return Ledger(
            total=self._total,
            free=len(self._free),
            cached=len(self._cached),
            owned=len(owned),
            quarantined=len(quarantined - owned),
            promised=sum(credit.blocks for credit in self._credits),
            owners=tuple(OwnedBlocks(owner=owner, blocks=blocks) for owner, blocks in owners.items()),
            violations=self._violations(),
        )

    def _violations(self) -> tuple[str, ...]:
        references = Counter(block for table in self._tables for block in table.ids())
        unowned = Counter([*self._free, *self._cached])
        found = [f"block {block} is unowned {times} times" for block, times in unowned.items() if times > 1]
        found += [f"block {block} is unowned and in a table" for block in unowned.keys() & references.keys()]
        found += [
            f"block {block} is in {references[block]} tables, {booked} booked"
            for block, booked in enumerate(self._references)
            if references[block] != booked
        ]
        found += [
            f"block {block} is cached and cannot be found"
            for block in self._cached
            if block not in self.index
        ]
        found += [f"block {block} is free and can be found" for block in self._free if block in self.index]
        lost = self._total - len(unowned.keys() | references.keys())
        if lost:
            found.append(f"{lost} of {self._total} blocks are nowhere")
        promised = sum(credit.blocks for credit in self._credits)
        if promised != self._promised or promised > self.unowned:
            found.append(
                f"{promised} blocks promised by credits, {self._promised} booked, {self.unowned} unowned"
            )
        return tuple(found)

    def _take(self, blocks: int, credit: Credit) -> list[int]:
        assert credit in self._credits, f"credit of {credit.owner} is not in this pool"
        credit.draw(blocks)
        self._promised -= blocks
        return self._fresh(blocks)

    def _fresh(self, blocks: int) -> list[int]:
        """Blocks that nobody owns, from now on referenced once."""
        while len(self._free) < blocks:
            self._evict()
        return self._referenced([self._free.pop() for _ in range(blocks)])

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        self.index.remove(block)
        self._free.append(block)

    def _referenced(self, blocks: list[int]) -> list[int]:
        for block in blocks:
            self._references[block] += 1
        return blocks

    def _unreference(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        if block in self.index:
            self._cached[block] = None
        else:
            self._free.append(block)

    def _new_table(self, owner: Owner, blocks: list[int]) -> BlockTable:
        table = BlockTable(owner, blocks)
        self._tables.add(table)
        return table

    def _assert_known(self, table: BlockTable) -> None:
        assert table in self._tables, f"block table of {table.owner} is not in this pool"
