"""The prefix cache with one guard taken out: what the simulation must notice, and what the state machines must."""

from decode_worker.reservations import Reservations
from engine.cache.block_pool import BlockPool
from engine.cache.prefix_chain import PrefixChain
from engine.cache.prefix_index import PrefixIndex
from engine.core import EngineCore
from gateway.orchestrator import Orchestrator
from tests.simulation.faults import Kind
from tests.simulation.mutants import Mutant

NONE = ()
CANCELS = (Kind.CANCEL, Kind.SLOW)

POOL_MUTANTS = (
    Mutant(
        "an evicted block can still be found",
        BlockPool,
        "_evict",
        {"self.index.remove(block)": "pass"},
        NONE,
    ),
    Mutant(
        "the index keeps the hash of what was evicted",
        PrefixIndex,
        "remove",
        {"self._links.pop(block)": "self._links[block]", "del self._blocks[link.hash]": "pass"},
        NONE,
    ),
    Mutant(
        "a shared block may be evicted",
        BlockPool,
        "share",
        {"del self._cached[block]": "pass"},
        NONE,
    ),
    Mutant(
        "a block is let go while others own it",
        BlockPool,
        "_unreference",
        {"if self._references[block]:": "if False:"},
        NONE,
    ),
)
LEDGER_MUTANTS = (
    Mutant(
        "sharing what nobody owns takes from what was promised",
        BlockPool,
        "share",
        {"len(fresh) <= self.available": "True"},
        NONE,
    ),
    Mutant(
        "every block is writable",
        BlockPool,
        "unwritable",
        {"(counts == 1).all()": "True", "counts[at] != 1": "False"},
        NONE,
    ),
    Mutant(
        "a published block is writable",
        BlockPool,
        "unwritable",
        {"self.index.which(blocks.tolist())": "set()"},
        NONE,
    ),
    Mutant(
        "a block that is about to be written stays shared",
        BlockPool,
        "unshare",
        {"table.replace(position, new)": "pass"},
        NONE,
    ),
    Mutant(
        "the beginning of a run is evicted first",
        BlockPool,
        "release",
        {"reversed(table.spend())": "table.spend()"},
        NONE,
    ),
    Mutant(
        "what was used last is evicted first",
        BlockPool,
        "_evict",
        {"popitem(last=False)": "popitem(last=True)"},
        NONE,
    ),
    Mutant("a fork owns nothing", BlockPool, "fork", {"self._referenced(": "("}, NONE),
)
"""What the system of today gives no occasion to show, the pool's own machine shows."""
INDEX_MUTANTS = (
    Mutant(
        "two prefixes of one hash are one",
        PrefixIndex,
        "find",
        {" or self._links[block] != link": ""},
        NONE,
    ),
    Mutant(
        "the last block of a prefix takes the place of the first",
        PrefixIndex,
        "add",
        {"if link.hash not in self._blocks:": "if True:"},
        NONE,
    ),
    Mutant(
        "what came and went is told",
        PrefixIndex,
        "_note",
        {"is present": "is not None"},
        NONE,
    ),
)
USE_MUTANTS = (
    Mutant(
        "a link ignores the last token of its block",
        PrefixChain,
        "links",
        {"(index + 1) * size]": "(index + 1) * size - 1]"},
        NONE,
    ),
    Mutant(
        "everybody has the same salt",
        Orchestrator,
        "_cache_scope",
        {"salt=request.cache_salt": "salt=''"},
        NONE,
    ),
    Mutant(
        "a block is published before it is computed",
        EngineCore,
        "_publish",
        {
            "min(sequence.computed, len(sequence.tokens)) // self._block_size": "min(len(sequence.table),"
            " len(sequence.tokens) // self._block_size)"
        },
        NONE,
    ),
    Mutant(
        "a shared block is written",
        EngineCore,
        "_start",
        {"shared * self._block_size": "max(0, shared * self._block_size - 1)"},
        NONE,
    ),
    Mutant(
        "blocks are published before they were received",
        Reservations,
        "bind",
        {
            "return reservation.filled()": "self._pool.publish(reservation.table, 0, reservation.links())\n"
            "    return reservation.filled()"
        },
        NONE,
    ),
    Mutant(
        "what the target holds is let go before the hand-over",
        Reservations,
        "grant",
        {
            "held = len(reservation.table)": "held = len(reservation.table)\n"
            "    self._pool.release(reservation.table)\n"
            "    reservation.table = self._pool.share(reservation.owner(), [])"
        },
        NONE,
    ),
    Mutant(
        "a sequence that is gone is waited for",
        EngineCore,
        "detach",
        {"self._coming.drop(sequence_id)": "pass"},
        CANCELS,
        shown_by=156,
    ),
    Mutant(
        "a reservation that is gone is waited for",
        Reservations,
        "withdraw",
        {"self._coming.drop(name)": "pass"},
        CANCELS,
    ),
)
SIMULATED = (*POOL_MUTANTS, *USE_MUTANTS)
