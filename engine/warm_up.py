"""What a worker is going to do, done once before anybody waits: on a GPU kernels are compiled at their first use,
and everywhere memory is taken then.

Called while an engine is assembled. Leaves nothing behind but bytes in blocks, which nobody owns yet.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.batch import Batch, ModelRunner, Shape, lay_out
from engine.cache.copying import nothing
from engine.cache.kv_cache import KVCache
from engine.sampling import Sampler
from engine.sequence import SamplingParams

_PARAMS = (SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, top_k=50, logprobs=0))


class _Run(NamedTuple):
    """So many tokens of a sequence, from position `first` on. Its blocks are those from `block` on."""

    block: int
    first: int
    tokens: int

    def blocks(self, block_size: int) -> list[int]:
        return list(range(self.block, self.block - (-(self.first + self.tokens) // block_size)))


def warm_up(
    runner: ModelRunner, sampler: Sampler, cache: KVCache, *, tokens_max: int, step_tokens: int
) -> None:
    """A step of so many tokens, of as few prompts as it can have; a prompt and a single token beside it; that token
    alone; each way to draw one; a block to host memory and back. tokens_max: of a sequence."""
    size = cache.layout.block_size
    prompts = _prompts(min(step_tokens, cache.num_blocks * size), tokens_max, size)
    single = _Run(block=0, first=prompts[0].tokens - 1, tokens=1)
    last = cache.num_blocks - 1
    beside = [_Run(block=last, first=0, tokens=min(size, tokens_max))] if last > single.first // size else []
    for runs in (prompts, [single, *beside], [single]):
        logits = runner.run(_batch(runs, size))[:1]
        for params in _PARAMS:
            sampler.sample(logits, [params], [single.first + 1])
    cache.to_host([0], nothing, nothing)
    cache.from_host([0], nothing)


def _prompts(tokens: int, tokens_max: int, block_size: int) -> list[_Run]:
    """So many tokens, of sequences that begin with a block and are as long as they may be."""
    apart = max(1, tokens_max // block_size) * block_size
    return [
        _Run(block=first // block_size, first=0, tokens=min(apart, tokens_max, tokens - first))
        for first in range(0, tokens, apart)
    ]


def _batch(runs: Sequence[_Run], block_size: int) -> Batch:
    counts = np.array([run.tokens for run in runs], np.int32)
    tables = [run.blocks(block_size) for run in runs]
    widest = max(map(len, tables))
    return lay_out(
        Shape(counts, np.ones(len(runs), np.bool_)),
        token_ids=[0] * int(counts.sum()),
        firsts=np.array([run.first for run in runs], np.int32),
        block_tables=np.array([[*table, *[-1] * (widest - len(table))] for table in tables], np.int32),
        block_size=block_size,
    )
