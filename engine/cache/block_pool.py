"""All blocks of a worker, and the ledger of who owns them.

free + cached + owned + quarantined = total, always. A block moves by a named verb and by nothing else: allocate,
extend, transfer, release, quarantine, restore. Called on the step thread alone. Never touches the bytes, never
decides who gets what.
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
    """A recount of the pool. Counts are blocks; violations is empty when the books balance."""

    total: int
    free: int
    cached: int
    owned: int
    quarantined: int
    owners: tuple[OwnedBlocks, ...]
    violations: tuple[str, ...]


class BlockPool:
    """Ledger of `total` blocks, ids 0 .. total - 1."""

    def __init__(self, total: int) -> None:
        assert total > 0, total
        self._total = total
        self._free = list(range(total - 1, -1, -1))
        self._tables: set[BlockTable] = set()
        self._quarantined: dict[int, list[int]] = {}
        self._receipts = count()

    @property
    def total(self) -> int:
        return self._total

    @property
    def free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def allocate(self, owner: Owner, blocks: int) -> BlockTable:
        """A new table of free blocks. The caller has checked `free`."""
        table = BlockTable(owner, self._take(blocks))
        self._tables.add(table)
        return table

    def extend(self, table: BlockTable, blocks: int) -> None:
        """Add free blocks at the table's end. The caller has checked `free`."""
        self._assert_known(table)
        table.extend(self._take(blocks))

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
        seen: Counter[int] = Counter(self._free)
        for table in self._tables:
            owners[table.owner] += len(table)
            seen.update(table.ids())
        for blocks in self._quarantined.values():
            seen.update(blocks)
        owned = sum(owners.values())
        quarantined = sum(len(blocks) for blocks in self._quarantined.values())
        return Ledger(
            total=self._total,
            free=self.free,
            cached=0,
            owned=owned,
            quarantined=quarantined,
            owners=tuple(OwnedBlocks(owner=owner, blocks=blocks) for owner, blocks in owners.items()),
            violations=self._violations(seen, self.free + owned + quarantined),
        )

    def _violations(self, seen: Counter[int], counted: int) -> tuple[str, ...]:
        found = []
        if counted != self._total:
            found.append(f"{counted} blocks counted, {self._total} exist")
        found += [f"block {block} is in {times} places" for block, times in seen.items() if times > 1]
        found += [f"block {block} does not exist" for block in seen if not 0 <= block < self._total]
        return tuple(found)

    def _take(self, blocks: int) -> list[int]:
        assert 0 <= blocks <= len(self._free), f"{blocks} blocks wanted, {len(self._free)} free"
        return [self._free.pop() for _ in range(blocks)]

    def _assert_known(self, table: BlockTable) -> None:
        assert table in self._tables, f"block table of {table.owner} is not in this pool"
