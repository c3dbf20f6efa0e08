"""What is drawn for the sequences whose tokens are all computed: a token for each, and one for each of its twins.

Called by the core. Asks constraints what is allowed, right before the sampler is asked; changes no sequence.
"""

from collections.abc import Sequence as Ordered
from itertools import islice
from typing import TypeAlias

import torch

from engine.sampling import Sampled, Sampler, SampleRow
from engine.sequence import SamplingParams, Sequence

Drawn: TypeAlias = tuple[Sampled, tuple[Sampled, ...]]
"""A sequence's own token, and those of its twins in their order."""


def dead_ends(complete: Ordered[Sequence]) -> list[int]:
    """Indices of those whose constraints allow no token."""
    return [
        index
        for index, one in enumerate(complete)
        if one.constraint is not None and not one.constraint.allowed().any()
    ]


def draw(sampler: Sampler, complete: Ordered[Sequence], logits: torch.Tensor) -> list[Drawn]:
    """For each of these from its row of the logits. None of them is a dead end."""
    rows = [_row(sequence, sequence.sampling) for sequence in complete]
    twins = [_row(sequence, params) for sequence in complete for params in sequence.twins]
    drawn = sampler.sample(logits, rows)
    if not twins:
        return [(sampled, ()) for sampled in drawn]
    shared = logits.repeat_interleave(torch.tensor([len(each.twins) for each in complete]), dim=0)
    others = iter(sampler.sample(shared, twins))
    return [
        (sampled, tuple(islice(others, len(one.twins)))) for one, sampled in zip(complete, drawn, strict=True)
    ]


def _row(sequence: Sequence, params: SamplingParams) -> SampleRow:
    """How a token that follows it is drawn."""
    position, constraint = len(sequence.tokens), sequence.constraint
    allowed = None if constraint is None else constraint.allowed()
    banned = sequence.stop.banned_after(position)
    return SampleRow(params, position, banned, adjustments=sequence.adjustments, allowed=allowed)
