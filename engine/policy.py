"""What a policy sees, and what it proposes.

A policy is a pure function: it reads a View and returns a Plan. It allocates nothing, changes nothing, waits for
nothing. The core validates the plan and moves the blocks; one place asserts memory safety for every policy.
"""

from typing import NamedTuple, Protocol

from engine.scheduling.pace import Pace
from engine.sequence import SequenceId


class SequenceView(NamedTuple):
    """One sequence as a policy sees it. Counts are tokens and blocks; arrived is in seconds on the core's clock.

    blocks_to_start: blocks that one that waits, or comes back, must be promised; those that it shares with others are
    not among them. blocks_to_continue: blocks that the next token of one that runs needs and that nobody promised it, 0
    or 1. blocks_to_end: what may be needed beyond all these for the last token. uncomputed: without what is cached.
    coming: how many of these a running sequence is going to put into the cache. steadfast: not to be given up. seats:
    sequences that it stands for.

    blocks_freed, cost_to_resume: what giving it up would make available, and the tokens whose KV would then have to be
    computed or copied again. Known when blocks are short: when those that run need more than are available.
    """

    id: SequenceId
    uncomputed: int
    blocks_to_start: int
    arrived: float
    coming: int = 0
    blocks_to_continue: int = 0
    blocks_to_end: int = 0
    blocks_freed: int = 0
    cost_to_resume: int = 0
    steadfast: bool = False
    seats: int = 1


class View(NamedTuple):
    """The engine between two steps, in order of arrival. available_blocks: owned by nobody and not promised to
    anybody. swapped: given up, and kept in host memory. headroom: see `Headroom`. pace: see `Pace`."""

    waiting: tuple[SequenceView, ...]
    running: tuple[SequenceView, ...]
    available_blocks: int
    swapped: tuple[SequenceView, ...] = ()
    headroom: float = 0.0
    pace: Pace = Pace()


class Work(NamedTuple):
    """Compute the next so many uncomputed tokens of a sequence; tokens is in [1, uncomputed]."""

    id: SequenceId
    tokens: int


class Plan(NamedTuple):
    """One step. What is given up for want of blocks goes first; it has no work. A waiting sequence that gets work is
    started by it, and one that was swapped out comes back."""

    work: tuple[Work, ...]
    preempt: tuple[SequenceId, ...] = ()


class Policy(Protocol):
    def plan(self, view: View, now: float) -> Plan: ...
