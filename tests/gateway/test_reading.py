"""What is long is read on threads of its own, and tenants take turns."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from gateway.reading import INLINE_BYTES_MAX, Reading

LONG = INLINE_BYTES_MAX + 1
WAIT_S = 30.0


class Desk:
    """Work of tenants on one thread. begun: whose, in order; each is done when the test says so."""

    def __init__(self, **named):
        self.reading = Reading(threads=1, **named)
        self.begun, self.tasks = [], []
        self._started, self._go_on = threading.Semaphore(0), threading.Semaphore(0)

    def ask(self, tenant, size_bytes=LONG):
        def work():
            self.begun.append(tenant)
            self._started.release()
            assert self._go_on.acquire(timeout=WAIT_S)
            return tenant

        asked = self.reading.run(work, tenant=tenant, size_bytes=size_bytes)
        self.tasks.append(asyncio.create_task(asked))
        return self.tasks[-1]

    async def one_has_begun(self):
        assert await asyncio.to_thread(self._started.acquire, timeout=WAIT_S)

    async def finish(self, count):
        """So many, one after the other."""
        for _ in range(count):
            await self.one_has_begun()
            self._go_on.release()


@asynccontextmanager
async def desk_of(**named):
    desk = Desk(**named)
    yield desk
    await asyncio.gather(*desk.tasks, return_exceptions=True)


async def test_a_tenant_that_asks_for_much_does_not_make_another_one_wait_behind_it():
    async with desk_of() as desk:
        for _ in range(9):
            desk.ask("greedy")
        modest = desk.ask("modest")
        await desk.finish(3)
        assert await modest == "modest" and desk.begun.index("modest") <= 2
        await desk.finish(7)


async def test_turns_are_of_bytes_and_by_weight():
    async with desk_of(weight=lambda tenant: {"heavy": 4.0}.get(tenant, 1.0)) as desk:
        for _ in range(12):
            desk.ask("heavy")
            desk.ask("light")
            desk.ask("long", 3 * LONG)
        await desk.finish(36)
        first = desk.begun[:18]
        assert first.count("heavy") > 2 * first.count("light") > 2 * first.count("long")


async def test_who_leaves_while_it_waits_is_not_read():
    async with desk_of() as desk:
        desk.ask("a")
        await asyncio.sleep(0)
        leaving = desk.ask("gone")
        await asyncio.sleep(0)
        leaving.cancel()
        desk.ask("b")
        await desk.finish(2)
        await asyncio.gather(*desk.tasks, return_exceptions=True)
        assert desk.begun == ["a", "b"]


async def test_a_thread_whose_asker_has_left_is_free_when_it_is_done_and_not_before():
    async with desk_of() as desk:
        leaving = desk.ask("gone")
        await desk.one_has_begun()
        leaving.cancel()
        desk.ask("next")
        await asyncio.gather(leaving, return_exceptions=True)
        assert desk.begun == ["gone"]
        desk._go_on.release()
        await desk.finish(1)
        assert await desk.tasks[-1] == "next"


@pytest.mark.parametrize("size_bytes", [0, LONG])
async def test_what_the_work_raises_its_asker_hears(size_bytes):
    reading = Reading()
    with pytest.raises(ZeroDivisionError):
        await reading.run(lambda: 1 // 0, tenant="", size_bytes=size_bytes)
    assert await reading.run(lambda: 1, tenant="", size_bytes=size_bytes) == 1


async def test_what_is_short_is_read_at_once():
    here = threading.get_ident()
    assert await Reading().run(threading.get_ident, tenant="", size_bytes=INLINE_BYTES_MAX) == here
    assert await Reading().run(threading.get_ident, tenant="", size_bytes=LONG) != here
