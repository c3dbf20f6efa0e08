"""What a worker process does when one of its threads makes a mistake, or stands still."""

import asyncio
import subprocess
import sys
from types import SimpleNamespace

from service.worker_process import EXIT_CRASHED, watch_pulse


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


async def test_an_engine_that_stands_still_is_told_to_health_and_gateways_and_so_is_that_it_moves_again():
    looks, told = [False, True, True, False], asyncio.Queue()

    async def set_ready(ready):
        told.put_nowait((ready, rim.frozen))

    rim = SimpleNamespace(frozen=False)
    pulse = SimpleNamespace(frozen=lambda: looks.pop(0) if len(looks) > 1 else looks[0])
    watching = asyncio.create_task(watch_pulse(pulse, rim, SimpleNamespace(set_ready=set_ready)))
    async with asyncio.timeout(10):
        assert [await told.get(), await told.get()] == [(False, True), (True, False)]
    watching.cancel()
