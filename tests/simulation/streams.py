"""The streams between gateways and workers, as gRPC over TCP gives them: in order, nothing lost, but late; and a
broken one is broken for good, with an unknown part of what was under way on either side of the break.

Stands for the channel, the call and the servicer's context. The coroutines at both ends are production's.
"""

from collections import deque

import grpc

_OPENED = object()
_ENDED = object()
_BROKEN = object()


class Streams:
    """All streams of a history. latency_s: mean, one way."""

    def __init__(self, agenda, dice, latency_s):
        self.agenda = agenda
        self.open = []
        self._dice = dice
        self._latency_s = latency_s
        self._slowed = {}

    def latency(self):
        return self._latency_s * 2 * self._dice.random()

    def delay(self, stream):
        until, seconds = self._slowed.get((stream.gateway.name, stream.worker.name), (0.0, 0.0))
        return self.latency() + (seconds if self.agenda.now < until else 0.0)

    def slow(self, gateway, worker, seconds, for_s):
        """Everything between a gateway and a worker takes so much longer for a while."""
        self._slowed[gateway, worker] = (self.agenda.now + for_s, seconds)

    def between(self, gateway, worker):
        return [each for each in self.open if (each.gateway.name, each.worker.name) == (gateway, worker)]

    def of(self, process):
        return [each for each in self.open if process in (each.gateway, each.worker)]

    def cut(self, stream, gateway_s, worker_s):
        """Break a stream; each end notices after its own time, and gets some of what was under way before."""
        stream.down.cut(gateway_s, self._dice)
        stream.up.cut(worker_s, self._dice)
        if stream in self.open:
            self.open.remove(stream)


class Channel:
    """Stands for a grpc.aio.Channel. find_worker: the process that listens, or None."""

    def __init__(self, streams, gateway, find_worker):
        self._streams = streams
        self._gateway = gateway
        self._find_worker = find_worker

    def attach(self, requests):
        return Call(self._streams, self._gateway, self._find_worker(), requests)

    async def close(self):
        pass


class Call:
    """Stands for the gateway's end of a call."""

    def __init__(self, streams, gateway, worker, requests):
        self._streams = streams
        self._stream = stream = Stream(streams, gateway, worker)
        self._pump = gateway.loop.create_task(self._send(requests))
        gateway.pipes.append(stream.down)
        if worker is None:
            stream.up.cut_off = True
            stream.down.cut(streams.latency(), None)
        else:
            streams.open.append(stream)
            worker.pipes.append(stream.up)
            stream.up.put(_OPENED)

    def __aiter__(self):
        return self

    async def __anext__(self):
        message = await self._stream.down.take()
        if message is _BROKEN:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "the stream broke")
        if message is _ENDED:
            raise StopAsyncIteration
        return message

    def cancel(self):
        """Give the call up. The worker notices a little later; when this process is dead, the kernel tells it."""
        self._pump.cancel()
        if self._stream in self._streams.open and self._stream.gateway.alive:
            self._streams.cut(self._stream, 0.0, self._streams.latency())

    async def _send(self, requests):
        async for request in requests:
            self._stream.up.put(request)


class Stream:
    """up: to the worker, down: to the gateway."""

    def __init__(self, streams, gateway, worker):
        self.gateway = gateway
        self.worker = worker
        self.up = Pipe(streams, self, worker)
        self.down = Pipe(streams, self, gateway)
        self.handler = None


class Pipe:
    """One direction. reader: the process that it leads to."""

    def __init__(self, streams, stream, reader):
        self.stream = stream
        self.cut_off = False
        self._streams = streams
        self._reader = reader
        self._under_way = deque()
        self._arrived = deque()
        self._waiter = None
        self._last = 0.0

    def put(self, message):
        if self.cut_off:
            return
        streams = self._streams
        self._last = max(self._last, streams.agenda.now + streams.delay(self.stream))
        self._under_way.append((self._last, message))
        self._reader.loop_thread.wake(self._last)

    def cut(self, seconds, dice):
        """Nothing more gets in; part of what is under way still arrives, and then the break."""
        if self.cut_off:
            return
        self.cut_off = True
        kept = dice.randint(0, len(self._under_way)) if self._under_way else 0
        while len(self._under_way) > kept:
            self._under_way.pop()
        last = self._under_way[-1][0] if self._under_way else 0.0
        at = max(last, self._streams.agenda.now + seconds)
        self._under_way.append((at, _BROKEN))
        self._reader.loop_thread.wake(at)

    def arrive(self, now):
        """In a turn of the reader's event loop: what is due is there. False when nothing more will come."""
        while self._under_way and self._under_way[0][0] <= now:
            _, message = self._under_way.popleft()
            if message is _OPENED:
                self._reader.serve(self.stream)
            elif message is _BROKEN and self.stream.handler is not None and self is self.stream.up:
                # gRPC does so more than once.
                self.stream.handler.cancel()
                self._reader.loop.call_soon(self.stream.handler.cancel)
            else:
                self._arrived.append(message)
        if self._arrived and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        return bool(self._under_way) or not self.cut_off

    def next_arrival(self):
        return self._under_way[0][0] if self._under_way else None

    async def take(self):
        while not self._arrived:
            self._waiter = self._reader.loop.create_future()
            await self._waiter
        return self._arrived.popleft()

    def end(self):
        """The writer has ended the stream in good order."""
        if not self.cut_off:
            self.put(_ENDED)
            self.cut_off = True

    def __aiter__(self):
        return self

    async def __anext__(self):
        message = await self.take()
        if message is _BROKEN or message is _ENDED:
            raise StopAsyncIteration
        return message


class Aborted(Exception):
    """The servicer ended its call with a status."""


class Context:
    """Stands for the servicer's context."""

    def __init__(self, stream):
        self._stream = stream

    async def send_initial_metadata(self, metadata):
        pass

    async def write(self, message):
        self._stream.down.put(message)

    def trailing_metadata(self):
        return ()

    async def abort(self, code, detail, trailing_metadata=()):
        raise Aborted(f"{code.name}: {detail}")
