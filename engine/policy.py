"""What a policy sees, and what it proposes.

A policy is a pure function: it reads a View and returns a Plan. It allocates nothing, changes nothing, waits for
nothing. The core validates the plan and moves the blocks; one place asserts memory safety for every policy.
"""

from dataclasses import dataclass
from typing import Protocol

from engine.sequence import SequenceId


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceView:
    """One sequence as a policy sees it. Counts are tokens and blocks; arrived is in seconds on the core's clock.

    blocks_to_start: blocks that a waiting sequence must be promised before it starts, so that it can run to its
    end; those that it shares with others are not among them. 0 for a sequence that is running. uncomputed: without
    what is cached. coming: how many of these a running sequence is going to put into the cache. seats: sequences that
    it stands for.
    """

    id: SequenceId
    uncomputed: int
    length: int
    blocks_to_start: int
    arrived: float
    coming: int = 0
    seats: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The engine between two steps, in order of arrival. available_blocks: owned by nobody and not promised to
    anybody."""

    waiting: tuple[SequenceView, ...]
    running: tuple[SequenceView, ...]
    available_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Compute the next `count` uncomputed tokens of a sequence; count is in [1, uncomputed]."""

    id: SequenceId
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One step. A waiting sequence that gets work is started by it."""

    work: tuple[Work, ...]


class Policy(Protocol):
    def plan(self, view: View, now: float) -> Plan: ...
