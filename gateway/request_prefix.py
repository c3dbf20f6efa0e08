"""The names of a request's prefixes, block by block: what is cached of it anywhere is found by them.

Each name is computed once per request, and only when somebody has all that come before it: a prompt that nobody knows
costs one. Knows no worker.
"""

from collections.abc import Iterator, Sequence

from engine.cache.prefix_chain import PrefixChain
from gateway.prefix_map import PrefixMap


class RequestPrefix:
    """scope: of the caches that the request may use; empty for none."""

    def __init__(self, scope: bytes = b"") -> None:
        self._scope = scope
        self._tokens: Sequence[int] = ()
        self._runs: dict[int, _Run] = {}

    def grow(self, tokens: Sequence[int]) -> None:
        """tokens: all that are known now; what was known before is at their start."""
        self._tokens = tokens

    def cached_tokens(self, known: PrefixMap, block_size: int) -> int:
        """How many tokens from the start a worker with blocks of this size has cached, full blocks only."""
        if not self._scope or not known:
            return 0
        run = self._runs.setdefault(block_size, _Run(self._scope, block_size))
        return known.leading(run.hashes(self._tokens)) * block_size


class _Run:
    """The hashes for one block size."""

    def __init__(self, scope: bytes, block_size: int) -> None:
        self._chain = PrefixChain(scope, block_size)
        self._hashes: list[bytes] = []

    def hashes(self, tokens: Sequence[int]) -> Iterator[bytes]:
        yield from self._hashes
        for block in range(len(self._hashes), self._chain.full_blocks(len(tokens))):
            (link,) = self._chain.links(tokens, block, block + 1)
            self._hashes.append(link.hash)
            yield link.hash
