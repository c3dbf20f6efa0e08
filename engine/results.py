"""What one step did. The tokens that it drew are columns: most who read them want those, and a few want a row."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.batch import Int64s
from engine.sampling import Sampled
from engine.scheduling.pace import Load
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
class Outputs:
    """sequences: n of them; the same list for as long as the same ones draw, step after step. positions: int64 [n].
    sampled: of each; tokens: of these. twins: by index, of those that have any. told_more: ascending indices of those
    that asked for logprobs, and ended: of those whose last token it was."""

    sequences: list[Sequence]
    positions: Int64s
    sampled: list[Sampled]
    tokens: list[int]
    twins: Mapping[int, tuple[Sampled, ...]]
    told_more: list[int]
    ended: list[int]

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Output]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Output:
        return Output(
            self.sequences[index],
            int(self.positions[index]),
            self.sampled[index],
            self.twins.get(index, ()),
        )


NO_OUTPUTS = Outputs(
    sequences=[], positions=np.zeros(0, np.int64), sampled=[], tokens=[], twins={}, told_more=[], ended=[]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did. Empty when the policy found nothing that can run now. tokens: of all its progress. preempted:
    given up; those that are DETACHED are here no more and own nothing, the others come back by themselves. scored: see
    `Sequence`. dead_ends: finished, and not with a token: their constraints allowed none. landed: outputs are all that
    a step has drawn, be it for nobody any more. unread: what the progress draws, a later step tells; this one tells
    what an earlier one drew. load: what the device has computed; from the end of the last step on where that is
    `overlapped`, else since the beginning of this one. None: nothing of which anybody knows that it is done."""

    progress: tuple[Progress, ...] = ()
    tokens: int = 0
    outputs: Outputs = NO_OUTPUTS
    preempted: tuple[Sequence, ...] = ()
    scored: tuple[Scored, ...] = ()
    dead_ends: tuple[Sequence, ...] = ()
    landed: bool = False
    unread: bool = False
    load: Load | None = None
    overlapped: bool = False

    def empty(self) -> bool:
        return not (self.progress or self.preempted or self.landed)
