"""What a worker is going to do, done once before anybody waits: on a GPU kernels are compiled at their first use,
and everywhere memory is taken then.

Called while an engine is assembled. Leaves nothing behind but bytes in block 0, which nobody owns yet.
"""

import numpy as np

from engine.batch import Batch, ModelRunner, Shape, lay_out
from engine.cache.kv_cache import KVCache
from engine.sampling import Sampler
from engine.sequence import SamplingParams

_PARAMS = (SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, top_k=50, logprobs=0))


def warm_up(runner: ModelRunner, sampler: Sampler, cache: KVCache, *, tokens_max: int) -> None:
    """A prompt, a single token, each way to draw one, a block to host memory and back. tokens_max: of a sequence."""
    size = cache.layout.block_size
    tokens = min(size, tokens_max)
    for first, count in ((0, tokens), (tokens - 1, 1)):
        logits = runner.run(_batch(first, count, size))
        for params in _PARAMS:
            sampler.sample(logits, [params], [first + count])
    cache.to_host([0])
    cache.from_host([0])


def _batch(first: int, count: int, block_size: int) -> Batch:
    """So many tokens from a position on, in block 0."""
    return lay_out(
        Shape(np.array([count], np.int32), np.array([True])),
        token_ids=[0] * count,
        firsts=np.array([first], np.int32),
        block_tables=np.zeros((1, 1), np.int32),
        block_size=block_size,
    )
