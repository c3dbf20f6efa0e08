"""From a Batch to logits, with one model and one cache.

Called by the core, once per step. Lays the batch out as the backend wants it; decides nothing and keeps
nothing between two steps.
"""

from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import Batch
from engine.cache.kv_cache import KVCache
from engine.kernels.backend import AttentionMeta
from engine.model.transformer import Transformer


class TransformerRunner:
    """See engine.batch.ModelRunner. The cache's layout must be the model's."""

    def __init__(self, model: Transformer, kv_cache: KVCache) -> None:
        config, layout = model.config, kv_cache.layout
        wanted = (config.layers, config.kv_heads, config.head_dim)
        assert (layout.layers, layout.kv_heads, layout.head_dim) == wanted, "the cache is not the model's"
        self._model = model
        self._kv = kv_cache.tensor
        self._block_size = layout.block_size

    def run(self, batch: Batch) -> torch.Tensor:
        """Float32 logits [items that want logits, vocab_size], in item order."""
        token_ids, meta, rows = self._lay_out(batch)
        with torch.inference_mode():
            for copy in batch.copies:
                self._kv[copy.target].copy_(self._kv[copy.source])
            return self._model.forward(token_ids, self._kv, meta, rows)

    def _lay_out(self, batch: Batch) -> tuple[torch.Tensor, AttentionMeta, torch.Tensor]:
        """(token ids [T], meta, rows that want logits)."""
        items = batch.items
        counts = np.fromiter((len(item.tokens) for item in items), np.int32, len(items))
        firsts = np.fromiter((item.first_position for item in items), np.int32, len(items))
        wants = np.fromiter((item.wants_logits for item in items), np.bool_, len(items))
        starts = np.zeros(len(items) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        total = int(starts[-1])
        token_ids = np.fromiter(chain.from_iterable(item.tokens for item in items), np.int64, total)
        positions = np.arange(total, dtype=np.int32) + np.repeat(firsts - starts[:-1], counts)
        tables = _block_tables(batch)
        meta = AttentionMeta(
            positions=self._tensor(positions),
            slots=self._tensor(self._slots(tables, positions, counts)),
            query_starts=self._tensor(starts),
            context_lengths=self._tensor(firsts + counts),
            block_tables=self._tensor(tables),
        )
        return self._tensor(token_ids), meta, self._tensor((starts[1:][wants] - 1).astype(np.int64))

    def _slots(
        self, tables: npt.NDArray[np.int32], positions: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int64]:
        """Where each row's KV goes: int64 [T]."""
        sequence = np.repeat(np.arange(len(counts)), counts)
        index, offset = np.divmod(positions, np.int32(self._block_size))
        blocks = tables[sequence, index].astype(np.int64)
        assert blocks.min() >= 0, "a block table ends before its sequence's last token"
        return blocks * self._block_size + offset

    def _tensor(self, array: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._kv.device)


def _block_tables(batch: Batch) -> npt.NDArray[np.int32]:
    """[S, longest table], padded with -1."""
    lengths = np.array([len(item.block_table) for item in batch.items])
    tables = np.full((len(lengths), int(lengths.max())), -1, np.int32)
    flat = np.fromiter(
        chain.from_iterable(item.block_table for item in batch.items), np.int32, int(lengths.sum())
    )
    tables[np.arange(tables.shape[1]) < lengths[:, None]] = flat
    return tables
