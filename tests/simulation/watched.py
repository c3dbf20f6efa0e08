"""A worker's parts with eyes: the same pool, runner and ends of a transfer, and beside each call a check of what it
must never do. They see public calls and events only.
"""

from collections import Counter

import numpy as np

from engine.cache.block_pool import BlockPool
from engine.cache.block_table import OwnerKind
from kvtransfer.events import Closed, Opened, Received
from kvtransfer.source_endpoint import TransferSource
from kvtransfer.target_endpoint import TransferTarget
from tests.fakes.hash_model import HashRunner, positions_of

POISON = 0xDD


class WatchedPool(BlockPool):
    """Knows of each block who owns it, and which transfers may touch its bytes. Freed blocks are filled with
    rubbish, so that whoever still reads them shows it."""

    def __init__(self, total, cache, process):
        super().__init__(total)
        self.owners = [None] * total
        self._process = process
        self._octets = cache.tensor.view(total, -1).numpy().view(np.uint8)
        self._base = self._octets.ctypes.data
        self._touching = {}
        self._touched = Counter()

    def allocate(self, owner, blocks, credit):
        table = super().allocate(owner, blocks, credit)
        self._own(table.ids(), owner)
        return table

    def extend(self, table, blocks, credit):
        before = len(table)
        super().extend(table, blocks, credit)
        self._own(table.ids()[before:], table.owner)

    def transfer(self, table, owner):
        blocks, before = table.ids(), table.owner
        moved = super().transfer(table, owner)
        for block in blocks:
            self._expect(block, before)
            self.owners[block] = owner
        return moved

    def release(self, table):
        blocks, owner = table.ids(), table.owner
        super().release(table)
        for block in blocks:
            self._expect(block, owner)
            if self._touched[block]:
                self._fail("I2", f"block {block} of {owner} is freed while a transfer may touch it")
            self.owners[block] = None
        self._octets[list(blocks)] = POISON

    def owned(self):
        """Request ids that own blocks."""
        return {owner.request_id for owner in self.owners if owner is not None}

    def touch(self, ticket_id, views):
        """A transfer may read or write these blocks until it is closed."""
        blocks = [self._block_of(view) for view in views]
        self._touching.setdefault(ticket_id, []).extend(blocks)
        self._touched.update(blocks)
        for block in blocks:
            if self.owners[block] is None:
                self._fail("I2", f"block {block} is given to a transfer and is nobody's")

    def untouch(self, ticket_id):
        """The transfer is done with its blocks; returns them."""
        blocks = self._touching.pop(ticket_id, [])
        self._touched.subtract(blocks)
        return blocks

    def kv_of(self, blocks, size):
        """What is in these blocks, position by position."""
        return positions_of(self._octets[blocks].reshape(len(blocks), 2, size, -1))

    def _own(self, blocks, owner):
        for block in blocks:
            self._expect(block, None)
            self.owners[block] = owner

    def _expect(self, block, owner):
        if self.owners[block] != owner:
            self._fail("I2", f"block {block} is of {self.owners[block]}, not of {owner}")

    def _block_of(self, view):
        offset = np.frombuffer(view, np.uint8).ctypes.data - self._base
        return offset // view.nbytes

    def _fail(self, rule, what):
        self._process.world.fail(rule, f"{self._process.name}: {what}")


class WatchedRunner(HashRunner):
    """Computes nothing with a block that is not ready: filled and owned by one running sequence."""

    def __init__(self, cache, pool, process):
        super().__init__(cache)
        self._pool = pool
        self._process = process

    def run(self, batch):
        for item in batch.items:
            owners = {self._pool.owners[block] for block in item.block_table}
            if (
                len(owners) != 1
                or next(iter(owners)) is None
                or next(iter(owners)).kind != OwnerKind.SEQUENCE
            ):
                self._process.world.fail("I3", f"{self._process.name}: computes on blocks of {owners}")
        self._process.world.counts["steps"] += 1
        return super().run(batch)


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
            self._process.pool.touch(ticket_id, blocks)
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
                self._received[event.ticket_id] = (event.first_token, process.pool.untouch(event.ticket_id))
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
            self._process.pool.touch(ticket_id, blocks)
        super().bind(ticket_id, blocks)

    def commit(self, ticket_id):
        process = self._process
        first_token, blocks = self._received[ticket_id]
        kv = process.pool.kv_of(blocks, process.layout.block_size)
        process.world.committed(process, self.open_tickets[ticket_id], first_token, kv)
        super().commit(ticket_id)
