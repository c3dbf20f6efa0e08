"""All blocks of a worker, and the ledger of who owns them.

free + cached + owned + quarantined = total, always, and credits never exceed what is free. A block moves by a named
verb and by nothing else: grant, waive, allocate, extend, transfer, release, quarantine, restore. Called on the step
thread alone. Never touches the bytes, never decides who gets what.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import count

from engine.cache.block_table import BlockTable, Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedBlocks:
    owner: Owner
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """A recount of the pool. Counts are blocks; promised is the part of free that credits cover; violations is
    empty when the books balance."""

    total: int
    free: int
    cached: int
    owned: int
    quarantined: int
    promised: int
    owners: tuple[OwnedBlocks, ...]
    violations: tuple[str, ...]


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
        self._total = total
        self._free = list(range(total - 1, -1, -1))
        self._promised = 0
        self._credits: set[Credit] = set()
        self._tables: set[BlockTable] = set()
        self._quarantined: dict[int, list[int]] = {}
        self._receipts = count()

    @property
    def total(self) -> int:
        return self._total

    @property
    def free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Blocks that nobody owns and no credit covers: what can be granted now."""
        return len(self._free) - self._promised

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

    def allocate(self, owner: Owner, blocks: int, credit: Credit) -> BlockTable:
        """A new table of blocks drawn on a credit."""
        table = BlockTable(owner, self._take(blocks, credit))
        self._tables.add(table)
        return table

    def extend(self, table: BlockTable, blocks: int, credit: Credit) -> None:
        """Add blocks drawn on a credit at the table's end."""
        self._assert_known(table)
        table.extend(self._take(blocks, credit))

    def transfer(self, table: BlockTable, owner: Owner) -> BlockTable:
        """Give the table to another owner. The old handle is spent."""
        self._assert_known(table)
        self._tables.remove(table)
        moved = BlockTable(owner, table.spend())
        self._tables.add(moved)
        return moved

    def release(self, table: BlockTable) -> None:
        """Give the table's blocks back. The handle is spent."""
        self._assert_known(table)
        self._tables.remove(table)
        self._free.extend(reversed(table.spend()))

    def quarantine(self, table: BlockTable) -> int:
        """Take the table's blocks out of use while somebody outside may still touch them; returns a receipt.

        The handle is spent. Only `restore` makes the blocks free again.
        """
        self._assert_known(table)
        self._tables.remove(table)
        receipt = next(self._receipts)
        self._quarantined[receipt] = table.spend()
        return receipt

    def restore(self, receipt: int) -> None:
        """The blocks of this quarantine are beyond anybody's reach: free them."""
        self._free.extend(reversed(self._quarantined.pop(receipt)))

    def ledger(self) -> Ledger:
        """Recount everything from the tables themselves."""
        owners: Counter[Owner] = Counter()
        for table in self._tables:
            owners[table.owner] += len(table)
        return Ledger(
            total=self._total,
            free=self.free,
            cached=0,
            owned=sum(owners.values()),
            quarantined=sum(len(blocks) for blocks in self._quarantined.values()),
            promised=sum(credit.blocks for credit in self._credits),
            owners=tuple(OwnedBlocks(owner=owner, blocks=blocks) for owner, blocks in owners.items()),
            violations=self._violations(),
        )

    def _violations(self) -> tuple[str, ...]:
        seen: Counter[int] = Counter(self._free)
        for table in self._tables:
            seen.update(table.ids())
        for blocks in self._quarantined.values():
            seen.update(blocks)
        found = [f"block {block} is in {times} places" for block, times in seen.items() if times > 1]
        found += [f"block {block} does not exist" for block in seen if not 0 <= block < self._total]
        if len(seen) < self._total:
            found.append(f"{self._total - len(seen)} of {self._total} blocks are nowhere")
        promised = sum(credit.blocks for credit in self._credits)
        if promised != self._promised or promised > self.free:
            found.append(f"{promised} blocks promised by credits, {self._promised} booked, {self.free} free")
        return tuple(found)

    def _take(self, blocks: int, credit: Credit) -> list[int]:
        assert credit in self._credits, f"credit of {credit.owner} is not in this pool"
        credit.draw(blocks)
        self._promised -= blocks
        return [self._free.pop() for _ in range(blocks)]

    def _assert_known(self, table: BlockTable) -> None:
        assert table in self._tables, f"block table of {table.owner} is not in this pool"
