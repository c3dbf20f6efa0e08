"""Which block holds which prefix: from a link's hash to the one block that has its KV.

Owned by the block pool, which says when a block comes in and goes out. Two links of one hash are told apart by what
they cover. Notes what changed, for those who want to know elsewhere. Never owns a block, never touches bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.cache.prefix_chain import PrefixLink


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixChanges:
    """What is to be found since the last look, and what no longer is: hashes."""

    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]


UNCHANGED = PrefixChanges(added=(), removed=())


class PrefixIndex:
    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._links: dict[int, PrefixLink] = {}
        self._changed: dict[bytes, bool] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._links

    def __len__(self) -> int:
        return len(self._links)

    def which(self, blocks: Iterable[int]) -> set[int]:
        """Those of the blocks that hold a prefix which is to be found."""
        return self._links.keys() & blocks

    def hashes(self) -> tuple[bytes, ...]:
        """Of all that is to be found."""
        return tuple(self._blocks)

    def find(self, links: Iterable[PrefixLink]) -> list[int]:
        """Blocks of the longest leading part of the links that is here."""
        found: list[int] = []
        for link in links:
            block = self._blocks.get(link.hash)
            if block is None or self._links[block] != link:
                break
            found.append(block)
        return found

    def add(self, link: PrefixLink, block: int) -> None:
        """The block holds the KV of this link and will not be written again. The first block of a link stays."""
        assert self._links.get(block, link) == link, f"block {block} holds another prefix"
        if link.hash not in self._blocks:
            self._blocks[link.hash] = block
            self._links[block] = link
            self._note(link.hash, present=True)

    def remove(self, block: int) -> None:
        """The block's contents are about to go."""
        link = self._links.pop(block)
        del self._blocks[link.hash]
        self._note(link.hash, present=False)

    def changes(self) -> PrefixChanges:
        """Since the last call. What came and went in between is not in it."""
        if not (changed := self._changed):
            return UNCHANGED
        self._changed = {}
        return PrefixChanges(
            added=tuple([each for each, present in changed.items() if present]),
            removed=tuple([each for each, present in changed.items() if not present]),
        )

    def _note(self, link_hash: bytes, *, present: bool) -> None:
        """Two changes of one hash cancel out."""
        if self._changed.pop(link_hash, present) is present:
            self._changed[link_hash] = present
