"""A process that serves: no collection within a step, and none of what start-up made; cycles go all the same."""

import gc
import weakref

import pytest

from service.garbage import YOUNG_OBJECTS_MAX, freeze_garbage

STEP_OBJECTS = 256 * 8


@pytest.fixture(autouse=True)
def frozen():
    thresholds = gc.get_threshold()
    freeze_garbage()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.fixture
def collections():
    seen = []

    def see(phase, info):
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(see)
    yield seen
    gc.callbacks.remove(see)


class Knot:
    def __init__(self):
        self.self = self


def test_what_start_up_made_is_frozen():
    assert gc.get_freeze_count() > 10_000


def test_what_a_step_makes_and_drops_starts_no_collection(collections):
    gc.collect()
    collections.clear()
    for _ in range(50):
        alive = [(number,) for number in range(STEP_OBJECTS)]
        del alive
    assert collections == []


def test_cycles_are_collected_while_there_is_work():
    gone = weakref.ref(Knot())
    knots = 0
    while gone() is not None:
        Knot()
        knots += 1
        assert knots <= 2 * YOUNG_OBJECTS_MAX
