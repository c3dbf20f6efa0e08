"""What an operator hears of a start: nothing of a quick one, a line a second of a slow one."""

from engine.progress import Progress


class Clock:
    def __init__(self):
        self.now = 5.0

    def __call__(self):
        return self.now


def heard(seconds_per_item, items=10):
    clock, said = Clock(), []
    progress = Progress(said.append, clock)
    for _ in progress.over(range(items), "loading layer", items):
        clock.now += seconds_per_item
    return said


def test_a_quick_start_is_silent():
    assert heard(0.05) == []


def test_a_slow_start_tells_how_far_it_is_once_a_second():
    assert heard(0.25) == ["loading layer 5 of 10", "loading layer 9 of 10"]


def test_every_item_comes_through():
    assert list(Progress([].append, Clock()).over("abc", "letter", 3)) == ["a", "b", "c"]


def test_what_takes_long_is_said_at_once_and_counts_as_said():
    clock, said = Clock(), []
    progress = Progress(said.append, clock)
    progress.begin("compiling")
    clock.now += 0.9
    list(progress.over(range(2), "loading layer", 2))
    assert said == ["compiling"]
