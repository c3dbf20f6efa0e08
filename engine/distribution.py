"""What may be sampled from one row of logits, and how much each token weighs.

Called by the sampler, a row at a time. All arithmetic on weights is float64 and in an order that the row's
own length fixes, so nothing outside the row can change a bit of the result. Never makes a random number.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.sequence import SamplingParams

Logits: TypeAlias = NDArray[np.float32]
Weights: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]

_RUN = 256
"""Tokens summed at once by `draw`: a running sum over the whole vocabulary would cost ten times as much."""

_NUCLEUS_SHARES = (1 / 512, 1 / 4096, 1 / 32768, 0.0)
"""For top_p only tokens that have this share of all weight are sorted, of which there cannot be more than 512; the next
share where these do not hold enough."""


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """What can be sampled.

    weights: float64 [c], not negative, not normalised, some above 0. ids: ascending token ids, int64 [c], or
    None where the weights cover the whole vocabulary.
    """

    weights: Weights
    ids: Indices | None = None

    def draw(self, uniform: float) -> int:
        """Inverse of the cumulative distribution in token-id order, at `uniform` in (0, 1).

        A token without weight is never drawn.
        """
        runs = np.add.reduceat(self.weights, np.arange(0, len(self.weights), _RUN)).cumsum()
        target = uniform * float(runs[-1])
        run = int(np.searchsorted(runs, target, side="right"))
        weights = self.weights[run * _RUN : (run + 1) * _RUN]
        reached = weights.cumsum() + (runs[run - 1] if run else 0.0)
        # The run's sum and its running sum may round apart at the very end: stay on a token that has weight.
        last = int(np.flatnonzero(weights)[-1])
        return self._token(run * _RUN + min(int(np.searchsorted(reached, target, side="right")), last))

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
    weights = _weights(logits if kept is None else logits[kept], params.temperature)
    distribution = Distribution(weights, kept)
    if params.top_p < 1.0:
        distribution = _keep(distribution, _nucleus(distribution.weights, params.top_p))
    if params.min_p > 0.0:
        # The heaviest token weighs exactly 1.
        distribution = _keep(distribution, np.flatnonzero(distribution.weights >= params.min_p))
    return distribution


def largest(values: Logits | Weights, count: int) -> Indices:
    """Ascending indices of the `count` largest values, the lower index first among equals. No full sort."""
    return _down_to(values, np.partition(values, len(values) - count)[len(values) - count], count)


def descending(values: Logits | Weights, indices: Indices) -> Indices:
    """Ascending `indices` put in order of falling value; equals stay in order of index."""
    return indices[np.argsort(-values[indices], kind="stable")]


def log_total(logits: Logits) -> float:
    """Natural logarithm of the sum of exp(logits), so that logit - log_total is the model's own logprob."""
    top = logits.max()
    return float(top) + float(np.log(np.exp(np.subtract(logits, top, dtype=np.float64)).sum()))


def logprobs_of(logits: Logits, token: int, alternatives: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The model's own logprob of one token, and (token id, logprob) of the likeliest ones, the likeliest first, lower
    ids first among equals. alternatives: how many of these; a vocabulary's worth at most."""
    total, count = log_total(logits), min(alternatives, len(logits))
    best = descending(logits, largest(logits, count)) if count else ()
    return float(logits[token]) - total, tuple((int(id_), float(logits[id_]) - total) for id_ in best)


def _weights(logits: Logits, temperature: float) -> Weights:
    scores: Weights = np.subtract(logits, logits.max(), dtype=np.float64)
    with np.errstate(over="ignore", under="ignore"):
        if temperature != 1.0:
            scores /= temperature
        weights: Weights = np.exp(scores, out=scores)
    return weights


def _nucleus(weights: Weights, top_p: float) -> Indices:
    """Ascending indices of the fewest heaviest tokens that hold top_p of all weight."""
    total = float(weights.sum())
    wanted = top_p * total
    for share in _NUCLEUS_SHARES:
        heavy = np.flatnonzero(weights >= share * total)
        values = weights[heavy]
        heaviest = np.sort(values)[::-1]
        reached = heaviest.cumsum()
        if share == 0.0 or (len(heavy) and reached[-1] >= wanted):
            # Rounding may leave the sum of all just short of what is wanted: then all stay.
            kept = min(int(np.searchsorted(reached, wanted)) + 1, len(heavy))
            return heavy[_down_to(values, heaviest[kept - 1], kept)]
    raise AssertionError("the last share takes all")


def _down_to(values: Logits | Weights, border: np.floating, count: int) -> Indices:
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
