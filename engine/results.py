"""What one step did, for whoever takes it further."""

from dataclasses import dataclass
from typing import NamedTuple

from engine.sampling import Sampled
from engine.scoring import Scored
from engine.sequence import Progress, Sequence


class Output(NamedTuple):
    """A token was sampled. position: its index among the sequence's tokens. twins: what was drawn for other choices at
    the same position, in the order of the sequence's."""

    sequence: Sequence
    position: int
    sampled: Sampled
    twins: tuple[Sampled, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did. Empty when the policy found nothing that can run now. preempted: given up; those that are
    DETACHED are here no more and own nothing, the others come back by themselves. scored: see `Sequence`. dead_ends:
    finished, and not with a token: their constraints allowed none. landed: outputs are all that an earlier step has
    drawn, be it for nobody any more."""

    progress: tuple[Progress, ...] = ()
    outputs: tuple[Output, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    scored: tuple[Scored, ...] = ()
    dead_ends: tuple[Sequence, ...] = ()
    landed: bool = False

    def empty(self) -> bool:
        return not (self.progress or self.preempted or self.landed)
