"""The ordered blocks of one token run. Holding a table is owning one reference to each of its blocks.

A table has one owner. Giving it to another owner is `BlockPool.transfer`; the old handle is spent by it, and every
use of a spent handle raises. Only the pool makes, changes or spends tables.
"""

from dataclasses import dataclass
from enum import StrEnum


class OwnerKind(StrEnum):
    SEQUENCE = "sequence"
    HOLD = "hold"
    RESERVATION = "reservation"
    QUARANTINE = "quarantine"
    SWAPPED = "swapped"


@dataclass(frozen=True, slots=True)
class Owner:
    """Who answers for a table: the kind of record and the request it belongs to."""

    kind: OwnerKind
    request_id: str


class BlockTable:
    """Handle to an ordered run of blocks."""

    __slots__ = ("_blocks", "_owner")

    def __init__(self, owner: Owner, blocks: list[int]) -> None:
        self._owner = owner
        self._blocks: list[int] | None = blocks

    @property
    def owner(self) -> Owner:
        return self._owner

    def ids(self, first: int = 0) -> tuple[int, ...]:
        """Block ids in token order, from the block `first` on."""
        return tuple(self._live()[first:])

    def at(self, position: int) -> int:
        """One of them."""
        return self._live()[position]

    def __len__(self) -> int:
        assert self._blocks is not None, f"block table of {self._owner} was given away"
        return len(self._blocks)

    def spent(self) -> bool:
        return self._blocks is None

    def extend(self, blocks: list[int]) -> None:
        """For the pool."""
        self._live().extend(blocks)

    def replace(self, position: int, block: int) -> None:
        """For the pool."""
        self._live()[position] = block

    def spend(self) -> list[int]:
        """For the pool: take the blocks out and make this handle unusable."""
        blocks = self._live()
        self._blocks = None
        return blocks

    def _live(self) -> list[int]:
        assert self._blocks is not None, f"block table of {self._owner} was given away"
        return self._blocks
