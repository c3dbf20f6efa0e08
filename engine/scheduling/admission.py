"""Which waiting sequences can start now. Counts blocks and seats; takes none: the core does, on a plan."""

from collections.abc import Iterable

from engine.policy import SequenceView


def fits(
    views: Iterable[SequenceView], free_blocks: int, seats: int, now: float, passing_limit_s: float
) -> list[SequenceView]:
    """The views that start, in the given order, while their `blocks_to_start` fit into free blocks and seats.

    One that is too big is passed by later, smaller ones only while it has waited less than `passing_limit_s`
    seconds. From then on everybody behind it waits too, so that blocks gather until it fits: a big one is
    delayed by the others for a bounded time. 0 is strict order. now: seconds on the clock of `arrived`. One that
    does better to wait for what is coming is passed by, and holds nobody up.
    """
    admitted: list[SequenceView] = []
    for view in views:
        if seats <= 0:
            break
        if _worth_waiting(view):
            continue
        if view.blocks_to_start <= free_blocks and view.seats <= seats:
            free_blocks -= view.blocks_to_start
            seats -= view.seats
            admitted.append(view)
        elif now - view.arrived >= passing_limit_s:
            break
    return admitted


def _worth_waiting(view: SequenceView) -> bool:
    """Most of what it has to compute, somebody else is computing."""
    return view.coming > 0 and view.coming * 2 >= view.uncomputed
