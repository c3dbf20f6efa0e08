"""Rows to sample from, each with all that is asked of it, as tests think of them."""

from typing import NamedTuple

from engine.adjustments import Adjustments
from engine.constraint import TokenMask
from engine.sampling import NO_RULES, Rule, Sampled, Sampler
from engine.sequence import SamplingParams


class SampleRow(NamedTuple):
    params: SamplingParams
    position: int
    banned: frozenset[int] = frozenset()
    adjustments: Adjustments | None = None
    allowed: TokenMask | None = None


def sample(logits, rows: list[SampleRow], sampler: Sampler | None = None) -> list[Sampled]:
    """One token for each row of logits [len(rows), vocab]."""
    ruled = lambda row: row.banned or row.adjustments is not None or row.allowed is not None  # noqa: E731
    rules = {at: Rule(*row[2:]) for at, row in enumerate(rows) if ruled(row)}
    params, positions = [row.params for row in rows], [row.position for row in rows]
    return (sampler or Sampler()).sample(logits, params, positions, rules or NO_RULES)
