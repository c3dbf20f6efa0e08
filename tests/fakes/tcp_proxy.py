"""A TCP link whose weather can be changed while it is in use: slow, thin, silent, cut.

Stands between two ends that know nothing of it, on a thread of its own, so that a busy test does not stall it. Reads
no byte of what it carries.
"""

import asyncio
import threading
from contextlib import suppress

CHUNK_BYTES = 64 * 1024
CHUNKS_MAX = 4096
"""Under way in one direction of one connection: what a long link holds. Then its sender is read no more."""


class Lane:
    """One direction. delay_s: how much later a byte comes out; bytes_per_s: None for all that fit.

    Nothing comes out of a held lane, and nothing goes in: a link that is dead, and that TCP keeps alive. What was
    under way comes out when it is let go. stuck: set while bytes wait in a held lane."""

    def __init__(self, loop):
        self.delay_s = 0.0
        self.bytes_per_s = None
        self.stuck = threading.Event()
        self._loop = loop
        self._open = asyncio.Event()
        self._open.set()

    def hold(self):
        self._do(self._open.clear)

    def let_go(self):
        self._do(self._open.set)

    def clear_up(self):
        """Fair weather."""
        self.delay_s, self.bytes_per_s = 0.0, None
        self.let_go()

    async def carry(self, reader, writer):
        """From one socket to the other, until either is gone."""
        under_way = asyncio.Queue(CHUNKS_MAX)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._let_out(under_way, writer))
            while data := await reader.read(CHUNK_BYTES):
                await under_way.put((self._loop.time() + self.delay_s, data))
                await self._wait_open()
                if self.bytes_per_s is not None:
                    await asyncio.sleep(len(data) / self.bytes_per_s)
            raise ConnectionResetError

    async def _let_out(self, under_way, writer):
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(due - self._loop.time())
            await self._wait_open()
            writer.write(data)
            await writer.drain()

    async def _wait_open(self):
        if not self._open.is_set():
            self.stuck.set()
            await self._open.wait()
            self.stuck.clear()

    def _do(self, change):
        """Make a change on the loop; it is made when this returns."""
        made = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (change(), made.set()))
        made.wait()


class TcpProxy:
    """target: (host, port) that connections go on to; may be set later than the first of them is awaited.

    forth: from who dialled to the target; back: the other way."""

    def __init__(self):
        self.target = None
        self._loop = asyncio.new_event_loop()
        self.forth, self.back = Lane(self._loop), Lane(self._loop)
        self._connections = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._connect, "127.0.0.1", 0))
        self.address = self._server.sockets[0].getsockname()

    def hold(self):
        """Nothing passes any more, in either direction."""
        self.forth.hold()
        self.back.hold()

    def clear_up(self):
        """Fair weather in both directions."""
        self.forth.clear_up()
        self.back.clear_up()

    def cut(self):
        """Break every connection; new ones may come. What was under way is lost."""
        self._run(self._cut())

    def close(self):
        self._server.close()
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _connect(self, reader, writer):
        task = asyncio.current_task()
        self._connections.add(task)
        writers = [writer]
        try:
            with suppress(OSError, ExceptionGroup):
                far_reader, far_writer = await asyncio.open_connection(*self.target)
                writers.append(far_writer)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self.forth.carry(reader, far_writer))
                    tasks.create_task(self.back.carry(far_reader, writer))
        finally:
            for each in writers:
                each.transport.abort()
            self._connections.discard(task)

    async def _cut(self):
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)
