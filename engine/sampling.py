"""From logits to tokens.

The sampler has no state: a token is a function of its own row of logits, its parameters and (seed,
position). Called by the core once per step. Never mixes the rows of a call, never counts calls, and knows no
sequence: stop rules and penalties are folds over the known tokens, done by its callers. Logits are adjusted first, then
tokens are banned, then come temperature and truncation.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.adjustments import Adjustments
from engine.constraint import TokenMask, admits
from engine.distribution import Logits, descending, filtered, largest, log_total, logprobs_of
from engine.errors import NonFiniteLogits
from engine.noise import uniform
from engine.sequence import SamplingParams


class SampleRow(NamedTuple):
    """How to sample one row.

    position: absolute position of the token to be sampled, from 0. banned: token ids that may not be sampled
    here, such as stop tokens before the minimum length; some other token must be left. adjustments: biases and
    penalties, None for none. allowed: the only tokens that may be sampled, at least one; where all of these are banned,
    the ban gives way. None for no such rule.
    """

    params: SamplingParams
    position: int
    banned: frozenset[int] = frozenset()
    adjustments: Adjustments | None = None
    allowed: TokenMask | None = None


class Candidate(NamedTuple):
    """A token that may come next. score: its logprob with biases and penalties in it, which are added to logprobs as
    they are to logits; nothing is normalised again. logprob: the model's own."""

    token: int
    score: float
    logprob: float


class Sampled(NamedTuple):
    """A token.

    Logprobs are natural logarithms under the model's own distribution: before biases, penalties, bans, temperature
    and filters.
    logprob is None and top empty unless asked for. top: (token id, logprob), the likeliest first, lower ids
    first among equals; the sampled token need not be among them. candidates: as many as asked for, by falling score.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    candidates: tuple[Candidate, ...] = ()


class Sampler:
    """Greedy and seeded sampling on the host, in numpy on the calling thread."""

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """One token for each row of float32 [n, vocab], n = len(rows).

        Greedy rows take the largest adjusted logit, the lowest id among equals. Raises NonFiniteLogits, naming every
        row that holds a NaN or +inf, or nothing but -inf; any other -inf is a token that is never sampled,
        unless all that is allowed are such.
        """
        assert logits.dtype == torch.float32, logits.dtype
        assert logits.ndim == 2 and len(rows) == logits.shape[0], f"{len(rows)} rows, logits {logits.shape}"
        values: Logits = logits.detach().cpu().numpy()
        likeliest = values.argmax(axis=1)
        maxima = values[np.arange(len(rows)), likeliest]
        bad = np.flatnonzero(~np.isfinite(maxima))
        if len(bad):
            raise NonFiniteLogits(tuple(bad.tolist()))
        return [
            Sampled(greedy, None, ())
            if row.params.temperature == 0.0
            and row.params.logprobs is None
            and not row.params.candidates
            and row.adjustments is None
            and _free(row)
            else _sample_row(values[index], row, greedy)
            for index, (row, greedy) in enumerate(zip(rows, likeliest.tolist(), strict=True))
        ]


def _sample_row(logits: Logits, row: SampleRow, likeliest: int) -> Sampled:
    token, candidates = _token(logits, row, likeliest), _candidates(logits, row)
    if row.params.logprobs is None:
        return Sampled(token=token, logprob=None, top=(), candidates=candidates)
    logprob, top = logprobs_of(logits, token, row.params.logprobs)
    return Sampled(token=token, logprob=logprob, top=top, candidates=candidates)


def _candidates(logits: Logits, row: SampleRow) -> tuple[Candidate, ...]:
    count = min(row.params.candidates, len(logits))
    if not count:
        return ()
    total = log_total(logits)
    if row.adjustments is None:
        best = descending(logits, largest(logits, count)).tolist()
        logprobs = [float(logits[token]) - total for token in best]
        return tuple(map(Candidate, best, logprobs, logprobs))
    scores = row.adjustments.apply(np.subtract(logits, total, dtype=np.float64).astype(np.float32))
    best = descending(scores, largest(scores, count)).tolist()
    return tuple(Candidate(token, float(scores[token]), float(logits[token]) - total) for token in best)


def _free(row: SampleRow) -> bool:
    """Whether any token may be drawn."""
    return not row.banned and row.allowed is None


def _admitted(logits: Logits, row: SampleRow) -> Logits:
    """The logits with -inf for what may not be drawn. What alone is allowed can be drawn, whatever the model thinks."""
    if row.allowed is None:
        logits = logits.copy()
        logits[list(row.banned)] = -np.inf
        return logits
    admitted = admits(row.allowed, len(logits))
    unbanned = admitted.copy()
    unbanned[list(row.banned)] = False
    chosen = unbanned if unbanned.any() else admitted
    return np.where(chosen, np.maximum(logits, np.finfo(np.float32).min), np.float32(-np.inf))


def _token(logits: Logits, row: SampleRow, likeliest: int) -> int:
    params = row.params
    if row.adjustments is not None:
        logits = row.adjustments.apply(logits)
        likeliest = int(logits.argmax())
    if not _free(row):
        logits = _admitted(logits, row)
        likeliest = int(logits.argmax())
        assert np.isfinite(logits[likeliest]), f"all tokens are banned at position {row.position}"
    if params.temperature == 0.0:
        return likeliest
    return filtered(logits, params).draw(uniform(params.seed, row.position))
