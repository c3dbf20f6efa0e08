"""What a worker process does when one of its threads makes a mistake."""

import subprocess
import sys

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
