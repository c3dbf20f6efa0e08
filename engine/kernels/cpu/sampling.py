"""Tokens drawn by compiled kernels, many rows in one call: what `engine.distribution` defines, to the bit.

Owns how rows go to C. One caller at a time, on the step thread; the calls release the GIL.
"""

from collections.abc import Sequence

import numpy as np

from engine.distribution import Likeliest, Logits, log_total
from engine.kernels.cpu.crew import Crew
from engine.kernels.cpu.library import RowsOfLogits
from engine.sequence import SamplingParams


class CpuSampling:
    """See engine.distribution.SamplingKernels. Rows go through the same memory each time, and parameters that are the
    very ones of the last call are not packed again."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._params: tuple[SamplingParams, ...] = ()
        self._packed = b""
        self._places, self._tokens = np.empty(0, np.uint64), np.empty(0, np.int64)
        self._addresses = (0, 0)

    def draw(self, logits: Logits, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
        assert len(params) == len(positions) == len(logits), (len(params), len(positions), logits.shape)
        count = len(logits)
        if count > len(self._tokens):
            self._places, self._tokens = np.empty(count, np.uint64), np.empty(count, np.int64)
            self._addresses = (self._places.ctypes.data, self._tokens.ctypes.data)
        self._places[:count] = positions
        self._crew.library.draw(self._crew.handle, _rows(logits), self._packed_of(params), *self._addresses)
        tokens: list[int] = self._tokens[:count].tolist()
        return tokens

    def describe(self, logits: Logits, counts: Sequence[int]) -> list[Likeliest]:
        assert len(counts) == len(logits), (len(counts), logits.shape)
        assert all(0 <= count <= logits.shape[1] for count in counts), (counts, logits.shape)
        wanted, totals = np.array(counts, np.int64), np.empty(len(logits), np.int64)
        ids = np.empty((len(logits), max(counts, default=0)), np.int64)
        addresses = (wanted.ctypes.data, ids.shape[1], totals.ctypes.data, ids.ctypes.data)
        self._crew.library.describe(self._crew.handle, _rows(logits), *addresses)
        tops = logits.max(axis=1).tolist()
        return [
            Likeliest(log_total(total, top), tuple(best[:count]))
            for total, top, best, count in zip(totals.tolist(), tops, ids.tolist(), counts, strict=True)
        ]

    def _packed_of(self, params: Sequence[SamplingParams]) -> bytes:
        if params is not self._params:
            packed = b"".join([each.packed for each in params])
            if not isinstance(params, tuple):
                return packed
            self._params, self._packed = params, packed
        return self._packed


def _rows(logits: Logits) -> RowsOfLogits:
    rows, vocab = logits.shape
    assert logits.dtype == np.float32 and logits.strides[1] == logits.itemsize, (logits.dtype, logits.strides)
    return RowsOfLogits(logits.ctypes.data, logits.strides[0] // logits.itemsize, rows, vocab)
