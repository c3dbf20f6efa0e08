"""The page on which workers say whether their cores are free. tests/engine/test_lent_cores.py has the borrowers."""

from contextlib import closing

import pytest

from service.core_board import CoreBoard
from service.startup import StartupError


def test_whoever_opens_the_board_sees_what_the_others_write():
    with closing(CoreBoard.make([(0,), (3, 1)])) as made, closing(CoreBoard.open(made.path)) as opened:
        before = made.path.read_bytes()
        opened.compute(1)
        assert made.path.read_bytes() != before
        made.rest(1)
        assert opened.path.read_bytes() == before


def test_a_worker_writes_only_where_cores_are_its_own():
    with closing(CoreBoard.make([(0,), (3, 1)])) as board:
        before = board.path.read_bytes()
        board.compute(1)
        lines = [
            each // 64
            for each, (a, b) in enumerate(zip(before, board.path.read_bytes(), strict=True))
            if a != b
        ]
        assert lines == [1, 3]


@pytest.mark.parametrize("what", ["nothing", "an empty file", "a folder"])
def test_what_is_no_board_is_refused_by_name(tmp_path, what):
    path = tmp_path / "board"
    if what == "an empty file":
        path.touch()
    if what == "a folder":
        path.mkdir()
    with pytest.raises(StartupError, match=f"--core-board: {path}"):
        CoreBoard.open(path)


@pytest.mark.parametrize(
    ("owners", "sole"),
    [
        ([(0,), (1,)], [True, True]),
        ([(0, 1), (2,), (2, 3)], [True, False, False]),
        ([(0,), (0,)], [False, False]),
    ],
)
def test_a_worker_is_told_whether_its_cores_are_its_own_alone(owners, sole):
    board = CoreBoard.make(owners)
    board.compute(0)
    assert [board.sole(seat) for seat in range(len(owners))] == sole
    board.close()
