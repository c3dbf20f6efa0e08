"""Whole steps as a decode worker takes them, recorded and begun ahead, against steps one at a time: equal to the bit.

The sizes that a worker records are all tried. Needs torch, triton and numpy alone. In Triton's interpreter nothing is
recorded: there what a recording reads and writes is checked, and steps ahead are those of a device that is never late.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.gpu_decoder import EPS, Sizes, random_decoder
from benchmarks.gpu_place import Check, Place
from benchmarks.gpu_sampling_checks import WISHES
from decode_worker.policy import DecodePolicy
from engine.batch import Batch, ModelRunner, Shape, lay_out
from engine.cache.block_pool import BlockPool
from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from engine.cache.staged_cache import StagedKVCache
from engine.core import EngineCore
from engine.device_sampler import DeviceSampler
from engine.distribution import PlainSampling
from engine.kernels.backend import AttentionMeta, Decoder, dtype_name
from engine.kernels.triton.backend import TritonBackend
from engine.kernels.triton.copy_lane import CudaCopyLane
from engine.kernels.triton.graphs import CudaGraphs
from engine.kernels.triton.sampling import draw, settle
from engine.model.architecture import Architecture, ModelConfig
from engine.recorded_runner import ROWS, RecordedRunner, Recorder, Work
from engine.runner import TransformerRunner
from engine.sequence import Sequence as Answer
from engine.sequence import StopRules

LARGE = Sizes(hidden=512, heads=8, kv_heads=2, dim=64, ffn=1024, vocab=8192, layers=2)
SMALL = Sizes(hidden=32, heads=1, kv_heads=1, dim=16, ffn=32, vocab=64, layers=1)
BLOCK_SIZE = 16


def step_checks(place: Place) -> Iterator[Check]:
    for bits, dtype in ((None, torch.bfloat16), (4, torch.int8)) if place.large else ((None, torch.float32),):
        name = f"{'floats' if bits is None else f'int{bits}'}, {dtype_name(dtype)} cache"
        made = partial(_Parts, place, bits, dtype)
        yield Check(name=f"recorded steps of all sizes: {name}", run=partial(_recordings_differ, made))
        yield Check(name=f"steps begun ahead, recorded: {name}", run=partial(_answers_differ, made))


@dataclass(frozen=True)
class _Model:
    """See engine.runner.Model."""

    config: ModelConfig
    decoder: Decoder

    def forward(
        self, token_ids: torch.Tensor, kv: torch.Tensor, meta: AttentionMeta, rows: torch.Tensor
    ) -> torch.Tensor:
        return self.decoder.forward(token_ids, kv, meta, rows)


class _Parts:
    """Of an engine: one model, and as many caches as are asked for."""

    def __init__(self, place: Place, bits: int | None, kv_dtype: torch.dtype) -> None:
        sizes = LARGE if place.large else SMALL
        dtype = torch.bfloat16 if place.large else torch.float32
        backend = TritonBackend(dtype, place.device)
        config = _config(sizes)
        self.model = _Model(config, random_decoder(sizes, backend, bits, torch.device("cpu")))
        self.rows_max = ROWS[-1] if place.large else 4
        self.blocks_each = 32 if place.large else 1
        self._device = place.device
        self._layout = KVLayout(
            model_digest="",
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            block_size=BLOCK_SIZE,
            dtype=kv_dtype,
        )

    def blocks(self) -> int:
        """One that recordings write before anything is computed, and those of as many sequences as a check has."""
        return 1 + (self.rows_max + 1) * self.blocks_each

    def plain(self) -> tuple[TransformerRunner, KVCache]:
        cache = self._cache()
        return TransformerRunner(self.model, cache), cache

    def recorded(self) -> tuple[RecordedRunner, KVCache]:
        cache = self._cache()
        recorder: Recorder = CudaGraphs() if self._device.type == "cuda" else _done_again
        limits = {"rows_max": self.rows_max, "blocks_max": self.blocks_each}
        runner = RecordedRunner(self.model, cache, recorder, **limits)
        if self._device.type == "cuda":
            runner.record_all()
        return runner, cache

    def _cache(self) -> KVCache:
        if self._device.type == "cpu":
            return KVCache(self._layout, self.blocks())
        return StagedKVCache(self._layout, self.blocks(), CudaCopyLane(self._device))


def _config(sizes: Sizes) -> ModelConfig:
    return ModelConfig(
        architecture=Architecture.LLAMA,
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        layers=sizes.layers,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.dim,
        intermediate_size=sizes.ffn,
        rms_norm_eps=EPS,
        rope_theta=1e4,
        rope_scaling=None,
        max_position=8192,
        windows=(None,) * sizes.layers,
        tie_word_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        eos_token_ids=(),
        bos_token_id=None,
    )


def _done_again(work: Work) -> Work:
    """See engine.recorded_runner.Recorder."""
    work()
    return work


def _recordings_differ(made: "partial[_Parts]") -> float:
    """Every number of rows that is recorded, and one fewer, which is filled up; with and without a long sequence, whose
    tables are wider. Logits, and what is written."""
    parts = made()
    (recorded, cache), (plain, plain_cache) = parts.recorded(), parts.plain()
    sequences = [_Known(number, parts) for number in range(parts.rows_max + 1)]
    for runner in (recorded, plain):
        runner.run(_batch([one.prompt() for one in sequences]))
    sizes = sorted({max(1, rows - fewer) for rows in ROWS if rows <= parts.rows_max for fewer in (0, 1)})
    for size in sizes:
        for first in (0, 1) if parts.blocks_each > 1 else (0,):
            step = _batch([one.next_token(size) for one in sequences[first : first + size]])
            if not torch.equal(recorded.run(step), plain.run(step)):
                return math.inf
    return 0.0 if torch.equal(cache.tensor[1:].cpu(), plain_cache.tensor[1:].cpu()) else math.inf


def _answers_differ(made: "partial[_Parts]") -> float:
    """Answers of as many lengths as there are sequences, so that steps have every number of rows; drawn in all ways."""
    parts = made()
    (wanted, none), (got, unread) = (_answers(parts, ahead=ahead) for ahead in (False, True))
    return 0.0 if got == wanted and none == 0 < unread else math.inf


def _answers(parts: _Parts, *, ahead: bool) -> tuple[dict[str, list[object]], int]:
    """(tokens and logprobs of each answer, how many steps were begun before the last one's were read)."""
    runner: ModelRunner
    runner, _ = parts.recorded() if ahead else parts.plain()
    core = EngineCore(
        pool=BlockPool(parts.blocks()),
        block_size=BLOCK_SIZE,
        runner=runner,
        sampler=DeviceSampler(PlainSampling(), draw, settle),
        policy=DecodePolicy(budget_tokens=512, seats=parts.rows_max),
        ahead=ahead,
    )
    for number in range(parts.rows_max):
        core.submit(_answer(number, parts.model.config.vocab_size))
    answers: dict[str, list[object]] = {}
    unread = 0
    while not core.idle():
        result = core.step(0.0)
        unread += result.unread
        for output in result.outputs:
            answers.setdefault(output.sequence.id[0], []).append(output.sampled)
    return answers, unread


def _answer(number: int, vocab: int) -> Answer:
    tokens = [(7 * number + 3 * place) % vocab for place in range(1 + number % 19)]
    return Answer(
        id=(str(number), 1, 0),
        tokens=tokens,
        sampling=WISHES[number % len(WISHES)],
        stop=StopRules(length_limit=len(tokens) + 1 + number),
        arrived=float(number),
    )


@dataclass(frozen=True)
class _Run:
    """Tokens of a sequence from a position on, and the blocks that it has by then."""

    tokens: Sequence[int]
    first: int
    blocks: Sequence[int]


class _Known:
    """A sequence by its number. The first is longer than the narrowest recorded tables, where there is room."""

    def __init__(self, number: int, parts: _Parts) -> None:
        self._vocab, self._number = parts.model.config.vocab_size, number
        first = 1 + number * parts.blocks_each
        self._blocks = range(first, first + parts.blocks_each)
        self._length = parts.blocks_each * BLOCK_SIZE - 12 if number == 0 else 1 + number % 19

    def prompt(self) -> _Run:
        return self._run([(5 * self._number + place) % self._vocab for place in range(self._length)], 0)

    def next_token(self, salt: int) -> _Run:
        return self._run([(31 * salt + self._number) % self._vocab], self._length)

    def _run(self, tokens: Sequence[int], first: int) -> _Run:
        return _Run(tokens, first, self._blocks[: -(-(first + len(tokens)) // BLOCK_SIZE)])


def _batch(runs: Sequence[_Run]) -> Batch:
    widest = max(len(run.blocks) for run in runs)
    counts = np.array([len(run.tokens) for run in runs], np.int32)
    return lay_out(
        Shape(counts, np.ones(len(runs), np.bool_)),
        token_ids=[token for run in runs for token in run.tokens],
        firsts=np.array([run.first for run in runs], np.int32),
        block_tables=np.array([[*run.blocks, *[-1] * (widest - len(run.blocks))] for run in runs], np.int32),
        block_size=BLOCK_SIZE,
    )
