"""Starting, refusing to start, and ending."""

import os
import select
import signal
import subprocess
import sys

import pytest

from tests.e2e.conftest import ROOT, running_stack


def serve(*flags):
    argv = [sys.executable, "-m", "commands.main", "serve", "--grpc-port", "0", "--http-port", "0", *flags]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\x00" * 4096, b"GGUF\x03\x00\x00\x00" + b"\xff" * 64])
def test_an_unreadable_model_file_is_one_clear_line_and_exit_code_2(tmp_path, content):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content)
    done = serve("--model", str(broken))
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1 and "broken.gguf" in lines[0], done.stderr
    assert done.stdout == ""


def test_an_unknown_model_is_one_clear_line_and_exit_code_2():
    done = serve("--model", "no-such-model")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and "no-such-model" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_when_serve_ends_by_any_signal_its_children_are_gone(number):
    with running_stack("--num-gpu-blocks-override", "64") as stack:
        pids = stack.children()
        assert set(pids) == {"gateway", "prefill-0", "decode-0"}
        watched = [os.pidfd_open(pid) for pid in pids.values()]
        stack.process.send_signal(number)
        code = stack.process.wait(timeout=20)
        for descriptor in watched:
            gone(descriptor)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 0)


def gone(descriptor, timeout_s=20):
    """Wait until the process behind a pidfd has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(timeout_s * 1000), "still running"
    os.close(descriptor)
