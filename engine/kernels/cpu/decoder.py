"""A decoder on the compiled kernels: one native call for a whole step.

Owns the C structures of the weights, and the memory between the kernels, which grows with the largest batch so far and
is used again by every step. Called by the model on the step thread; one caller at a time.
"""

from collections.abc import Callable
from ctypes import POINTER, Array, cast

import torch

from engine.kernels.backend import AttentionMeta, DecoderWeights, LayerWeights, PackedLinear
from engine.kernels.cpu import structures
from engine.kernels.cpu.library import Library, PackedWeight, check


class CpuDecoder:
    """See kernels.backend.Decoder. run: one step of a decoder over a batch, on the backend's threads."""

    def __init__(
        self,
        weights: DecoderWeights,
        library: Library,
        run: Callable[[structures.Decoder, structures.Batch], None],
    ) -> None:
        self._weights = weights  # the structures point into them
        layers = [_layer(weights, layer) for layer in weights.layers]
        self._layers = (structures.Layer * len(layers))(*layers)
        self._decoder = _decoder(weights, self._layers)
        self._library = library
        self._run = run
        self._memory = torch.empty(0)
        self._rows_most = 0

    def forward(
        self, token_ids: torch.Tensor, kv: torch.Tensor, meta: AttentionMeta, rows: torch.Tensor
    ) -> torch.Tensor:
        check(token_ids, torch.int64, 1)
        check(rows, torch.int64, 1)
        count, chosen_count = token_ids.shape[0], rows.shape[0]
        assert 1 <= count >= chosen_count, (count, chosen_count)
        logits = torch.empty(chosen_count, self._weights.head.out_features)
        batch = structures.Batch(
            token_ids=token_ids.data_ptr(),
            rows=count,
            chosen=rows.data_ptr(),
            chosen_count=chosen_count,
            memory=self._memory_of(count).data_ptr(),
            logits=logits.data_ptr(),
        )
        _place(batch, meta)
        self._place_cache(batch, kv)
        self._run(self._decoder, batch)
        return logits

    def _memory_of(self, rows: int) -> torch.Tensor:
        if rows > self._rows_most:
            self._memory, self._rows_most = torch.empty(0), 0  # not both at once
            self._memory = torch.empty(self._library.decoder_floats(self._decoder, rows))
            self._rows_most = rows
        return self._memory

    def _place_cache(self, batch: structures.Batch, kv: torch.Tensor) -> None:
        weights = self._weights
        check(kv, kv.dtype, 6)
        _, layers, two, block_size, kv_heads, head_dim = kv.shape
        wanted = (len(weights.layers), 2, weights.kv_heads, weights.head_dim)
        assert (layers, two, kv_heads, head_dim) == wanted, (kv.shape, wanted)
        assert kv.dtype in {torch.float32, torch.bfloat16}, kv.dtype
        batch.kv, batch.kv_bits, batch.block_size = kv.data_ptr(), 8 * kv.itemsize, block_size


def _place(batch: structures.Batch, meta: AttentionMeta) -> None:
    for tensor, dimensions in ((meta.positions, 1), (meta.query_starts, 1), (meta.block_tables, 2)):
        check(tensor, torch.int32, dimensions)
    check(meta.slots, torch.int64, 1)
    sequences, table_stride = meta.block_tables.shape
    assert meta.positions.shape == meta.slots.shape == (batch.rows,), (meta.positions.shape, batch.rows)
    assert meta.query_starts.shape == (sequences + 1,), (meta.query_starts.shape, sequences)
    batch.positions, batch.slots = meta.positions.data_ptr(), meta.slots.data_ptr()
    batch.query_starts, batch.block_tables = meta.query_starts.data_ptr(), meta.block_tables.data_ptr()
    batch.sequences, batch.table_stride = sequences, table_stride


def _decoder(weights: DecoderWeights, layers: Array[structures.Layer]) -> structures.Decoder:
    vocab, hidden = weights.embedding.shape
    assert len(layers) >= 1
    check(weights.embedding, weights.embedding.dtype, 2)
    assert weights.embedding.dtype in {torch.float32, torch.bfloat16}, weights.embedding.dtype
    angles = (weights.cos.shape[0], weights.head_dim // 2)
    for table in (weights.cos, weights.sin):
        check(table, torch.float32, 2)
        assert table.shape == angles, (table.shape, angles)
    return structures.Decoder(
        layers=cast(layers, POINTER(structures.Layer)),
        layer_count=len(layers),
        embedding=weights.embedding.data_ptr(),
        embedding_bits=8 * weights.embedding.itemsize,
        hidden=hidden,
        heads=weights.heads,
        kv_heads=weights.kv_heads,
        dim=weights.head_dim,
        final_norm=_norm(weights.final_norm, hidden),
        head=_linear(weights.head, hidden, vocab),
        cos=weights.cos.data_ptr(),
        sin=weights.sin.data_ptr(),
        eps=weights.eps,
        scale=weights.scale,
    )


def _layer(weights: DecoderWeights, layer: LayerWeights) -> structures.Layer:
    hidden, dim = weights.embedding.shape[1], weights.head_dim
    heads, kv_heads = weights.heads, weights.kv_heads
    assert heads % kv_heads == 0 and dim % 2 == 0, (heads, kv_heads, dim)
    assert layer.window is None or layer.window >= 1, layer.window
    return structures.Layer(
        input_norm=_norm(layer.input_norm, hidden),
        q_norm=None if layer.q_norm is None else _norm(layer.q_norm, dim),
        k_norm=None if layer.k_norm is None else _norm(layer.k_norm, dim),
        post_norm=_norm(layer.post_norm, hidden),
        qkv=_linear(layer.qkv, hidden, (heads + 2 * kv_heads) * dim),
        output=_linear(layer.output, heads * dim, hidden),
        gate_up=_linear(layer.gate_up, hidden, 2 * layer.down.in_features),
        down=_linear(layer.down, layer.down.in_features, hidden),
        window=layer.window or 0,
    )


def _norm(weight: torch.Tensor, size: int) -> int:
    check(weight, torch.float32, 1)
    assert len(weight) == size, (len(weight), size)
    return weight.data_ptr()


def _linear(linear: PackedLinear, in_features: int, out_features: int) -> structures.Linear:
    assert isinstance(linear, PackedWeight), linear
    shape = (linear.in_features, linear.out_features)
    assert shape == (in_features, out_features), (shape, in_features, out_features)
    return linear.structure
