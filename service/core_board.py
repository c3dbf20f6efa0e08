"""Which cores of this machine compute for their owners: a page of memory that the workers of one `serve` share.

One line of 64 bytes per core. Its first word is the worker that borrows the core, 0 for none: its seat + 1. Byte 8 + s
is worker s's: it does not own the core, owns it and rests, or owns it and computes. Whoever deals the cores makes the
board and clears what a dead worker left; a worker writes its own seat; `engine/kernels/cpu/core_board.h` reads the
seats and borrows. Nothing here decides who borrows what.
"""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from service.startup import StartupError

SEATS_MAX = 56

_LINE_BYTES = 64
_FIRST_SEAT = 8
_RESTS, _COMPUTES = 1, 2


class CoreBoard:
    """file: open for reading and writing, and ours from now on."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._page = mmap.mmap(file, 0)
        self._borrowers = memoryview(self._page).cast("I")

    @classmethod
    def make(cls, owners: Sequence[Sequence[int]]) -> Self:
        """A new board on which everybody rests. owners: cores of each worker, in order of their seats."""
        assert len(owners) <= SEATS_MAX, len(owners)
        lines = 1 + max(core for cores in owners for core in cores)
        file = os.memfd_create("crossdock-cores")
        os.ftruncate(file, lines * _LINE_BYTES)
        board = cls(file)
        for seat, cores in enumerate(owners):
            for core in cores:
                board._page[core * _LINE_BYTES + _FIRST_SEAT + seat] = _RESTS
        return board

    @classmethod
    def open(cls, path: Path) -> Self:
        """The board of somebody else. Raises StartupError when it is not there."""
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise StartupError(f"--core-board: {path}: {error.strerror}") from error
        if os.fstat(file).st_size == 0:
            os.close(file)
            raise StartupError(f"--core-board: {path}: is empty")
        return cls(file)

    @property
    def path(self) -> Path:
        """Where other processes of this user find it, while this process has it open."""
        return Path(f"/proc/{os.getpid()}/fd/{self._file}")

    def sole(self, seat: int) -> bool:
        """Whether the worker's cores are nobody else's."""
        lines = [self._page[at : at + _LINE_BYTES] for at in range(0, len(self._page), _LINE_BYTES)]
        own = [line[_FIRST_SEAT:] for line in lines if line[_FIRST_SEAT + seat]]
        return all(sum(map(bool, seats)) == 1 for seats in own)

    def compute(self, seat: int) -> None:
        """The worker needs its cores from now on: nobody begins anything on them."""
        self._write(seat, _COMPUTES)

    def rest(self, seat: int) -> None:
        """Others may have the worker's cores."""
        self._write(seat, _RESTS)

    def vacate(self, seat: int) -> None:
        """The worker is dead: it computes nothing and borrows nothing."""
        self.rest(seat)
        for line in range(0, len(self._borrowers), _LINE_BYTES // 4):
            if self._borrowers[line] == seat + 1:
                self._borrowers[line] = 0

    def close(self) -> None:
        self._borrowers.release()
        self._page.close()
        os.close(self._file)

    def _write(self, seat: int, state: int) -> None:
        for place in range(_FIRST_SEAT + seat, len(self._page), _LINE_BYTES):
            if self._page[place]:
                self._page[place] = state
