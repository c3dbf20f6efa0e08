"""The step thread: actions between steps, in order; it stops, crashes and waits as it says."""

import itertools
import queue
import threading

import pytest

from engine.loop import EngineLoop, InboxFull
from engine.results import StepResult
from engine.scheduling.pace import Load

WAIT_S = 20


class ScriptedCore:
    """Idle until `work` is above 0; each step takes one off it, and is empty while `stuck`."""

    def __init__(self):
        self.work, self.stuck, self.steps = 0, False, 0
        self.took = []
        self.stepped = queue.Queue()

    def idle(self):
        return self.work == 0

    def step(self, now):
        self.steps += 1
        self.stepped.put(now)
        if self.stuck:
            return StepResult()
        self.work -= 1
        return StepResult(progress=("some",))

    def measured(self, load, seconds):
        self.took.append((load, seconds))


class Running:
    """A loop over a scripted core, and what it calls, in order."""

    def __init__(self, inbox_actions_max=1000, start=True, on_start=lambda: None, chore=lambda: False):
        self.core, self.calls, self.crashes = ScriptedCore(), [], queue.Queue()
        self.cores = []
        self.loop = EngineLoop(
            self.core,
            clock=lambda: 42.0,
            on_step=lambda result: self.calls.append(("step", result.empty())),
            on_turn=lambda steps: self.calls.append(("turn", steps)),
            on_crash=self.crashes.put,
            on_start=on_start,
            on_compute=lambda: self.cores.append("compute"),
            on_rest=lambda: self.cores.append("rest"),
            chore=chore,
            inbox_actions_max=inbox_actions_max,
        )
        if start:
            self.loop.start()

    def do(self, action):
        """Post an action and wait until it has run; returns the thread it ran on."""
        ran = queue.Queue()

        def run():
            action()
            ran.put(threading.current_thread())

        self.loop.post(run)
        return ran.get(timeout=WAIT_S)

    def set(self, **fields):
        self.do(lambda: [setattr(self.core, name, value) for name, value in fields.items()])


@pytest.fixture
def running():
    running = Running()
    yield running
    running.loop.stop()


def test_actions_run_on_the_step_thread_and_their_turn_is_told(running):
    threads = {running.do(lambda: None), running.do(lambda: None)}
    assert len(threads) == 1 and threads != {threading.current_thread()}
    running.loop.stop()
    assert running.calls == [("turn", 0), ("turn", 0)]


def test_there_are_steps_while_there_is_work_and_each_is_told_before_its_turn(running):
    running.set(work=3)
    assert [running.core.stepped.get(timeout=WAIT_S) for _ in range(3)] == [42.0] * 3
    running.loop.stop()
    assert running.loop.steps == running.core.steps == 3
    assert running.calls == [
        ("turn", 0),
        *(call for number in (1, 2, 3) for call in (("step", False), ("turn", number))),
    ]


@pytest.mark.parametrize("verb", ["post", "insist"])
def test_actions_of_one_thread_run_in_order_whoever_else_posts(verb):
    running = Running(inbox_actions_max=100_000)
    ran, ends = [], []

    def post(thread):
        for number in range(500):
            getattr(running.loop, verb)(lambda number=number: ran.append((thread, number)))

    posters = [threading.Thread(target=post, args=(name,)) for name in range(4)]
    for poster in posters:
        poster.start()
    for poster in posters:
        poster.join()
    running.do(lambda: ends.append(True))
    running.loop.stop()
    for name in range(4):
        assert [number for thread, number in ran if thread == name] == list(range(500))


def test_a_step_does_not_begin_before_what_was_posted_is_done(running):
    """Both are on one thread; an action that was posted during a step runs before the next."""
    order, posted = [], threading.Event()
    step = running.core.step

    def noted_step(now):
        order.append("step")
        if len(order) == 1:
            running.loop.post(lambda: order.append("action"))
            posted.set()
        return step(now)

    running.core.step = noted_step
    running.set(work=2)
    assert posted.wait(WAIT_S)
    for _ in range(2):
        running.core.stepped.get(timeout=WAIT_S)
    assert order == ["step", "action", "step"]


def test_a_stuck_engine_waits_for_an_action_and_does_not_spin(running):
    running.set(work=1, stuck=True)
    running.core.stepped.get(timeout=WAIT_S)
    for tries in range(2, 6):
        running.do(lambda: None)
        running.core.stepped.get(timeout=WAIT_S)
        assert running.core.steps == tries, "one try for each action"
    running.set(stuck=False)
    running.core.stepped.get(timeout=WAIT_S)
    running.loop.stop()
    assert running.core.stepped.empty() and running.core.idle()


def test_it_says_when_it_computes_and_when_it_rests():
    """Rests before it waits, and while it does nothing but actions; computes from the next step on, said once."""
    running = Running()
    running.do(lambda: None)
    running.set(work=3)
    for _ in range(3):
        running.core.stepped.get(timeout=WAIT_S)
    while running.cores[-1] != "rest":
        running.do(lambda: None)
    running.loop.stop()
    assert running.cores.count("compute") == 1
    said = [each for n, each in enumerate(running.cores) if n == 0 or running.cores[n - 1] != each]
    assert said == ["rest", "compute", "rest"]


def test_a_full_inbox_refuses_what_can_be_refused():
    running = Running(inbox_actions_max=2, start=False)
    ran, done = [], threading.Event()
    for number in range(2):
        running.loop.post(lambda number=number: ran.append(number))
    with pytest.raises(InboxFull, match="2 actions"):
        running.loop.post(lambda: ran.append("refused"))
    running.loop.insist(lambda: ran.append("insisted"))
    running.loop.insist(done.set)
    running.loop.start()
    assert done.wait(WAIT_S)
    running.do(lambda: None)
    running.loop.stop()
    assert ran == [0, 1, "insisted"]


@pytest.mark.parametrize("what", ["an action", "a step", "the start"])
def test_a_mistake_on_the_thread_is_told_once_and_ends_it(what):
    mistake = ZeroDivisionError(what)

    def fail(*_):
        raise mistake

    running = Running(on_start=fail if what == "the start" else lambda: None)
    if what == "an action":
        running.loop.post(fail)
    if what == "a step":
        running.core.step = fail
        running.set(work=1)
    assert running.crashes.get(timeout=WAIT_S) is mistake
    running.loop.post(lambda: running.calls.append("ran after the crash"))
    running.loop.stop()
    assert running.crashes.empty()
    assert "ran after the crash" not in running.calls


def test_stopping_ends_the_thread_whether_it_waits_or_works():
    for work in (0, 1_000_000):
        running = Running()
        running.set(work=work)
        running.loop.stop()
        assert running.core.work == work - running.core.steps > -1
        assert running.core.steps < 1_000_000


def test_chores_are_done_at_rest_until_none_is_left_and_work_goes_before_the_next_one():
    begun, go_on, left = queue.Queue(), queue.Queue(), iter([True, True, False])

    def chore():
        begun.put(None)
        go_on.get(timeout=WAIT_S)
        return next(left)

    running = Running(chore=chore)
    begun.get(timeout=WAIT_S)
    running.loop.post(lambda: setattr(running.core, "work", 2))
    go_on.put(None)  # the first chore ends with two steps to do
    begun.get(timeout=WAIT_S)
    assert running.core.steps == 2
    for _ in range(2):
        go_on.put(None)
    begun.get(timeout=WAIT_S)
    running.set(work=1)
    running.loop.stop()
    assert begun.empty() and running.core.steps == 3


def test_a_loop_that_is_told_to_stop_leaves_its_chores():
    done, stopping = [], threading.Event()

    def chore():
        done.append(None)
        stopping.set()
        return True

    running = Running(chore=chore)
    assert stopping.wait(WAIT_S)
    running.loop.stop()
    assert done and running.crashes.empty()


def test_what_the_device_computed_beside_other_things_is_timed_from_the_end_of_the_step_before():
    """A second passes at each look at the clock, ten while a step is told and a hundred in a step."""
    now, loads = itertools.count().__next__, [None, Load(4, 0), Load(0, 16), Load(1, 0), None]
    late, core = [0], ScriptedCore()
    core.work = len(loads)

    def step(began):
        late[0] += 100
        load = loads[len(loads) - core.work]
        core.work -= 1
        return StepResult(progress=("some",), load=load, overlapped=load == Load(0, 16) or load == Load(1, 0))

    core.step = step
    loop = EngineLoop(
        core,
        clock=lambda: now() + late[0],
        on_step=lambda result: late.__setitem__(0, late[0] + 10),
        on_turn=lambda steps: None,
        on_crash=lambda crash: None,
        inbox_actions_max=1,
    )
    while loop.due():
        loop.turn()
    assert core.took == [(Load(4, 0), 101), (Load(0, 16), 112), (Load(1, 0), 112)]
