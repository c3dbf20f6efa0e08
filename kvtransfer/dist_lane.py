"""The thread of one pair: joins the group, then moves blocks in order until it is told to end or cannot go on.

Owns the group and every operation in it; both ends use it, one to send and one to receive. Its owner puts
blocks from its own thread, never waits, and hears of everything by notes. Never decides what is moved."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from kvtransfer.dist_group import SOURCE_RANK, Group, GroupOptions, Operation, PairBroken, Rendezvous


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The other end must learn this."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Up:
    """The group is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The oldest block that was put is moved; its memory is not in use any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """The last note: the group is gone and no memory is in use any more. broken: it could not go on."""

    broken: bool


Note: TypeAlias = Said | Up | Moved | Over
Join: TypeAlias = Callable[[str, int, Rendezvous, GroupOptions], Group]


class Lane:
    """rank: SOURCE_RANK sends, TARGET_RANK receives. join: makes the group. note: called on the lane's
    thread, must not wait."""

    def __init__(
        self, backend: str, rank: int, join: Join, options: GroupOptions, note: Callable[[Note], None]
    ) -> None:
        self._backend = backend
        self._rank = rank
        self._join = join
        self._options = options
        self._note = note
        self._rendezvous = Rendezvous(self._say, options.join_s)
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, torch.Tensor]] = deque()
        self._under_way: deque[Operation] = deque()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"kv-pair-{backend}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def learn(self, key: str, value: bytes) -> bool:
        """What the other end's lane has said. False when it says too much."""
        return self._rendezvous.learn(key, value)

    def put(self, number: int, memory: torch.Tensor) -> None:
        """Move this block after those before it. memory: uint8 [bytes of a block], left alone until Moved or
        Over. All that wait together are started together, which hides the round trip before each block."""
        with self._changed:
            self._waiting.append((number, memory))
            self._changed.notify()

    def end(self) -> None:
        """What was not started is not moved any more. Over follows, at the latest when the block under way
        is through or its time is over."""
        self._rendezvous.give_up()
        with self._changed:
            self._ended = True
            self._changed.notify()

    def wait_over(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        group: Group | None = None
        broken = True
        try:
            group = self._join(self._backend, self._rank, self._rendezvous, self._options)
            self._note(Up())
            self._move(group)
            broken = False
        except PairBroken:
            broken = True
        finally:
            self._destroy(group)
            self._note(Over(broken=broken))

    def _move(self, group: Group) -> None:
        begin = group.send if self._rank == SOURCE_RANK else group.receive
        while (taken := self._take()) is not None:
            for number, memory in taken:
                self._under_way.append(begin(number, memory))
            self._under_way[0].wait(self._options.move_s)
            self._under_way.popleft()
            self._note(Moved())

    def _take(self) -> list[tuple[int, torch.Tensor]] | None:
        """What to start now; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._waiting or self._under_way)
            if self._ended:
                return None
            taken = list(self._waiting)
            self._waiting.clear()
            return taken

    def _destroy(self, group: Group | None) -> None:
        """The memory outlives the operations, and they outlive the group."""
        if group is not None:
            group.destroy()
        for operation in self._under_way:
            operation.drop()
        self._under_way.clear()
        with self._changed:
            self._ended = True
            self._waiting.clear()

    def _say(self, key: str, value: bytes) -> None:
        self._note(Said(key=key, value=value))
