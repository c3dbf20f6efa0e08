"""What a process asks of its machine."""

import ctypes
import os
import platform
import struct
import threading

import pytest

from service.machine import SLICE_S, compute_in_long_slices, free_memory_bytes

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}.get(platform.machine())


def slice_s():
    """Of this thread, as the system has it."""
    attributes = ctypes.create_string_buffer(48)
    if SCHED_GETATTR is None:
        pytest.skip("the number of sched_getattr(2) is not known for this processor")
    assert ctypes.CDLL(None).syscall(SCHED_GETATTR, 0, attributes, 48, 0) == 0
    return struct.unpack("IIQiIQQQ", attributes.raw)[5] / 1e9


def in_a_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_that_computes_and_those_it_starts_have_long_slices_and_no_other_thread():
    before = slice_s()
    if before == 0.0:
        pytest.skip("this system has no slices of one's own")

    def compute():
        assert compute_in_long_slices()
        return slice_s(), in_a_thread(slice_s)

    assert in_a_thread(compute) == (SLICE_S, SLICE_S)
    assert slice_s() == before < SLICE_S


def test_nice_is_kept_with_a_long_slice():
    def compute():
        os.nice(5)
        compute_in_long_slices()
        return os.nice(0)

    assert in_a_thread(compute) == os.nice(0) + 5


@pytest.fixture
def machine(tmp_path):
    """Writes what the system says of memory; asks for what is free of it."""

    def say(available_kib, group="/", **groups):
        (tmp_path / "self").mkdir(exist_ok=True)
        (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available_kib} kB\n")
        (tmp_path / "self/cgroup").write_text(f"0::{group}\n")
        for name, (limit, current, inactive) in groups.items():
            folder = tmp_path / "groups" / name.replace("_", "/").strip("/")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "memory.max").write_text(f"{limit}\n")
            (folder / "memory.current").write_text(f"{current}\n")
            (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")
        return free_memory_bytes(tmp_path, tmp_path / "groups")

    return say


def test_free_memory_is_what_the_machine_has_where_no_group_has_a_limit(machine):
    assert machine(4, "/") == 4096
    assert machine(4, "/a/b", a=("max", 10, 0), a_b=("max", 10, 0)) == 4096


@pytest.mark.parametrize(
    ("groups", "left"),
    [
        ({"a_b": (3000, 1000, 0)}, 2000),
        ({"a_b": (3000, 1000, 400)}, 2400),
        ({"a": (1500, 1000, 0), "a_b": (3000, 1000, 0)}, 500),
        ({"_": (1200, 1000, 0), "a_b": (3000, 1000, 0)}, 200),
        ({"a_b": (3000, 3500, 0)}, 0),
    ],
)
def test_free_memory_is_what_the_narrowest_group_leaves(machine, groups, left):
    assert machine(4, "/a/b", **groups) == left


def test_free_memory_of_this_machine_is_a_number_of_bytes():
    assert 0 < free_memory_bytes() < 1 << 60
