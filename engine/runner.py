"""From a Batch to logits, with one model and one cache.

Called by the core, once per step. Makes the backend's tensors of the batch; decides nothing and keeps nothing between
two steps.
"""

from typing import Protocol

import torch

from engine.batch import Batch, Int32s, Int64s
from engine.cache.kv_cache import KVCache
from engine.kernels.backend import AttentionMeta
from engine.model.architecture import ModelConfig


class Model(Protocol):
    """See engine.model.transformer.Transformer."""

    @property
    def config(self) -> ModelConfig: ...

    def forward(
        self, token_ids: torch.Tensor, kv: torch.Tensor, meta: AttentionMeta, rows: torch.Tensor
    ) -> torch.Tensor: ...


class TransformerRunner:
    """See engine.batch.ModelRunner. The cache's layout must be the model's."""

    def __init__(self, model: Model, kv_cache: KVCache) -> None:
        config, layout = model.config, kv_cache.layout
        wanted = (config.layers, config.kv_heads, config.head_dim)
        assert (layout.layers, layout.kv_heads, layout.head_dim) == wanted, "the cache is not the model's"
        self._model = model
        self._kv = kv_cache.tensor
        self._on_host = self._kv.device.type == "cpu"

    def run(self, batch: Batch) -> torch.Tensor:
        """Float32 logits [rows, vocab_size], in the order of `batch.rows`."""
        meta = AttentionMeta(
            positions=self._tensor(batch.positions),
            slots=self._tensor(batch.slots),
            query_starts=self._tensor(batch.query_starts),
            context_lengths=self._tensor(batch.context_lengths),
            block_tables=self._tensor(batch.block_tables),
        )
        with torch.inference_mode():
            for copy in batch.copies:
                self._kv[copy.target].copy_(self._kv[copy.source])
            token_ids = self._tensor(batch.token_ids)
            if batch.unread is not None:
                batch.unread.put_into(token_ids)
            return self._model.forward(token_ids, self._kv, meta, self._tensor(batch.rows))

    def _tensor(self, array: Int32s | Int64s) -> torch.Tensor:
        """Where the cache is. It is on its way there while the device still computes an earlier step."""
        tensor = torch.from_numpy(array)
        return tensor if self._on_host else tensor.pin_memory().to(self._kv.device, non_blocking=True)
