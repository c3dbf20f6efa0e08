"""A runner that records the steps in which every sequence generates, and replays them.

Such a step launches the same kernels each time, hundreds of them, and only the numbers that they read differ. Once
recorded it is one launch (a CUDA graph), on inputs that always lie in the same place. A recording is for so many rows
and so wide a block table; a batch between two sizes repeats its last row, which computes and writes the very same bits
once more. All other batches go to the plain runner. How a step is recorded is an argument: this file knows no device.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import TypeAlias

import torch

from engine.batch import Batch, Int32s, Int64s
from engine.cache.kv_cache import KVCache
from engine.kernels.backend import AttentionMeta
from engine.progress import SILENT, Progress
from engine.runner import Model, TransformerRunner

Work: TypeAlias = Callable[[], object]
Recorder: TypeAlias = Callable[[Work], Work]
"""Does some work once, and gives what does the same again: on the tensors that it read and wrote then, whatever they
hold by now. What it makes for itself meanwhile may be anybody's afterwards."""

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Of recordings: a batch computes at most half as many rows again as it has, but for the smallest."""


ALIGNED = 16
"""Bytes: where what a kernel reads begins there, it reads more at once."""


class RecordedRunner:
    """See engine.batch.ModelRunner; the logits must be read before the next run. The cache's layout must be the
    model's.

    rows_max: sequences of a batch that are worth a recording, at least 1. blocks_max: of one sequence."""

    def __init__(
        self, model: Model, kv_cache: KVCache, record: Recorder, *, rows_max: int, blocks_max: int
    ) -> None:
        self._model = model
        self._kv = kv_cache.tensor
        self._plain = TransformerRunner(model, kv_cache)
        self._record = record
        self._rows = [*(rows for rows in ROWS if rows < rows_max), min(rows_max, ROWS[-1])]
        self._widths = _widths(blocks_max)
        self._inputs = _Inputs(self._rows[-1], self._widths[-1], self._kv.device)
        self._chosen = torch.arange(self._rows[-1], device=self._kv.device)
        self._logits = torch.empty(self._rows[-1], model.config.vocab_size, device=self._kv.device)
        self._recordings: dict[tuple[int, int], Work] = {}

    def record_all(self, progress: Progress = SILENT) -> None:
        """Record every size, so that no step has to. To be called while the cache is empty: its first position is
        written."""
        sizes = [(rows, width) for rows in reversed(self._rows) for width in reversed(self._widths)]
        # The largest first: the others fit into its memory.
        for rows, width in progress.over(sizes, "recording step", len(sizes)):
            self._inputs.clear()
            self._recorded(rows, width)

    def run(self, batch: Batch) -> torch.Tensor:
        """Float32 logits [rows, vocab_size], in the order of `batch.rows`."""
        sequences = len(batch.context_lengths)
        if not batch.num_tokens() == sequences == len(batch.rows) <= self._rows[-1]:
            return self._plain.run(batch)
        rows = self._rows[bisect_left(self._rows, sequences)]
        width = self._widths[bisect_left(self._widths, batch.block_tables.shape[1])]
        with torch.inference_mode():
            for copy in batch.copies:
                self._kv[copy.target].copy_(self._kv[copy.source])
            self._inputs.fill(batch, rows, width)
            if batch.unread is not None:
                token_ids, _ = self._inputs.of(rows, width)
                batch.unread.put_into(token_ids)
                token_ids[sequences:] = token_ids[sequences - 1].clone()
            self._recorded(rows, width)()
            return self._logits[:sequences]

    def _recorded(self, rows: int, width: int) -> Work:
        """What it reads and writes lies where it lies as long as this runner lives."""
        recording = self._recordings.get((rows, width))
        if recording is None:
            token_ids, meta = self._inputs.of(rows, width)
            chosen, logits = self._chosen[:rows], self._logits[:rows]
            with torch.inference_mode():
                recording = self._record(
                    lambda: logits.copy_(self._model.forward(token_ids, self._kv, meta, chosen))
                )
            self._recordings[rows, width] = recording
        return recording


class _Inputs:
    """What recordings read, always in the same place, and as much host memory, from where it goes over in one copy.

    One run of bytes, for up to rows_max rows and tables of up to width_max blocks: token_ids and slots, int64;
    positions, context_lengths and query_starts, int32; then the tables, of as many rows and blocks as a recording has.
    Each begins at a multiple of ALIGNED bytes, as tensors of their own do: kernels are compiled for that.
    """

    def __init__(self, rows_max: int, width_max: int, device: torch.device) -> None:
        self._rows_max = -(-rows_max // (ALIGNED // 4)) * (ALIGNED // 4)
        self._tables_at = 4 * (2 * 2 * self._rows_max + 2 * self._rows_max + self._rows_max) + ALIGNED
        size = self._tables_at + 4 * self._rows_max * width_max
        # Two, since one may still be on its way to the device, for a step that has not begun, while the next is filled.
        self._host, self._other = (
            torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)
        )
        self._there = torch.zeros(size, dtype=torch.uint8, device=device)

    def of(self, rows: int, width: int) -> tuple[torch.Tensor, AttentionMeta]:
        """What a recording of this size reads."""
        return self._views(self._there, rows, width)

    def clear(self) -> None:
        """Rows that can be computed on any cache, and write no more than the first position of block 0."""
        self._host.zero_()
        _, meta = self._views(self._host, self._rows_max, 0)
        meta.context_lengths.fill_(1)
        torch.arange(self._rows_max + 1, out=meta.query_starts)
        self._there.copy_(self._host)

    def fill(self, batch: Batch, rows: int, width: int) -> None:
        """Of a batch of single tokens; its last row once more in every row that it has not."""
        self._host, self._other = self._other, self._host
        token_ids, meta = self._views(self._host, rows, width)
        _repeat(token_ids, batch.token_ids)
        _repeat(meta.slots, batch.slots)
        _repeat(meta.positions, batch.positions)
        _repeat(meta.context_lengths, batch.context_lengths)
        torch.arange(rows + 1, out=meta.query_starts)
        _repeat(meta.block_tables[:, : batch.block_tables.shape[1]], batch.block_tables)
        used = self._tables_at + 4 * rows * width
        self._there[:used].copy_(self._host[:used], non_blocking=True)

    def _views(self, memory: torch.Tensor, rows: int, width: int) -> tuple[torch.Tensor, AttentionMeta]:
        most, tables = self._rows_max, memory[self._tables_at :].view(torch.int32)
        int64s = memory[: 16 * most].view(torch.int64)
        int32s = memory[16 * most : self._tables_at].view(torch.int32)
        meta = AttentionMeta(
            slots=int64s[most : most + rows],
            positions=int32s[:rows],
            context_lengths=int32s[most : most + rows],
            query_starts=int32s[2 * most : 2 * most + rows + 1],
            block_tables=tables[: rows * width].view(rows, width),
        )
        return int64s[:rows], meta


def _repeat(target: torch.Tensor, rows: Int32s | Int64s) -> None:
    target[: len(rows)] = torch.from_numpy(rows)
    target[len(rows) :] = target[len(rows) - 1].clone()


def _widths(blocks_max: int) -> list[int]:
    """Powers of two up to one that is enough."""
    widths = [16]
    while widths[-1] < blocks_max:
        widths.append(2 * widths[-1])
    return widths
