"""How old a token is with nothing between worker and client: what the gateway's own share is measured against.

    python -m benchmarks.echo FOLDER --decode 4 --step-ms 5

Answers every call with the tokens of null workers' steps, straight to the connection that it came on, one message for
each stream and step. HTTP/2 by hand, as `raw_client` speaks it. Prints its address when it serves, and ends with its
standard input.
"""

import argparse
import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from struct import Struct
from typing import Any

from benchmarks.null_workers import StepTimes, on_the_beat, run
from benchmarks.raw_client import RawClient
from crossdock.v1 import inference_pb2 as pb

_DATA, _SETTINGS, _ACK, _END_STREAM = 0, 4, 1, 1
_FRAME = Struct(">HBBBI")
_MESSAGE = Struct(">BI")
_PREFACE_BYTES = 24


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _FRAME.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload


class _Connection(RawClient):
    """The other end of one. on_call: gets the connection and the stream of each call that is asked."""

    def __init__(self, on_call: Callable[["_Connection", int], None]) -> None:
        super().__init__(lambda message: None)
        self._on_call = on_call
        self._preface_left = _PREFACE_BYTES

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.write(_frame(_SETTINGS, 0, 0, b""))

    def data_received(self, data: bytes) -> None:
        skipped = min(self._preface_left, len(data))
        self._preface_left -= skipped
        super().data_received(data[skipped:])

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def _frame_received(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA and flags & _END_STREAM:
            self._on_call(self, stream)
        elif kind == _SETTINGS and not flags & _ACK:
            self.write(_frame(_SETTINGS, _ACK, 0, b""))


class _Worker:
    """Streams by connection, and a token for each of them in every step."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self.streams: defaultdict[_Connection, list[int]] = defaultdict(list)

    def step(self) -> None:
        token_id = self._times.begin()
        said = pb.GenerateStreamResponse(deltas=[pb.SequenceDelta(token_ids=[token_id])]).SerializeToString()
        said = _MESSAGE.pack(0, len(said)) + said
        for connection, streams in self.streams.items():
            connection.write(b"".join(_frame(_DATA, 0, stream, said) for stream in streams))


async def _serve(options: argparse.Namespace) -> None:
    times = StepTimes(options.folder / "steps")
    workers = [_Worker(times) for _ in range(options.decode)]
    calls = 0

    def begin(connection: _Connection, stream: int) -> None:
        nonlocal calls
        workers[calls % len(workers)].streams[connection].append(stream)
        calls += 1

    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(begin), "127.0.0.1", 0)
    stepping = on_the_beat(workers, options.step_ms / 1000)
    host, port = server.sockets[0].getsockname()
    print(json.dumps({"grpc": f"{host}:{port}"}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in stepping:
        task.cancel()
    server.close()


if __name__ == "__main__":
    run(_serve, __doc__)
