"""Tokens drawn on the GPU: those that numpy draws on the host, to the bit. Needs torch, triton and numpy alone."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu_place import Check, Place
from engine.device_sampler import DeviceSampler
from engine.distribution import PlainSampling
from engine.kernels.triton.sampling import draw, settle
from engine.sampling import Sampler
from engine.sequence import SamplingParams

WISHES = (
    SamplingParams(logprobs=0),
    SamplingParams(temperature=0.8, seed=-1, logprobs=0),
    SamplingParams(temperature=0.7, seed=2, top_p=0.9),
    SamplingParams(temperature=2.0, seed=1 << 40, top_k=40),
    SamplingParams(temperature=1.0, seed=4, top_k=600, top_p=0.95, min_p=1e-4),
    SamplingParams(temperature=1.3, seed=5, min_p=0.02),
    SamplingParams(temperature=1e-6, seed=6, top_p=0.5),
)
SHAPES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: 3 * x,
    torch.round,
    lambda x: 1e-4 * x,
    lambda x: torch.where(x > 1.5, x, -torch.inf),
)
"""Of logits: spread, with many equals, all alike, mostly impossible."""


def sampling_checks(place: Place) -> Iterator[Check]:
    yield Check(name="tokens drawn, and their logprobs", run=partial(_tokens_differ, place))


def _tokens_differ(place: Place) -> float:
    """Wishes and shapes of logits meet, on a GPU in all ways and many times."""
    vocab, count = (128_256, 140) if place.large else (1100, 14)
    random = place.random(count, vocab)
    logits = torch.stack([SHAPES[turn % len(SHAPES)](row) for turn, row in enumerate(random)])
    wishes = [WISHES[turn % len(WISHES)] for turn in range(count)]
    got = DeviceSampler(PlainSampling(), draw, settle).sample(logits, wishes, range(count))
    return 0.0 if got == Sampler().sample(logits, wishes, range(count)) else math.inf
