"""From logits to tokens.

The sampler has no state: a token is a function of its own row of logits, its parameters and (seed,
position). Called by the core once per step. Never mixes the rows of a call, never counts calls, and knows no
sequence: stop rules and penalties are folds over the known tokens, done by its callers. Logits are adjusted first, then
tokens are banned, then come temperature and truncation.
"""

from collections.abc import Mapping, Sequence
from itertools import repeat
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch

from engine.adjustments import Adjustments
from engine.columns import rows_of
from engine.constraint import TokenMask, admits
from engine.distribution import (
    BROKEN,
    VOCAB_MAX,
    Likeliest,
    Logits,
    PlainSampling,
    SamplingKernels,
    logprobs_of,
)
from engine.errors import NonFiniteLogits
from engine.sequence import SamplingParams


class Rule(NamedTuple):
    """What is done to a row before a token is drawn from it.

    banned: token ids that may not be sampled here, such as stop tokens before the minimum length; some other token must
    be left. adjustments: biases and penalties, None for none. allowed: the only tokens that may be sampled, at least
    one; where all of these are banned, the ban gives way. None for no such rule.
    """

    banned: frozenset[int] = frozenset()
    adjustments: Adjustments | None = None
    allowed: TokenMask | None = None


NO_RULES: Mapping[int, Rule] = MappingProxyType({})


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


class Drawing(Protocol):
    """Tokens that are being drawn, one for each row. tokens: int64 [n], where the logits are; some token of the
    vocabulary for a row that is broken. settled: whether they are drawn, and all that comes before them is done."""

    @property
    def tokens(self) -> torch.Tensor: ...

    @property
    def settled(self) -> bool: ...

    def read(self, wanted: Sequence[int]) -> list[Sampled]:
        """Wait until they are drawn. wanted: rows. Raises NonFiniteLogits as `Sampler.sample` does, for these."""
        ...


class Settled(NamedTuple):
    """They were drawn at once. See Drawing. sampled: BROKEN ones among them."""

    tokens: torch.Tensor
    sampled: list[Sampled]
    settled: bool = True

    def read(self, wanted: Sequence[int]) -> list[Sampled]:
        return unbroken(self.sampled, wanted)


def unbroken(sampled: Sequence[Sampled], wanted: Sequence[int]) -> list[Sampled]:
    """Those of these rows. Raises NonFiniteLogits where some are BROKEN."""
    if broken := [at for at in wanted if sampled[at].token == BROKEN]:
        raise NonFiniteLogits(tuple(broken))
    return [sampled[at] for at in wanted]


_LIKELIEST = SamplingParams()


class Sampler:
    """Greedy and seeded sampling on the host. kernels: what draws, all rows of a step at once."""

    def __init__(self, kernels: SamplingKernels = PlainSampling()) -> None:  # noqa: B008 (has no state)
        self._kernels = kernels

    def settle(self, logits: torch.Tensor) -> None:
        """Wait until these, and all that was asked of their device before, are there. To be called before the host
        reads them, or takes some of their rows by number. On the host they are there."""

    def sample(
        self,
        logits: torch.Tensor,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        rules: Mapping[int, Rule] = NO_RULES,
    ) -> list[Sampled]:
        """One token for each row of float32 [n, vocab]. positions: of the tokens to be sampled, absolute, from 0.
        rules: of those rows that have one, by number.

        Greedy rows take the largest adjusted logit, the lowest id among equals. Raises NonFiniteLogits, naming every
        row that holds a NaN or +inf, or nothing but -inf; any other -inf is a token that is never sampled,
        unless all that is allowed are such.
        """
        values = self._on_host(logits)
        assert len(params) == len(positions) == len(values), f"{len(params)} rows, logits {values.shape}"
        free = [_LIKELIEST if at in rules else each for at, each in enumerate(params)] if rules else params
        tokens = self._kernels.draw(values, free, positions) if params else []
        if BROKEN in tokens:
            raise NonFiniteLogits(tuple([at for at, token in enumerate(tokens) if token == BROKEN]))
        if rules:
            self._draw_ruled(values, params, positions, rules, tokens)
        return self._told_more(values, params, rules, tokens)

    def begin(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> Drawing:
        """As `sample`, for rows without rules that want no more than their token's logprob; waits for nothing where it
        need not."""
        values = self._on_host(logits)
        tokens = self._kernels.draw(values, params, positions) if params else []
        drawn = torch.tensor(tokens, dtype=torch.int64, device=logits.device).clamp_(min=0)
        return Settled(drawn, self._told_more(values, params, NO_RULES, tokens))

    def describe(self, values: Logits, counts: Sequence[int]) -> list[Likeliest]:
        """So many of the likeliest tokens of each row, under the model's own distribution. No row is broken."""
        return self._kernels.describe(values, [min(count, values.shape[1]) for count in counts])

    def _on_host(self, logits: torch.Tensor) -> Logits:
        self.settle(logits)
        values: Logits = np.ascontiguousarray(logits.numpy(force=True))
        assert values.dtype == np.float32, values.dtype
        assert values.ndim == 2 and values.shape[1] < VOCAB_MAX, values.shape
        return values

    def _draw_ruled(
        self,
        values: Logits,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        rules: Mapping[int, Rule],
        tokens: list[int],
    ) -> None:
        """Put tokens that follow the rules in place of the likeliest ones."""
        altered = np.stack([_alter(values[at], rule) for at, rule in rules.items()])
        drawn = self._kernels.draw(altered, [params[at] for at in rules], [positions[at] for at in rules])
        for at, token in zip(rules, drawn, strict=True):
            assert token != BROKEN, f"all tokens are banned at position {positions[at]}"
            tokens[at] = token

    def _told_more(
        self,
        values: Logits,
        params: Sequence[SamplingParams],
        rules: Mapping[int, Rule],
        tokens: list[int],
    ) -> list[Sampled]:
        """Logprobs and candidates too, where somebody asked for these; not of BROKEN ones."""
        sampled = rows_of(Sampled, tokens, repeat(None), repeat(()), repeat(()))
        asked = [at for at, one in enumerate(params) if one.logprobs is not None or one.candidates]
        if not asked:
            return sampled
        asked = [at for at in asked if tokens[at] != BROKEN]
        counts = [max(params[at].logprobs or 0, params[at].candidates) for at in asked]
        for at, (log_total, ids) in zip(asked, self.describe(values[asked], counts), strict=True):
            one, row = params[at], values[at]
            candidates = self._candidates(row, Likeliest(log_total, ids[: one.candidates]), rules.get(at))
            sampled[at] = sampled[at]._replace(candidates=candidates)
            if one.logprobs is not None:
                likeliest = Likeliest(log_total, ids[: one.logprobs])
                logprob, top = logprobs_of(row, sampled[at].token, likeliest)
                sampled[at] = sampled[at]._replace(logprob=logprob, top=top)
        return sampled

    def _candidates(self, logits: Logits, likeliest: Likeliest, rule: Rule | None) -> tuple[Candidate, ...]:
        """likeliest: as many as are wanted, before anything is adjusted."""
        total, best = likeliest
        if not best or rule is None or rule.adjustments is None:
            logprobs = [float(logits[token]) - total for token in best]
            return tuple(map(Candidate, best, logprobs, logprobs))
        scores = rule.adjustments.apply(np.subtract(logits, total, dtype=np.float64).astype(np.float32))
        ((_, best),) = self.describe(scores[None], [len(best)])
        return tuple([Candidate(token, float(scores[token]), float(logits[token]) - total) for token in best])


def _alter(logits: Logits, rule: Rule) -> Logits:
    if rule.adjustments is not None:
        logits = rule.adjustments.apply(logits)
    return _admitted(logits, rule) if rule.banned or rule.allowed is not None else logits


def _admitted(logits: Logits, rule: Rule) -> Logits:
    """The logits with -inf for what may not be drawn. What alone is allowed can be drawn, whatever the model thinks."""
    if rule.allowed is None:
        logits = logits.copy()
        logits[list(rule.banned)] = -np.inf
        return logits
    admitted = admits(rule.allowed, len(logits))
    unbanned = admitted.copy()
    unbanned[list(rule.banned)] = False
    chosen = unbanned if unbanned.any() else admitted
    return np.where(chosen, np.maximum(logits, np.finfo(np.float32).min), np.float32(-np.inf))
