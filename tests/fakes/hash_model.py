"""A model that costs microseconds and whose every answer depends on every byte of KV it should have read.

KV of position p is a hash of (KV of p - 1 as read from the cache, token, p); the next token is a hash of all KV of the
sequence as read from the cache. A wrong, missing or foreign block changes the output at once.
"""

from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import torch

from engine.batch import Batch
from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from tests.fakes.batches import BatchItem, items_of

VOCAB = 97
POSITION_BYTES = 16
"""2 (key, value) x 2 x float32."""


def hash_layout(block_size: int = 4, model: str = "hash") -> KVLayout:
    return KVLayout(
        model_digest=model, layers=1, kv_heads=1, head_dim=2, block_size=block_size, dtype=torch.float32
    )


class HashRunner:
    """Counts what it computes."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._size = cache.layout.block_size
        octets = cache.tensor.view(torch.uint8).numpy()
        self._halves = octets.reshape(cache.num_blocks, 2, self._size, POSITION_BYTES // 2)
        self.batches: list[Batch] = []

    def run(self, batch: Batch) -> torch.Tensor:
        if batch.unread is not None:
            token_ids = torch.from_numpy(batch.token_ids)
            batch.unread.put_into(token_ids)
            batch = replace(batch, unread=None)
        self.batches.append(batch)
        for copy in batch.copies:
            self._halves[copy.target] = self._halves[copy.source]
        items = items_of(batch, self._size)
        for item in items:
            self._write(item)
        runs = np.searchsorted(batch.query_starts, batch.rows, side="right") - 1
        chosen = [
            self._next(items[run], int(batch.positions[row]))
            for run, row in zip(runs, batch.rows, strict=True)
        ]
        return torch.from_numpy(logits_for(chosen))

    def _write(self, item: BatchItem) -> None:
        first = item.first_position
        before = self._read(item, first)[-POSITION_BYTES:] if first else START
        for position, token in enumerate(item.tokens, first):
            before = position_kv(before, token, position)
            halves = self._halves[item.block_table[position // self._size], :, position % self._size]
            halves[:] = np.frombuffer(before, np.uint8).reshape(2, -1)

    def _next(self, item: BatchItem, position: int) -> int:
        """After the token at this position."""
        return next_token(self._read(item, position + 1))

    def _read(self, item: BatchItem, positions: int) -> bytes:
        """KV of the first so many positions, as the cache has it."""
        blocks = list(item.block_table[: -(-positions // self._size)])
        return positions_of(self._halves[blocks])[: positions * POSITION_BYTES]


START = b"start"


def positions_of(halves: np.ndarray) -> bytes:
    """Blocks [n, 2, size, 8] as KV position by position."""
    return halves.swapaxes(1, 2).tobytes()


def position_kv(before: bytes, token: int, position: int) -> bytes:
    """16 bytes. before: KV of the position before, or START."""
    number = (token << 32 | position).to_bytes(8, "big")
    return blake2b(before + number, digest_size=POSITION_BYTES).digest()


def next_token(kv: bytes) -> int:
    """The model's first choice after a sequence with this KV."""
    return int.from_bytes(blake2b(kv, digest_size=4).digest(), "big") % VOCAB


def logits_for(tokens: Iterable[int]) -> np.ndarray:
    """float32 [n, VOCAB]: one row for each first choice, which also decides the second one."""
    chosen = list(tokens)
    logits = np.zeros((len(chosen), VOCAB), np.float32)
    for row, token in enumerate(chosen):
        logits[row, (token * 7 + 3) % VOCAB] = 3.0
        logits[row, token] = 4.0
    return logits


def golden(prompt: list[int], count: int) -> list[int]:
    """What an idle engine answers greedily, computed without any engine of ours."""
    tokens, kv, before = list(prompt), b"", START
    while len(tokens) < len(prompt) + count:
        for position in range(len(kv) // POSITION_BYTES, len(tokens)):
            before = position_kv(before, tokens[position], position)
            kv += before
        tokens.append(next_token(kv))
    return tokens[len(prompt) :]
