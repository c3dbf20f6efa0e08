"""What is drawn for the sequences whose tokens are all computed: a token for each, and one for each of its twins.

Called by the core. Asks constraints what is allowed, right before the sampler is asked; changes no sequence.
"""

from collections.abc import Sequence as Ordered
from itertools import repeat
from typing import TypeAlias

import torch

from engine.sampling import Drawing, Rule, Sampled, Sampler
from engine.sequence import Sequence

Drawn: TypeAlias = tuple[Sampled, tuple[Sampled, ...]]
"""A sequence's own token, and those of its twins in their order."""


def dead_ends(complete: Ordered[Sequence]) -> list[int]:
    """Indices of those whose constraints allow no token."""
    return [
        index
        for index, one in enumerate(complete)
        if one.constraint is not None and not one.constraint.allowed().any()
    ]


def foreseen(sequence: Sequence) -> bool:
    """Whether its next tokens can be drawn one after the other before anybody has read which they are."""
    params = sequence.sampling
    return not (
        sequence.adjustments is not None
        or sequence.constraint is not None
        or sequence.scored is not None
        or sequence.twins
        or params.logprobs
        or params.candidates
        or len(sequence.tokens) < sequence.stop.min_length
    )


def begin(sampler: Sampler, complete: Ordered[Sequence], logits: torch.Tensor) -> Drawing:
    """For each of these, all foreseen, from its row of the logits, the token after its pending ones."""
    params = [one.sampling for one in complete]
    return sampler.begin(logits, params, [one.known() for one in complete])


def draw(sampler: Sampler, complete: Ordered[Sequence], logits: torch.Tensor) -> list[Drawn]:
    """For each of these from its row of the logits. None of them is a dead end."""
    params = [one.sampling for one in complete]
    positions = [len(one.tokens) for one in complete]
    own = sampler.sample(logits, params, positions, _rules(complete))
    twins = {at: _twins(sampler, one, logits[at]) for at, one in enumerate(complete) if one.twins}
    if not twins:
        return list(zip(own, repeat(())))
    return [(sampled, twins.get(at, ())) for at, sampled in enumerate(own)]


def _twins(sampler: Sampler, sequence: Sequence, logits: torch.Tensor) -> tuple[Sampled, ...]:
    """From the row of logits that its own token is drawn from."""
    count = len(sequence.twins)
    rules = {at: rule for at in range(count) for rule in _rules([sequence]).values()}
    return tuple(
        sampler.sample(logits.expand(count, -1), sequence.twins, [len(sequence.tokens)] * count, rules)
    )


def _rules(complete: Ordered[Sequence]) -> dict[int, Rule]:
    """Of those after which some tokens may not come, or not as the model says, by number."""
    return {
        at: _rule(one)
        for at, one in enumerate(complete)
        if one.adjustments is not None or one.constraint is not None or len(one.tokens) < one.stop.min_length
    }


def _rule(sequence: Sequence) -> Rule:
    constraint = sequence.constraint
    allowed = None if constraint is None else constraint.allowed()
    return Rule(sequence.stop.banned_after(len(sequence.tokens)), sequence.adjustments, allowed)
