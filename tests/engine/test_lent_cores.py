"""Cores of others: computed with while their owners rest, never begun on while they do not, and without any trace in
the results. Here the owners are the test's: it writes their seats on the board."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import NoCompiler
from engine.kernels.core_share import CoreShare
from engine.kernels.cpu.build import COMPILERS, built, default_cache_folder, host_flags
from engine.kernels.cpu.crew import Crew
from engine.kernels.cpu.library import Library
from engine.kernels.cpu.operations import CpuOperations
from service.core_board import CoreBoard
from tests.engine.test_exactness import MODES, answers, engine_of

CORES = sorted(os.sched_getaffinity(0))
OURS, THEIRS, THIRD = 0, 1, 2  # seats
CALLS_MAX = 200_000  # a busy machine may keep a borrowed core from us for a while

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="there is one core, and nobody to borrow from")


def share(board, seat=OURS):
    return CoreShare(own=(CORES[seat],), board=board.path, seat=seat)


@pytest.fixture
def board():
    made = CoreBoard.make([(CORES[0],), (CORES[1],)])
    yield made
    made.close()


def operations(dtype, cores):
    """Compiled kernels one at a time, on these cores."""
    try:
        library = Library(built(default_cache_folder(), COMPILERS, host_flags()))
    except NoCompiler as error:
        pytest.skip(str(error))
    return CpuOperations(dtype, Crew(library, 1, cores))


class Borrower:
    """A backend, a product that is worth sharing, and the result that it must always have."""

    def __init__(self, cores):
        self.backend = operations(torch.float32, cores)
        self._weight, self._x = self.backend.pack(torch.randn(1024, 256)), torch.randn(32, 256)
        self._wanted = self.backend.linear(self._x, self._weight)

    def compute(self, calls=1):
        """Returns what was borrowed for it."""
        before = self.backend.borrowed_s()
        for _ in range(calls):
            assert torch.equal(self.backend.linear(self._x, self._weight), self._wanted)
        return self.backend.borrowed_s() - before

    def borrows(self):
        return any(self.compute() > 0 for _ in range(CALLS_MAX))


def test_without_a_board_nothing_is_borrowed():
    borrower = Borrower(CoreShare(own=(CORES[0],)))
    assert borrower.compute(calls=50) == 0


def test_a_core_is_borrowed_while_its_owner_rests_and_from_the_next_call_on_not_while_it_computes(board):
    borrower = Borrower(share(board))
    for _ in range(3):
        assert borrower.borrows()
        board.compute(THEIRS)
        assert borrower.compute(calls=200) == 0
        board.rest(THEIRS)


def test_a_core_of_several_owners_is_free_only_while_all_of_them_rest():
    board = CoreBoard.make([(CORES[0],), (CORES[1],), (CORES[1],)])
    borrower = Borrower(share(board))
    board.compute(THEIRS)
    board.compute(THIRD)
    board.rest(THEIRS)
    assert borrower.compute(calls=200) == 0
    board.rest(THIRD)
    assert borrower.borrows()


def test_a_core_that_is_ours_as_well_is_not_borrowed():
    board = CoreBoard.make([CORES[:2], (CORES[1],)])
    assert Borrower(share(board)).compute(calls=200) == 0


def test_an_owner_that_died_while_it_computed_keeps_nothing(board):
    borrower = Borrower(share(board))
    board.compute(THEIRS)
    board.vacate(THEIRS)
    assert borrower.borrows()


BORROW_WHEN_TOLD = """
import sys
from pathlib import Path
import torch
from engine.kernels.core_share import CoreShare
from engine.kernels.cpu.build import COMPILERS, built, default_cache_folder, host_flags
from engine.kernels.cpu.crew import Crew
from engine.kernels.cpu.library import Library
from engine.kernels.cpu.operations import CpuOperations
library = Library(built(default_cache_folder(), COMPILERS, host_flags()))
cores = CoreShare(own=(int(sys.argv[1]),), board=Path(sys.argv[2]), seat=int(sys.argv[3]))
backend = CpuOperations(torch.float32, Crew(library, 1, cores))
weight, x = backend.pack(torch.randn(4096, 2048)), torch.randn(256, 2048)
for _ in sys.stdin:
    print(flush=True)
    for _ in range(50):
        backend.linear(x, weight)
"""


@contextmanager
def other_borrower(core, path, seat):
    """A process that borrows for a while when it is told to."""
    argv, pipe = [sys.executable, "-c", BORROW_WHEN_TOLD, str(core), str(path), str(seat)], subprocess.PIPE
    with subprocess.Popen(argv, cwd=Path(__file__).parents[2], stdin=pipe, stdout=pipe, bufsize=0) as process:
        yield process
        process.kill()


def test_a_core_is_borrowed_by_one_at_a_time_and_comes_back_from_the_dead():
    board = CoreBoard.make([(CORES[0],), (CORES[1],), (CORES[0],)])
    borrower = Borrower(share(board))
    with other_borrower(CORES[0], board.path, THIRD) as process:
        for _ in range(100):
            process.stdin.write(b"\n")
            process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            if borrower.compute(calls=200) == 0:
                break
            process.send_signal(signal.SIGCONT)
        else:
            pytest.fail("the other one was never seen to have the core")
    board.vacate(THIRD)
    assert borrower.borrows()


@contextmanager
def restless(board, seed):
    """Their owner takes the core back and lets it go again, all the time and at any moment."""
    over, random = threading.Event(), Random(seed)

    def go_on():
        while not over.wait(random.choice((0, 1e-5, 1e-4, 1e-3))):
            board.compute(THEIRS) if random.random() < 0.5 else board.rest(THEIRS)

    owner = threading.Thread(target=go_on)
    owner.start()
    try:
        yield
    finally:
        over.set()
        owner.join()


CROWD = """
import os, select, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
while not select.select([sys.stdin], [], [], 1e-3)[0]:
    end = time.monotonic() + 3e-3
    while time.monotonic() < end:
        pass
"""


@contextmanager
def crowded(core):
    """Somebody who is on no board runs on the core and stops again, all the time, until its input ends."""
    with subprocess.Popen([sys.executable, "-c", CROWD, str(core)], stdin=subprocess.PIPE):
        yield


@pytest.fixture(scope="module")
def lending():
    """A board, and backends of both dtypes that borrow by it, each beside one that does not."""
    board = CoreBoard.make([(CORES[0],), (CORES[1],)])
    dtypes = (torch.float32, torch.bfloat16)
    return board, [(operations(dtype, CoreShare()), operations(dtype, share(board))) for dtype in dtypes]


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 300), inputs=st.integers(16, 400), outputs=st.integers(16, 2000), seed=st.integers()
)
def test_cores_that_come_and_go_change_no_bit_of_any_product(lending, rows, inputs, outputs, seed):
    board, pairs = lending
    random = torch.Generator().manual_seed(seed % 2**63)
    x, weight = torch.randn(rows, inputs, generator=random), torch.randn(outputs, inputs, generator=random)
    with restless(board, seed):
        for alone, lent in pairs:
            wanted, packed = alone.linear(x, alone.pack(weight)), lent.pack(weight)
            assert all(torch.equal(lent.linear(x, packed), wanted) for _ in range(5))


@pytest.mark.parametrize("mode", ["bfloat16", "gguf"])
def test_cores_that_come_and_go_change_no_bit_of_any_answer(board, mode, shallow_model_path):
    wanted = answers(engine_of(shallow_model_path, MODES[mode]), 64, crowd=4)
    engine = engine_of(shallow_model_path, MODES[mode], cores=share(board))
    with restless(board, seed=1), crowded(CORES[1]):
        assert answers(engine, 64, crowd=4) == wanted
