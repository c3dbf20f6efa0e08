"""What a block pool should be: a model made of dictionaries and lists, which says beforehand what every verb does."""

from collections import Counter
from dataclasses import dataclass, field

from engine.cache.block_table import OwnerKind
from engine.cache.prefix_chain import PrefixChain, PrefixLink

SCOPE = b"a scope for the tests"


def links_of(run):
    """Of a run of tokens, one to a block."""
    return PrefixChain(SCOPE, 1).links(run, 0, len(run))


@dataclass
class Table:
    """A live table as it should be."""

    owner: object
    blocks: list


@dataclass
class PoolModel:
    """free: blocks without contents. idle: cached blocks, the next to be evicted first. contents: the link that a
    block's bytes are of, whether or not it can be found. published: by link, the one block in which it is found."""

    total: int
    free: set = field(default_factory=set)
    idle: list = field(default_factory=list)
    contents: dict[int, PrefixLink] = field(default_factory=dict)
    published: dict[PrefixLink, int] = field(default_factory=dict)
    tables: dict = field(default_factory=dict)
    credits: dict = field(default_factory=dict)
    seen: set = field(default_factory=set)

    def __post_init__(self):
        self.free = set(range(self.total))

    def references(self):
        return Counter(block for table in self.tables.values() for block in table.blocks)

    def owned(self):
        return self._in_tables(locked=False)

    def locked_away(self):
        return self._in_tables(locked=True) - self.owned()

    def promised(self):
        return sum(self.credits.values())

    def available(self):
        return len(self.free) + len(self.idle) - self.promised()

    def hashes(self):
        return {link.hash for link in self.published}

    def writable(self, block):
        return self.references()[block] == 1 and block not in self.published.values()

    def found(self, run):
        """Blocks of the longest leading part of a run that is published."""
        blocks = []
        for link in links_of(run):
            if link not in self.published:
                break
            blocks.append(self.published[link])
        return blocks

    def drawn(self, credit, taken):
        """Blocks were taken on a credit."""
        self.credits[credit] -= len(taken)
        self.taken(taken)

    def taken(self, taken):
        """Blocks were taken: free ones if there are enough, else all of these and the longest idle."""
        assert len(set(taken)) == len(taken)
        evicted = self.idle[: max(0, len(taken) - len(self.free))]
        assert set(evicted) <= set(taken) <= self.free | set(evicted), (
            "free blocks first, then the longest idle"
        )
        for block in evicted:
            self.idle.remove(block)
            del self.published[self.contents[block]]
        self.free -= set(taken)
        for block in taken:
            self.contents.pop(block, None)

    def shared(self, blocks):
        self.idle = [block for block in self.idle if block not in blocks]

    def let_go(self, blocks):
        """These left a table, in this order. What nobody owns now is idle if it can be found, and free if not."""
        for block in blocks:
            if self.references()[block]:
                continue
            if block in self.published.values():
                self.idle.append(block)
            else:
                self.free.add(block)

    def run_of(self, table, tokens):
        """What the table holds, and then such tokens for blocks of which nobody has said what they hold."""
        run = []
        for block, token in zip(self.tables[table].blocks, tokens, strict=False):
            known = self.contents.get(block)
            run.append(token if known is None else int.from_bytes(known.tokens, "little"))
        return run

    def publish(self, table, first, links):
        for block, link in zip(self.tables[table].blocks[first:], links, strict=False):
            self.contents[block] = link
            self.published.setdefault(link, block)

    def unpublish(self, block):
        self.published = {link: each for link, each in self.published.items() if each != block}
        self.contents.pop(block, None)

    def _in_tables(self, *, locked):
        return {
            block
            for table in self.tables.values()
            if (table.owner.kind is OwnerKind.QUARANTINE) is locked
            for block in table.blocks
        }
