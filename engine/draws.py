"""What is drawn for the sequences whose tokens are all computed: a token for each, and one for each of its twins.

Called by the core. Asks constraints what is allowed, right before the sampler is asked. Only `take` changes sequences.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch

from engine.batch import Int64s
from engine.results import Outputs
from engine.runs import Draws
from engine.sampling import Drawing, Rule, Sampled, Sampler
from engine.sequence import Sequence

Twins: TypeAlias = Mapping[int, tuple[Sampled, ...]]
NO_TWINS: Twins = MappingProxyType({})
Drawn: TypeAlias = tuple[list[Sampled], Twins]
"""Each sequence's own token, and by index those of its twins in their order."""


def dead_ends(draws: Draws) -> list[int]:
    """Indices of those whose constraints allow no token."""
    return [at for at in draws.ruled if _is_stuck(draws.sequences[at])]


def foreseen(sequence: Sequence) -> bool:
    """Whether its next tokens can be drawn one after the other before anybody has read which they are."""
    params = sequence.sampling
    return not (
        sequence.ruled()
        or sequence.scored is not None
        or sequence.twins
        or params.logprobs
        or params.candidates
    )


def begin(sampler: Sampler, draws: Draws, logits: torch.Tensor) -> Drawing:
    """For each of these, all foreseen, from its row of the logits, the token after its pending ones."""
    return sampler.begin(logits, draws.params, draws.positions.tolist())


def draw(sampler: Sampler, draws: Draws, positions: Int64s, logits: torch.Tensor) -> Drawn:
    """For each of these at its position from its row of the logits. None of them is a dead end."""
    sequences = draws.sequences
    rules = {at: _rule(sequences[at]) for at in draws.ruled if sequences[at].ruled()}
    own = sampler.sample(logits, draws.params, positions.tolist(), rules)
    return own, {at: _twins(sampler, sequences[at], logits[at]) for at in draws.twinned}


def take(draws: Draws, positions: Int64s, sampled: list[Sampled], twins: Twins = NO_TWINS) -> Outputs:
    """Each sequence gets its token, drawn at its position; few have to be looked at for what it means."""
    sequences, tokens = draws.sequences, [one.token for one in sampled]
    reached = [min(one.computed, len(one.tokens)) for one in sequences]
    assert reached == positions.tolist(), "a token comes where it was drawn for, after all that is computed"
    for sequence, token in zip(sequences, tokens, strict=True):
        sequence.tokens.append(token)
    for at in draws.twinned:
        sequences[at].twins = ()
    remarkable = draws.remarkable(tokens, positions)
    for at in remarkable:
        sequences[at].settle()
    return Outputs(
        sequences=sequences,
        positions=positions,
        sampled=sampled,
        tokens=tokens,
        twins=twins,
        told_more=draws.told_more,
        ended=[at for at in remarkable if sequences[at].end_reason is not None],
    )


def _twins(sampler: Sampler, sequence: Sequence, logits: torch.Tensor) -> tuple[Sampled, ...]:
    """From the row of logits that its own token is drawn from."""
    count = len(sequence.twins)
    rules = {at: _rule(sequence) for at in range(count)} if sequence.ruled() else {}
    return tuple(
        sampler.sample(logits.expand(count, -1), sequence.twins, [len(sequence.tokens)] * count, rules)
    )


def _is_stuck(sequence: Sequence) -> bool:
    return sequence.constraint is not None and not sequence.constraint.allowed().any()


def _rule(sequence: Sequence) -> Rule:
    constraint = sequence.constraint
    allowed = None if constraint is None else constraint.allowed()
    return Rule(sequence.stop.banned_after(len(sequence.tokens)), sequence.adjustments, allowed)
