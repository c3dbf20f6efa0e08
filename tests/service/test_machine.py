"""What a process asks of its machine."""

import ctypes
import os
import platform
import struct
import threading

import pytest

from service.machine import SLICE_S, compute_in_long_slices

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
