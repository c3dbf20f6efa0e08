"""What may be sampled from rows of logits, how much each token weighs, and which one is drawn: the definition.

Called by the sampler. Weights are integers, made of a row by additions and multiplications alone, so that sums do not
depend on their order and every machine makes the same ones. `PlainSampling` says here what a token is; compiled kernels
(`engine/kernels/cpu/sampling.cpp`) give the very same tokens. Nothing outside a row can change a bit of its result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.noise import NOISE_BITS, noise
from engine.sequence import SamplingParams

Logits: TypeAlias = NDArray[np.float32]
Weights: TypeAlias = NDArray[np.int64]
Indices: TypeAlias = NDArray[np.int64]

WEIGHT_BITS = 42
"""The likeliest token weighs 2 to this power, and what would weigh less than a half weighs nothing."""

VOCAB_MAX = 1 << 21
"""Tokens whose weights can be summed up in 63 bits."""

BROKEN = -1
"""In the place of a token: the row holds a NaN or +inf, or nothing but -inf."""

_FAINTEST = -64.0
LOG2_E = 1.4426950408889634
_POWER_OF_2 = (
    7.070977866508138e-09,
    1.0205905413765595e-07,
    1.3215451633221434e-06,
    1.5252672924850737e-05,
    0.00015403530424776529,
    0.0013333558200794592,
    0.009618129107618665,
    0.05550410866465167,
    0.24022650695910075,
    0.6931471805599462,
    1.0,
)
"""Of 2^x for |x| <= 1/2, the highest power first: fitted at Chebyshev nodes, wrong by 2^-50 at most."""

_NUCLEUS_SHARES = (512, 32768)
"""For top_p only tokens that have such a share of all weight are sorted, of which there cannot be more; the next share
where these do not hold enough, and then all."""


class Likeliest(NamedTuple):
    """Of a row. log_total: natural logarithm of the sum of exp(logits), so that logit - log_total is the model's own
    logprob. ids: the likeliest tokens, the likeliest first, lower ids first among equals."""

    log_total: float
    ids: tuple[int, ...]


class SamplingKernels(Protocol):
    """What a sampler asks for all rows at once. logits: float32 [n, vocab], each row contiguous, fewer than VOCAB_MAX
    tokens. One caller at a time."""

    def draw(self, logits: Logits, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
        """A token of each row; the likeliest where the temperature is 0, the lowest id among equals. BROKEN where there
        is none."""
        ...

    def describe(self, logits: Logits, counts: Sequence[int]) -> list[Likeliest]:
        """Of rows that are not broken. counts: how many ids are wanted, in [0, vocab]."""
        ...


class PlainSampling:
    """In numpy, a row at a time. See SamplingKernels."""

    def draw(self, logits: Logits, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
        return [_draw(*each) for each in zip(logits, params, positions, strict=True)]

    def describe(self, logits: Logits, counts: Sequence[int]) -> list[Likeliest]:
        return [_describe(row, count) for row, count in zip(logits, counts, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """What can be sampled.

    weights: int64 [c], not negative, some above 0. ids: ascending token ids, int64 [c], or None where the weights cover
    the whole vocabulary.
    """

    weights: Weights
    ids: Indices | None = None

    def draw(self, noise: int) -> int:
        """Inverse of the cumulative distribution in token-id order; noise: in 2^-NOISE_BITS, inside (0, 1).

        A token without weight is never drawn.
        """
        reached = self.weights.cumsum()
        target = noise * int(reached[-1]) >> NOISE_BITS
        return self._token(int(np.searchsorted(reached, target, side="right")))

    def support(self) -> frozenset[int]:
        """Ids of all tokens that can be drawn."""
        return frozenset(self._token(int(index)) for index in np.flatnonzero(self.weights))

    def _token(self, index: int) -> int:
        return index if self.ids is None else int(self.ids[index])


def filtered(logits: Logits, params: SamplingParams) -> Distribution:
    """Apply temperature, top_k, top_p and min_p, in this order, to logits [vocab] whose maximum is finite.

    The order and the meaning are those of Hugging Face's logits processors, but for ties: where tokens of
    equal weight stand at the border of top_k or top_p, only as many as are needed stay, the lower ids first.
    A top_k of at least the vocabulary is off. Temperature must be above 0.
    """
    kept = largest(logits, params.top_k) if 0 < params.top_k < len(logits) else None
    distribution = Distribution(
        weights_of(logits if kept is None else logits[kept], params.temperature), kept
    )
    if params.top_p < 1.0:
        distribution = _keep(distribution, _nucleus(distribution.weights, params.top_p))
    if params.min_p > 0.0:
        least = ceil(params.min_p * 2.0**WEIGHT_BITS)
        distribution = _keep(distribution, np.flatnonzero(distribution.weights >= least))
    return distribution


def weights_of(logits: Logits, temperature: float) -> Weights:
    """int64, in proportion to exp(logit / temperature), to the nearest integer. The maximum of the logits is finite."""
    powers = np.subtract(logits, logits.max(), dtype=np.float64)
    with np.errstate(over="ignore"):
        powers *= min(LOG2_E / temperature, 1e300)
    np.maximum(powers, _FAINTEST, out=powers)
    whole = np.rint(powers)
    powers -= whole
    raised = np.full_like(powers, _POWER_OF_2[0])
    for factor in _POWER_OF_2[1:]:
        raised *= powers
        raised += factor
    weights: Weights = np.rint(np.ldexp(raised, whole.astype(np.int32) + WEIGHT_BITS)).astype(np.int64)
    return weights


def largest(values: Logits | Weights, count: int) -> Indices:
    """Ascending indices of the `count` largest values, the lower index first among equals. No full sort."""
    return _down_to(values, np.partition(values, len(values) - count)[len(values) - count], count)


def log_total(total: int, top: float) -> float:
    """See Likeliest. total: of all weights at temperature 1; top: the largest logit."""
    return top + log(total / 2**WEIGHT_BITS)


def logprobs_of(
    logits: Logits, token: int, likeliest: Likeliest
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Of a row that was described so: the model's logprob of one token, and (token id, logprob) of the likeliest."""
    total = likeliest.log_total
    return float(logits[token]) - total, tuple([(id_, float(logits[id_]) - total) for id_ in likeliest.ids])


def _draw(logits: Logits, params: SamplingParams, position: int) -> int:
    likeliest = int(logits.argmax())
    if not np.isfinite(logits[likeliest]):
        return BROKEN
    if params.temperature == 0.0:
        return likeliest
    return filtered(logits, params).draw(noise(params.seed, position))


def _describe(logits: Logits, count: int) -> Likeliest:
    total = log_total(int(weights_of(logits, 1.0).sum()), float(logits.max()))
    if count == 0:
        return Likeliest(total, ())
    best = largest(logits, count)
    return Likeliest(total, tuple(best[np.argsort(-logits[best], kind="stable")].tolist()))


def _nucleus(weights: Weights, top_p: float) -> Indices:
    """Ascending indices of the fewest heaviest tokens that hold top_p of all weight."""
    total = int(weights.sum())
    wanted = min(total, ceil(top_p * float(total)))
    for least in (*(max(1, total // share) for share in _NUCLEUS_SHARES), 0):
        heavy = np.flatnonzero(weights >= least)
        values = weights[heavy]
        heaviest = np.sort(values)[::-1]
        reached = heaviest.cumsum()
        if len(heavy) and reached[-1] >= wanted:
            kept = int(np.searchsorted(reached, wanted)) + 1
            return heavy[_down_to(values, heaviest[kept - 1], kept)]
    raise AssertionError("all together hold what is wanted")


def _down_to(values: Logits | Weights, border: np.floating | np.integer, count: int) -> Indices:
    """Ascending indices of `count` values from the largest down to `border`, which is the least of them."""
    found = np.flatnonzero(values >= border)
    surplus = len(found) - count
    if surplus == 0:
        return found
    ties = np.flatnonzero(values[found] == border)
    return np.delete(found, ties[len(ties) - surplus :])


def _keep(distribution: Distribution, indices: Indices) -> Distribution:
    ids = indices if distribution.ids is None else distribution.ids[indices]
    return Distribution(distribution.weights[indices], ids)
