"""A model that costs microseconds and whose every answer depends on every byte of KV it should have read.

KV of position p is a hash of (KV of p - 1 as read from the cache, token, p); the next token is a hash of all KV of the
sequence as read from the cache. A wrong, missing or foreign block changes the output at once.
"""

import hashlib

import numpy as np
import torch

from engine.batch import Batch, BatchItem
from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout

VOCAB = 97


def hash_layout(block_size: int = 4, model: str = "hash") -> KVLayout:
    return KVLayout(
        model_digest=model, layers=1, kv_heads=1, head_dim=2, block_size=block_size, dtype=torch.float32
    )


class HashRunner:
    """16 bytes of KV per position: 2 (key, value) x 2 x float32. Counts what it computes."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._size = cache.layout.block_size
        self.batches: list[Batch] = []

    def run(self, batch: Batch) -> torch.Tensor:
        self.batches.append(batch)
        rows = [self._item(item) for item in batch.items]
        logits = torch.zeros(sum(item.wants_logits for item in batch.items), VOCAB)
        chosen = [row for row, item in zip(rows, batch.items, strict=True) if item.wants_logits]
        for index, token in enumerate(chosen):
            logits[index, token] = 4.0
            logits[index, (token * 7 + 3) % VOCAB] = 3.0
        return logits

    def _item(self, item: BatchItem) -> int:
        for offset, token in enumerate(item.tokens):
            position = item.first_position + offset
            before = self._read(item, position - 1) if position else b"start"
            self._write(item, position, _digest(before, token, position))
        last = item.first_position + len(item.tokens) - 1
        everything = b"".join(self._read(item, position) for position in range(last + 1))
        return int.from_bytes(_digest(everything, 0, 0)[:4], "big") % VOCAB

    def _slot(self, item: BatchItem, position: int) -> "np.ndarray":
        block = self._cache.block_view(item.block_table[position // self._size])
        floats = np.frombuffer(block, dtype=np.uint8).reshape(2, self._size, 8)
        return floats[:, position % self._size]

    def _read(self, item: BatchItem, position: int) -> bytes:
        return self._slot(item, position).tobytes()

    def _write(self, item: BatchItem, position: int, value: bytes) -> None:
        self._slot(item, position)[:] = np.frombuffer(value, dtype=np.uint8).reshape(2, 8)


def _digest(before: bytes, token: int, position: int) -> bytes:
    return hashlib.blake2b(
        before + token.to_bytes(4, "big") + position.to_bytes(4, "big"), digest_size=16
    ).digest()


def golden(prompt: list[int], count: int, block_size: int = 4) -> list[int]:
    """What an idle engine answers greedily, computed without any engine of ours."""
    kv: list[bytes] = []
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        for position in range(len(kv), len(tokens)):
            kv.append(_digest(kv[position - 1] if position else b"start", tokens[position], position))
        tokens.append(int.from_bytes(_digest(b"".join(kv), 0, 0)[:4], "big") % VOCAB)
    return tokens[len(prompt) :]
