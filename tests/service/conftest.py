"""Small programs that stand in for our processes, and how to wait for a process's end."""

import os
import select
import sys

import pytest


class Programs:
    """Command lines of fake children. Each is one Python program given on the command line."""

    # SIGTERM is blocked, so that one which comes before `sigwait` is not lost on the default action.
    _HEAD = (
        "import os, signal, sys\n"
        "from service import parent, readiness\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
    )

    def argv(self, body: str) -> tuple[str, ...]:
        return (sys.executable, "-c", self._HEAD + body)

    def ready_until_sigterm(self, **fields) -> tuple[str, ...]:
        """Ties itself to its parent, says its process id, and ends when asked."""
        return self.argv(
            "parent.die_with_parent()\n"
            f"readiness.announce({{'pid': os.getpid(), **{fields!r}}})\n"
            "signal.sigwait({signal.SIGTERM})\n"
        )


@pytest.fixture
def programs() -> Programs:
    return Programs()


@pytest.fixture
def wait_for_exit():
    """Waits until a process that need not be our child is gone. Fails after the given seconds."""

    def wait(pid: int, seconds: float) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            ended, _, _ = select.select([descriptor], [], [], seconds)
        finally:
            os.close(descriptor)
        assert ended, f"process {pid} still lives after {seconds} s"

    return wait
