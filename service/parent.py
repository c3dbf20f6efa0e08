"""A process that does not outlive the one that started it, even when that one is killed with SIGKILL.

Two witnesses: the kernel's parent-death signal (Linux), and the end of standard input, whose other end only
the parent holds. Neither asks the event loop, which may be stuck.
"""

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def die_with_parent(pipe: int | None = 0) -> None:
    """From now on this process is killed as soon as its parent is gone, and by nobody's Ctrl-C: the parent is who hears
    that. pipe: descriptor of the read end whose only write end the parent holds; None where the signal is to be the
    only witness. To be called from the main thread, before there are others."""
    os.setpgrp()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if pipe is not None:
        threading.Thread(target=_watch, args=(pipe,), name="parent-watch", daemon=True).start()


def _watch(pipe: int) -> None:
    while os.read(pipe, 4096):
        continue
    os.kill(os.getpid(), signal.SIGKILL)
