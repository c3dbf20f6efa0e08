"""How likely the known tokens of a sequence are: the rows that this takes of a step, and what is read off them.

The core asks it around each step. Where nobody wants to know, it changes nothing. Never samples, never keeps logits.
"""

from collections.abc import Sequence as Ordered
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from engine.batch import Batch
from engine.distribution import Likeliest, Logits, logprobs_of
from engine.errors import NonFiniteLogits
from engine.sampling import Sampler
from engine.sequence import Progress, Sequence

ROWS_MAX = 128
"""Rows that are scored in one step, over all sequences: their logits are the largest thing that a step makes."""


class Score(NamedTuple):
    """Of one token. logprob, top: as in `Sampled`. rank: among all tokens, from 1; lower ids first among equals."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class Scored(NamedTuple):
    """What a step has found of a sequence's tokens from `first_position` on, at least one."""

    sequence: Sequence
    first_position: int
    scores: tuple[Score, ...]


def asked_of(runs: Ordered[Progress]) -> bool:
    """Whether anybody wants to know."""
    return bool([sequence for sequence, _ in runs if sequence.scored is not None])


def limited(runs: list[Progress]) -> list[Progress]:
    """As much of these as ROWS_MAX rows allow, each in the same proportion; what is not scored goes unhindered."""
    if not asked_of(runs):
        return runs
    wanted = [_rows(sequence, tokens) for sequence, tokens in runs]
    total, seen, granted, kept = sum(wanted), 0, 0, []
    if total <= ROWS_MAX:
        return runs
    for (sequence, tokens), rows in zip(runs, wanted, strict=True):
        seen += rows
        share = (
            seen * ROWS_MAX // total - granted
        )  # summed up first, so that all rows are granted to somebody
        granted += share
        if share or not rows:
            kept.append(Progress(sequence, share if share < rows else tokens))
    return kept


def with_scored_rows(batch: Batch, runs: Ordered[Progress]) -> Batch:
    """The logits that are wanted besides those that are sampled from. runs: those of the batch, not yet committed."""
    counts = [_rows(sequence, tokens) for sequence, tokens in runs]
    starts = batch.query_starts.tolist()
    scored = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=False)]
    return replace(batch, rows=np.sort(np.concatenate([batch.rows, *scored])))


def read_scores(
    sampler: Sampler, runs: Ordered[Progress], logits: torch.Tensor
) -> tuple[tuple[Scored, ...], torch.Tensor]:
    """What the logits of a batch `with_scored_rows` say, and those that are left to sample from, in order.

    Raises NonFiniteLogits for a row from which no number can be read."""
    sampler.settle(logits)
    found, sampled, at = [], [], 0
    for sequence, tokens in runs:
        count = _rows(sequence, tokens)
        if count:
            found.append(_read(sampler, sequence, logits[at : at + count], at))
        at += count
        if sequence.computed + tokens == len(sequence.tokens):
            sampled.append(at)
            at += 1
    assert at == logits.shape[0], f"{logits.shape[0]} rows, {at} of them wanted"
    return tuple(found), logits[sampled]


def _rows(sequence: Sequence, tokens: int) -> int:
    """How many of its next so many positions say something of a known token. The last known one is sampled from."""
    if sequence.scored is None:
        return 0
    return min(tokens, len(sequence.tokens) - 1 - sequence.computed)


def _read(sampler: Sampler, sequence: Sequence, logits: torch.Tensor, row: int) -> Scored:
    """row: number of the first one in its batch."""
    assert sequence.scored is not None
    values: Logits = logits.detach().cpu().numpy()
    bad = np.flatnonzero(~np.isfinite(values.max(axis=1)))
    if len(bad):
        raise NonFiniteLogits(tuple((row + bad).tolist()))
    first = sequence.computed + 1
    tokens = sequence.tokens[first : first + len(values)]
    described = sampler.describe(values, [sequence.scored] * len(values))
    scores = [_score(*each) for each in zip(values, tokens, described, strict=True)]
    return Scored(sequence, first, tuple(scores))


def _score(logits: Logits, token: int, likeliest: Likeliest) -> Score:
    logprob, top = logprobs_of(logits, token, likeliest)
    likelier = np.count_nonzero(logits > logits[token]) + np.count_nonzero(logits[:token] == logits[token])
    return Score(logprob, int(likelier) + 1, top)
