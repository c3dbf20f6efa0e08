"""What a check of the GPU kernels is, where it runs, and how far results are apart. Needs torch alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.kernels.backend import CODE_MAX

ROW_BOUND = 4e-6
"""Relative; of norms, gates and rotations."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """run: the worst error as a share of what is allowed; over 1, or NaN, is a fault."""

    name: str
    run: Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where checks run. large: on the shapes of models. dtypes: of weights, and of caches besides bytes."""

    device: torch.device
    large: bool
    dtypes: tuple[torch.dtype, ...]

    def cache_dtypes(self) -> tuple[torch.dtype, ...]:
        return (*self.dtypes, *CODE_MAX)

    def random(self, *shape: int, seed: int = 0) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.device)


def worst(got: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor | float) -> float:
    """The largest error as a share of what is allowed; NaN where a result is not finite."""
    if got.shape != exact.shape or not got.isfinite().all():
        return math.nan
    return float(((got.double() - exact).abs() / allowed).max())


def differ(first: torch.Tensor, second: torch.Tensor) -> float:
    return 0.0 if torch.equal(first, second) else math.inf
