"""Whether an engine moves: a thread that computes, one that is idle, and one that hangs."""

import hashlib
import queue
import subprocess
import threading

import pytest

from service.pulse import (
    DEVICE_LOOKS_MAX,
    STILL_LOOKS_MAX,
    TURN_LOOKS_MAX,
    EngineThreads,
    Pulse,
    other_threads,
)


class Thread:
    """A step thread by hand: it answers what was posted when told to, and uses as much processor as it is told."""

    def __init__(self, *looks_max):
        self.posted, self.used_ns, self.starved = [], 0, False
        self.pulse = Pulse(self.posted.append, lambda: self.used_ns, lambda: self.starved, *looks_max)

    def turn(self):
        for action in self.posted:
            action()
        self.posted.clear()

    def looks(self, count):
        return [self.pulse.frozen() for _ in range(count)]


def test_an_idle_thread_that_answers_is_not_frozen():
    thread = Thread()
    for _ in range(3 * STILL_LOOKS_MAX):
        assert not thread.pulse.frozen()
        thread.turn()


def test_a_thread_in_a_long_step_is_not_frozen_and_is_asked_only_once():
    thread = Thread()
    for _ in range(10 * STILL_LOOKS_MAX):
        thread.used_ns += 1
        assert not thread.pulse.frozen()
    assert len(thread.posted) == 1


def test_a_thread_that_neither_computes_nor_answers_is_frozen_until_it_moves():
    thread = Thread()
    assert not any(thread.looks(STILL_LOOKS_MAX))
    assert all(thread.looks(5))
    thread.turn()
    assert thread.looks(2) == [False, False]


def test_a_thread_that_sleeps_until_its_device_is_done_is_given_more_time():
    thread = Thread(DEVICE_LOOKS_MAX)
    assert not any(thread.looks(DEVICE_LOOKS_MAX))
    assert thread.pulse.frozen()


def test_a_thread_that_gets_no_processor_is_not_frozen_until_it_could_have_moved():
    thread = Thread()
    thread.pulse.frozen()
    thread.starved = True
    assert not any(thread.looks(10 * STILL_LOOKS_MAX))
    thread.starved = False
    assert not any(thread.looks(STILL_LOOKS_MAX - 1))
    assert thread.pulse.frozen()


def test_not_even_want_of_processor_excuses_a_step_without_end():
    thread = Thread()
    thread.starved = True
    assert not any(thread.looks(TURN_LOOKS_MAX))
    assert thread.pulse.frozen()


@pytest.mark.timeout(60)
def test_a_helper_that_computes_is_told_from_one_that_waits():
    orders = queue.Queue()

    def help_out():
        while orders.get():
            hashlib.pbkdf2_hmac("sha256", b"long", b"work", 2_000_000)  # without the interpreter's lock

    before = other_threads()
    helper = threading.Thread(target=help_out, daemon=True)
    helper.start()
    (tid,) = other_threads() - before
    assert tid == helper.native_id
    threads = EngineThreads([tid])
    while threads.starved():  # until it waits for its first order
        pass
    orders.put(True)
    while not threads.starved():
        pass
    orders.put(False)
    while threads.starved():  # the kernel's thread ends a little after Python's
        helper.join()


def test_a_step_that_never_ends_is_no_step():
    thread = Thread()
    for _ in range(TURN_LOOKS_MAX):
        thread.used_ns += 1
        assert not thread.pulse.frozen()
    thread.used_ns += 1
    assert thread.pulse.frozen()


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("program", "starved"), [("while :; do :; done", True), ("exec sleep 60", False)])
def test_a_rank_of_another_process_that_computes_is_one_that_the_thread_waits_for(program, starved):
    with subprocess.Popen(["sh", "-c", program]) as other:
        threads = EngineThreads([other.pid])
        while threads.starved() != starved:
            assert other.poll() is None
        other.kill()
    assert not threads.starved(), "it is gone"


def test_the_clock_of_a_thread_moves_while_it_computes_and_stands_while_it_waits():
    clock, orders, said = EngineThreads(), queue.Queue(), queue.Queue()
    assert clock.used_ns() == 0

    def run():
        clock.start()
        while orders.get():
            sum(range(100_000))
            said.put(True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    orders.put(True)
    said.get()
    first = clock.used_ns()
    orders.put(True)
    said.get()
    assert clock.used_ns() > first
    orders.put(False)
    while clock.used_ns():  # the kernel's thread ends a little after Python's
        thread.join()
