"""Which waiting sequences can start now. Counts blocks and seats; takes none: the core does, on a plan."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine.policy import SequenceView
from engine.sequence import PREEMPTIONS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What there is for those that start. growing_blocks: what all that have started may still come to need, nobody
    having promised it to them; headroom: the share of that, and of their own growth, that must stay free."""

    free_blocks: int
    seats: int
    growing_blocks: int = 0
    headroom: float = 0.0

    def holds(self, view: SequenceView) -> bool:
        """Whether this one can start, with all that it stands for."""
        growth = self.growing_blocks + view.blocks_to_end
        needed = view.blocks_to_start + math.ceil(growth * self.headroom)
        return needed <= self.free_blocks and view.seats <= self.seats

    def without(self, view: SequenceView) -> "Room":
        """When this one has started."""
        return Room(
            free_blocks=self.free_blocks - view.blocks_to_start,
            seats=self.seats - view.seats,
            growing_blocks=self.growing_blocks + view.blocks_to_end,
            headroom=self.headroom,
        )


def blocks_at_start(known: int, most: int, preemptions: int) -> int:
    """Blocks that a sequence is promised when it starts: those of what is known of it and one to grow, or all that it
    can ever need when it was given up often enough. known, most: blocks of its known tokens, and of its longest."""
    return most if preemptions >= PREEMPTIONS_MAX else min(known + 1, most)


def fits(views: Iterable[SequenceView], room: Room, now: float, passing_limit_s: float) -> list[SequenceView]:
    """The views that start, in the given order, while there is room and a seat for them.

    One that is too big is passed by later, smaller ones only while it has waited less than `passing_limit_s`
    seconds. From then on everybody behind it waits too, so that blocks gather until it fits: a big one is
    delayed by the others for a bounded time. 0 is strict order. now: seconds on the clock of `arrived`. One that
    does better to wait for what is coming is passed by, and holds nobody up.
    """
    admitted: list[SequenceView] = []
    for view in views:
        if room.seats <= 0:
            break
        if _worth_waiting(view):
            continue
        if room.holds(view):
            room = room.without(view)
            admitted.append(view)
        elif now - view.arrived >= passing_limit_s:
            break
    return admitted


def _worth_waiting(view: SequenceView) -> bool:
    """Most of what it has to compute, somebody else is computing."""
    return view.coming > 0 and view.coming * 2 >= view.uncomputed
