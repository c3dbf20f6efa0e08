"""What a worker process does when one of its threads makes a mistake, and what it promises of its machine."""

import os
import subprocess
import sys

from service.startup import EXIT_CODE
from service.worker_process import EXIT_CRASHED


def test_a_thread_that_ends_by_a_mistake_ends_the_process_and_says_so():
    program = (
        "import threading\n"
        "from service.worker_process import crash_with_any_thread\n"
        "crash_with_any_thread()\n"
        "threading.Thread(target=lambda: 1 / 0).start()\n"
        "threading.Event().wait()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == EXIT_CRASHED
    assert "a thread crashed" in ended.stdout + ended.stderr
    assert "ZeroDivisionError" in ended.stdout + ended.stderr


def test_a_worker_promises_no_more_than_its_share_of_the_free_memory(tmp_path):
    flags = [f"--listen=unix:{tmp_path}/grpc", "--worker-id=a", "--host-memory-share=1e-12"]
    ended = subprocess.run(
        [sys.executable, "-m", "commands.main", "prefill-worker", *flags],
        env=os.environ | {"CROSSDOCK_TICKET_KEY": "ab" * 32},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == EXIT_CODE
    assert "0 bytes for the KV cache hold no block" in ended.stderr
