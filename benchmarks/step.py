"""What a decode step costs, and how much of it outside the kernels: the built-in model, one token for each sequence.

For each number of sequences one line: the runner's step, what its native call takes of it, and what is left (Python:
laying out the batch, checks, the logits' memory). Then what the native call is made of, as far as that shows when its
kernels are called one at a time: products, attention, and the rest (norms, rotary embedding, gates, writes to the
cache). Each is the fastest of several.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from engine.batch import Batch, Shape, lay_out
from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from engine.collective import ALONE, Collective
from engine.kernels.backend import Decoder, DecoderWeights
from engine.kernels.composed import ComposedDecoder
from engine.kernels.cpu.backend import CpuBackend
from engine.kernels.cpu.build import COMPILERS, built, default_cache_folder, host_flags
from engine.kernels.cpu.crew import Crew
from engine.kernels.cpu.library import Library
from engine.kernels.cpu.operations import CpuOperations
from engine.kernels.cpu.structures import Batch as NativeBatch
from engine.kernels.cpu.structures import Decoder as NativeDecoder
from engine.model.load import load_model
from engine.model.transformer import Quantization, Transformer
from engine.runner import TransformerRunner
from service.model_source import resolve_model

BLOCK_SIZE = 16


class TimedLibrary(Library):
    """Knows what the last native step took."""

    native_s = 0.0

    def decoder_forward(self, thread_pool: int, decoder: NativeDecoder, batch: NativeBatch) -> None:
        start = time.perf_counter()
        super().decoder_forward(thread_pool, decoder, batch)
        self.native_s = time.perf_counter() - start


class TimedOperations:
    """Adds up what each operation takes, in seconds."""

    def __init__(self, operations: CpuOperations) -> None:
        self.taken: defaultdict[str, float] = defaultdict(float)
        self._operations = operations

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._operations, name)

        def timed(*arguments: object) -> object:
            start = time.perf_counter()
            result = operation(*arguments)
            self.taken[name] += time.perf_counter() - start
            return result

        return timed


class OneAtATime(CpuOperations):
    """A backend whose decoders call one kernel after another."""

    timed: TimedOperations

    def decoder(self, weights: DecoderWeights, collective: Collective = ALONE) -> Decoder:
        self.timed = TimedOperations(self)
        return ComposedDecoder(weights, self.timed, collective)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--quantization", type=Quantization, default=Quantization.STORED)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    library = TimedLibrary(built(default_cache_folder(), COMPILERS, host_flags()))
    crew = Crew(library, arguments.threads)
    native, single = CpuBackend(torch.bfloat16, crew), OneAtATime(torch.bfloat16, crew)
    path = resolve_model("smollm2-135m-instruct")
    models = [load_model(path, each, arguments.context, arguments.quantization) for each in (native, single)]
    print(
        f"{'rows':>5} {'step ms':>8} {'native':>8} {'outside us':>11} {'products':>9} {'attention':>9} {'rest':>6}"
    )
    for rows in arguments.rows:
        batch, runners = prepared(models, rows, arguments.context)
        step_s, native_s, outside_s = measure(runners[0], batch, library, arguments.repeats)
        products_s, attention_s, rest_s = measure_parts(runners[1], batch, single, arguments.repeats)
        print(
            f"{rows:>5} {step_s * 1e3:>8.2f} {native_s * 1e3:>8.2f} {outside_s * 1e6:>11.0f} "
            f"{products_s * 1e3:>9.2f} {attention_s * 1e3:>9.2f} {rest_s * 1e3:>6.2f}",
            flush=True,
        )


def prepared(models: list[Transformer], rows: int, context: int) -> tuple[Batch, list[TransformerRunner]]:
    """The last token of `rows` sequences, and runners over one cache with scattered blocks."""
    config = models[0].config
    layout = KVLayout(
        model_digest="",
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
    )
    each = layout.blocks_for(context)
    cache = KVCache(layout, rows * each)
    cache.tensor.fill_(0.01)
    batch = lay_out(
        Shape(np.ones(rows, np.int32), np.ones(rows, np.bool_)),
        token_ids=[7] * rows,
        firsts=np.full(rows, context - 1, np.int32),
        block_tables=np.random.default_rng(0).permutation(rows * each).reshape(rows, each).astype(np.int32),
        block_size=BLOCK_SIZE,
    )
    return batch, [TransformerRunner(model, cache) for model in models]


def measure(
    runner: TransformerRunner, batch: Batch, library: TimedLibrary, repeats: int
) -> tuple[float, float, float]:
    """Seconds of a step, of its native call, and of what is left."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        runner.run(batch)
        step_s = time.perf_counter() - start
        taken.append((step_s, library.native_s, step_s - library.native_s))
    steps, natives, outsides = zip(*taken[1:], strict=True)
    return min(steps), min(natives), min(outsides)


def measure_parts(
    runner: TransformerRunner, batch: Batch, backend: OneAtATime, repeats: int
) -> tuple[float, float, float]:
    """Seconds of products, attention, and all other operations of a step."""
    parts = []
    for _ in range(repeats):
        backend.timed.taken.clear()
        runner.run(batch)
        taken = backend.timed.taken
        products_s, attention_s = taken["linear"], taken["attention"]
        parts.append((products_s, attention_s, sum(taken.values()) - products_s - attention_s))
    products, attentions, rests = zip(*parts[1:], strict=True)
    return min(products), min(attentions), min(rests)


if __name__ == "__main__":
    main()
