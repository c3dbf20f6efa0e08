"""A worker's parts with eyes: the same pool, runner and ends of a transfer, and beside each call a check of what it
must never do. They see public calls and events only.
"""

from collections import Counter

import numpy as np

from engine.cache.block_pool import BlockPool
from engine.cache.block_table import OwnerKind
from engine.cache.staged_cache import StagedKVCache
from engine.core import EngineCore
from kvtransfer.events import Closed, Opened, Received
from kvtransfer.source_endpoint import TransferSource
from kvtransfer.target_endpoint import TransferTarget
from tests.fakes.batches import items_of
from tests.fakes.hash_model import POSITION_BYTES, HashRunner, positions_of

POISON = 0xDD


class WatchedPool(BlockPool):
    """Knows of each block who owns it, which transfers may touch its bytes, and what is being copied. Freed blocks are
    filled with rubbish, so that whoever still reads them shows it."""

    def __init__(self, total, cache, process):
        super().__init__(total)
        self.owners = [Counter() for _ in range(total)]
        self._process = process
        self._octets = cache.tensor.view(total, -1).numpy().view(np.uint8)
        self._places = [np.frombuffer(cache.block_view(block), np.uint8) for block in range(total)]
        self.read, self.written = Counter(), Counter()
        self._touching = {}
        self._touched = Counter()
        self._published_for = {}

    def share(self, owner, links):
        table = super().share(owner, links)
        self._own(table.ids(), owner)
        for block in table.ids():
            self._process.world.counts["blocks shared"] += 1
            if self._published_for[block] != self._salt(owner):
                self._fail("I13", f"block {block} of {self._published_for[block]!r} is shared with {owner}")
        return table

    def publish(self, table, first, links):
        super().publish(table, first, links)
        for block in table.ids()[first : first + len(links)]:
            self._published_for.setdefault(block, self._salt(table.owner))

    def allocate(self, owner, blocks, credit):
        table = super().allocate(owner, blocks, credit)
        self._take_over(table.ids(), owner)
        return table

    def extend(self, table, blocks, credit):
        before = len(table)
        super().extend(table, blocks, credit)
        self._take_over(table.ids()[before:], table.owner)

    def grow(self, table, blocks):
        before = len(table)
        super().grow(table, blocks)
        self._take_over(table.ids()[before:], table.owner)

    def fork(self, table, owner):
        twin = super().fork(table, owner)
        self._own(twin.ids(), owner)
        return twin

    def unshare(self, table, position, credit):
        old, new = super().unshare(table, position, credit)
        self._process.world.counts["blocks copied on write"] += 1
        self._take_over([new], table.owner)
        self._disown([old], table.owner)
        return old, new

    def transfer(self, table, owner):
        blocks, before = table.ids(), table.owner
        moved = super().transfer(table, owner)
        self._disown(blocks, before)
        self._own(blocks, owner)
        return moved

    def release(self, table):
        blocks, owner = table.ids(), table.owner
        super().release(table)
        self._disown(blocks, owner)
        for block in blocks:
            if self.owners[block]:
                continue
            if self._touched[block]:
                self._fail("I2", f"block {block} of {owner} is freed while a transfer may touch it")
            if self.read[block] or self.written[block]:
                self._fail("I2", f"block {block} of {owner} is freed while it is copied")
            if block not in self.index:
                self._spoil(block)

    def owned(self):
        """Request ids that own blocks."""
        return {owner.request_id for owners in self.owners for owner in owners}

    def touch(self, ticket_id, views, *, writing):
        """A transfer may read or write these blocks until it is closed."""
        blocks = [self._block_of(view) for view in views]
        self._touching.setdefault(ticket_id, []).extend(blocks)
        self._touched.update(blocks)
        for block in blocks:
            if not self.owners[block]:
                self._fail("I2", f"block {block} is given to a transfer and is nobody's")
            if writing and not self.writable_by_one(block):
                self._fail(
                    "I3", f"block {block} of {self.owners[block]} is given to a transfer to be written"
                )

    def untouch(self, ticket_id):
        """The transfer is done with its blocks; returns them."""
        blocks = self._touching.pop(ticket_id, [])
        self._touched.subtract(blocks)
        return blocks

    def writable_by_one(self, block):
        return self.owners[block].total() == 1 and block not in self.index

    def kv_of(self, blocks, size):
        """What is in these blocks, position by position."""
        shape = (len(blocks), 2, size, POSITION_BYTES // 2)
        return positions_of(self._octets[blocks].reshape(shape))

    def _salt(self, owner):
        return self._process.world.salt_of(owner.request_id)

    def _take_over(self, blocks, owner):
        """Blocks that nobody had; what was cached in them is gone."""
        for block in blocks:
            if self.owners[block]:
                self._fail("I2", f"block {block} of {self.owners[block]} is given to {owner}")
            self._published_for.pop(block, None)
        for block in blocks:
            self._spoil(block)
        self._own(blocks, owner)

    def _spoil(self, block):
        self._octets[block] = self._places[block][:] = POISON

    def _own(self, blocks, owner):
        for block in blocks:
            self.owners[block][owner] += 1

    def _disown(self, blocks, owner):
        for block in blocks:
            if not self.owners[block][owner]:
                self._fail("I2", f"block {block} is of {self.owners[block]}, not of {owner}")
            self.owners[block][owner] -= 1
            self.owners[block] += Counter()

    def _block_of(self, view):
        return (np.frombuffer(view, np.uint8).ctypes.data - self._places[0].ctypes.data) // view.nbytes

    def _fail(self, rule, what):
        self._process.world.fail(rule, f"{self._process.name}: {what}")


class WatchedStagedCache(StagedKVCache):
    """Tells its process's pool what is being copied. read, written: on the device."""

    def __init__(self, process, *parts, **more):
        super().__init__(*parts, **more)
        self._process = process

    def to_host(self, blocks, read, then):
        super().to_host(blocks, read, self._watched(blocks, self._process.pool.read, then))

    def from_host(self, blocks, then):
        for block in blocks:
            if not self._process.pool.writable_by_one(block):
                self._process.world.fail("I3", f"{self._process.name}: block {block} is to be overwritten")
        super().from_host(blocks, self._watched(blocks, self._process.pool.written, then))

    def _watched(self, blocks, copied, then):
        copied.update(blocks)
        self._process.world.counts["blocks copied beside"] += len(blocks)

        def done():
            copied.subtract(blocks)
            then()

        return done


class WatchedRunner(HashRunner):
    """Computes nothing with a block that is not ready: filled, and owned by a sequence; by no other, if it writes. Nor
    with one that a copy writes, and writes none that a copy reads."""

    def __init__(self, cache, pool, process):
        super().__init__(cache)
        self._pool = pool
        self._process = process

    def run(self, batch):
        for copy in batch.copies:
            # Whoever copies has just let go of the source: others own it, or it could not be found by its prefix.
            if copy.source not in self._pool.index or not self._pool.owners[copy.source]:
                self._require_ready(copy.source, written=False)
            self._require_ready(copy.target, written=True)
        for item in items_of(batch, self._size):
            for place, block in enumerate(item.block_table):
                self._require_ready(block, written=(place + 1) * self._size > item.first_position)
        self._process.world.counts["steps"] += 1
        return super().run(batch)

    def _require_ready(self, block, *, written):
        owners = self._pool.owners[block]
        if not any(owner.kind is OwnerKind.SEQUENCE for owner in owners):
            self._process.world.fail("I3", f"{self._process.name}: computes on a block of {owners}")
        if written and not self._pool.writable_by_one(block):
            self._process.world.fail("I3", f"{self._process.name}: writes a block of {owners}")
        if self._pool.written[block] or (written and self._pool.read[block]):
            self._process.world.fail(
                "I3", f"{self._process.name}: computes on block {block} while it is copied"
            )


class PacedCore(EngineCore):
    """Nothing takes any time in a history: what its steps take is what the history says. pace_s: of a step, and of a
    token of a prompt."""

    def __init__(self, *, pace_s, **parts):
        super().__init__(**parts)
        self._pace_s = pace_s

    def measured(self, load, seconds):
        step_s, token_s = self._pace_s
        super().measured(load, step_s * (load.generating > 0) + token_s * load.prompt_tokens)


class WatchedSource(TransferSource):
    """open_tickets: not closed. waiting: of those, the ones that still wait for the target."""

    def __init__(self, process, *, emit, **parts):
        self._process = process
        self.open_tickets = set()
        self.waiting = set()

        def see(event):
            self.waiting.discard(event.ticket_id)
            if isinstance(event, Closed):
                self.open_tickets.remove(event.ticket_id)
                process.pool.untouch(event.ticket_id)
            emit(event)

        super().__init__(emit=see, **parts)

    def open(self, sealed, ticket, endpoints):
        super().open(sealed, ticket, endpoints)
        self.open_tickets.add(ticket.ticket_id)
        self.waiting.add(ticket.ticket_id)

    def push(self, ticket_id, first_index, blocks):
        if ticket_id in self.open_tickets:
            self._process.pool.touch(ticket_id, blocks, writing=False)
        super().push(ticket_id, first_index, blocks)

    def cancel(self, ticket_id):
        self.waiting.discard(ticket_id)
        super().cancel(ticket_id)


class WatchedTarget(TransferTarget):
    """open_tickets: expected and not closed. waiting: of those, the ones that wait for their source."""

    def __init__(self, process, *, emit, **parts):
        self._process = process
        self.open_tickets = {}
        self.waiting = set()
        self._received = {}

        def see(event):
            if isinstance(event, Opened):
                self.waiting.add(event.ticket_id)
            else:
                self.waiting.discard(event.ticket_id)
            if isinstance(event, Received):
                # All is verified where it lies: the transfer has written its last.
                self._received[event.ticket_id] = (event.first_tokens, process.pool.untouch(event.ticket_id))
            if isinstance(event, Closed):
                del self.open_tickets[event.ticket_id]
                process.pool.untouch(event.ticket_id)
            emit(event)

        super().__init__(emit=see, **parts)

    def expect(self, ticket):
        super().expect(ticket)
        self.open_tickets[ticket.ticket_id] = ticket

    def bind(self, ticket_id, blocks):
        if ticket_id in self.open_tickets:
            self._process.pool.touch(ticket_id, blocks, writing=True)
        super().bind(ticket_id, blocks)

    def commit(self, ticket_id):
        process = self._process
        first_tokens, blocks = self._received[ticket_id]
        kv = process.pool.kv_of(blocks, process.layout.block_size)
        process.world.committed(process, self.open_tickets[ticket_id], first_tokens, kv)
        super().commit(ticket_id)
