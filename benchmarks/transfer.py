"""How fast the KV of one prompt goes from one process to another, and what share of a bare send that is.

    python -m benchmarks.transfer [--tokens 4096] [--rounds 15] [--kinds shm ipc tcp]

A round hands all blocks of the default model's prompt over, digests and all, and then sends the same bytes over the
same transport without tickets, digests or credits: over ZeroMQ from socket to socket into the receiver's messages,
through shared memory into the staging ring and out of it into the receiver's memory. Prints medians, in 10^9 bytes a
second, and the load of the machine, which should be otherwise idle.
"""

import argparse
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import zmq

from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from kvtransfer import events
from kvtransfer.assembly import TransportWishes, source_transport, target_transport
from kvtransfer.identity import Identity
from kvtransfer.shm_transport import ShmConnection, ShmSourceTransport, ShmTargetTransport
from kvtransfer.source_endpoint import TransferSource
from kvtransfer.target_endpoint import TransferTarget
from kvtransfer.ticket import Ticket, mint, seal
from kvtransfer.transport import Arrival, LinkStatus
from service.machine import KEPT_BYTES, keep_freed_memory, take_short_turns

KEY = bytes(32)
SOURCE = Identity(worker_id="source", epoch=1)
TARGET = Identity(worker_id="target", epoch=2)
CHUNK_TOKENS = 256
LEASE_MS = 10_000
WARM_UP_ROUNDS = 3
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def layout_of(dtype: str) -> KVLayout:
    """SmolLM2-135M."""
    return KVLayout(model_digest="m", layers=30, kv_heads=3, head_dim=64, block_size=16, dtype=DTYPES[dtype])


def filled_cache(layout: KVLayout, blocks: int, value: int) -> KVCache:
    """All its memory is there: a worker's cache has been written before."""
    cache = KVCache(layout, blocks)
    cache.tensor.fill_(value)
    return cache


def receive(pipe: Connection, kind: str, dtype: str, blocks: int, folder: str) -> None:
    """The other process: gets a ticket and takes a transfer, gets None and takes a bare send, gets False and ends."""
    keep_freed_memory(KEPT_BYTES)
    take_short_turns()
    cache = filled_cache(layout_of(dtype), blocks, 1)
    places = [cache.block_view(index) for index in range(blocks)]
    with receiving(cache, kind, places, folder) as target, bare_receiver(kind, places, folder) as bare:
        pipe.send((target.endpoints(), bare.endpoint))
        while (order := pipe.recv()) is not False:
            if order is None:
                pipe.send(True)
                bare.take()
            else:
                target.expect(order)
                pipe.send(True)


@contextmanager
def receiving(cache: KVCache, kind: str, places: list[memoryview], folder: str) -> Iterator[TransferTarget]:
    def emit(event: events.TargetEvent) -> None:
        match event:
            case events.Opened():
                target.bind(event.ticket_id, places)
            case events.Received():
                target.commit(event.ticket_id)
            case events.Failed():
                raise AssertionError(event)

    wishes = TransportWishes(block_bytes=cache.layout.block_bytes(), shared_memory=kind == "shm")
    target = TransferTarget(
        identity=TARGET,
        layout=cache.layout,
        key=KEY,
        transport=target_transport(wishes, TARGET, binds(kind, folder, "full"), os.urandom),
        emit=emit,
        clock=time.monotonic,
    )
    target.start()
    yield target
    target.close()


def binds(kind: str, folder: str, name: str) -> list[str]:
    return {"shm": [], "ipc": [f"ipc://{folder}/{name}"], "tcp": ["tcp://127.0.0.1:0"]}[kind]


class BareZmqReceiver:
    def __init__(self, address: str, blocks: int) -> None:
        self._blocks = blocks
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def take(self) -> None:
        for _ in range(self._blocks):
            name, *_ = self._socket.recv_multipart(copy=False)
        self._socket.send_multipart((name.bytes, b"done"))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class BareZmqSender:
    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def give(self, blocks: list[memoryview]) -> None:
        for block in blocks:
            self._socket.send_multipart((bytes(64), block), copy=False)
        assert self._socket.recv() == b"done"

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class BareShmReceiver:
    def __init__(self, places: list[memoryview]) -> None:
        self._places = places
        self._transport = ShmTargetTransport(f"bare-{os.getpid()}", places[0].nbytes)
        (self.endpoint,) = self._transport.endpoints()

    def take(self) -> None:
        for place in self._places:
            while not isinstance(arrival := self._transport.receive(), Arrival) or not arrival.payloads:
                self._transport.wait(1.0)
            np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(arrival.payloads[0], np.uint8))
            peer = arrival.peer
        self._transport.receive()
        self._transport.send(peer, b"done")

    def close(self) -> None:
        self._transport.close()


class BareShmSender:
    def __init__(self, endpoint: str) -> None:
        self._transport = ShmSourceTransport()
        self._connection: ShmConnection = self._transport.dial(endpoint, SOURCE, TARGET)

    def give(self, blocks: list[memoryview]) -> None:
        while self._connection.status() is not LinkStatus.UP:
            self._transport.wait(1.0)
        for block in blocks:
            while not self._connection.send(bytes(64), (block,)):
                self._transport.wait(1.0)
                assert self._connection.receive() is None
        while self._connection.receive() != b"done":
            self._transport.wait(1.0)

    def close(self) -> None:
        self._transport.close()


@contextmanager
def bare_receiver(
    kind: str, places: list[memoryview], folder: str
) -> Iterator[BareZmqReceiver | BareShmReceiver]:
    over_zmq = kind != "shm"
    bare = (
        BareZmqReceiver(binds(kind, folder, "bare")[0], len(places)) if over_zmq else BareShmReceiver(places)
    )
    yield bare
    bare.close()


class Sender:
    """This process: times both ways of sending. seconds: per round."""

    def __init__(self, pipe: Connection, kind: str, dtype: str, blocks: int) -> None:
        self._pipe = pipe
        self._cache = filled_cache(layout_of(dtype), blocks, 2)
        self._blocks = [self._cache.block_view(index) for index in range(blocks)]
        self._endpoints, bare_endpoint = pipe.recv()
        self._bare = BareShmSender(bare_endpoint) if kind == "shm" else BareZmqSender(bare_endpoint)
        self._events: queue.SimpleQueue[events.SourceEvent] = queue.SimpleQueue()
        wishes = TransportWishes(block_bytes=self._cache.layout.block_bytes())
        self._source = TransferSource(
            identity=SOURCE,
            layout=self._cache.layout,
            transport=source_transport(wishes, SOURCE),
            emit=self._events.put,
            clock=time.monotonic,
        )
        self._source.start()

    def bytes(self) -> int:
        return len(self._blocks) * self._cache.layout.block_bytes()

    def hand_over(self) -> float:
        ticket = self._ticket()
        self._order(ticket)
        self._source.open(seal(ticket, KEY), ticket, self._endpoints)
        step = CHUNK_TOKENS // self._cache.layout.block_size
        began = time.perf_counter()
        for first in range(0, len(self._blocks), step):
            self._source.push(ticket.ticket_id, first, self._blocks[first : first + step])
        self._source.finish(ticket.ticket_id, ticket.num_tokens, ((0, 7),))
        assert isinstance(self._events.get(), events.Committed)
        seconds = time.perf_counter() - began
        assert isinstance(self._events.get(), events.Closed)
        return seconds

    def bare_send(self) -> float:
        self._order(None)
        began = time.perf_counter()
        self._bare.give(self._blocks)
        return time.perf_counter() - began

    def close(self) -> None:
        self._source.close()
        self._bare.close()
        self._pipe.send(False)

    def _order(self, order: Ticket | None) -> None:
        self._pipe.send(order)
        assert self._pipe.recv()

    def _ticket(self) -> Ticket:
        layout = self._cache.layout
        return mint(
            os.urandom,
            request_id="r",
            attempt=0,
            source=SOURCE,
            target=TARGET,
            layout_fingerprint=layout.fingerprint(),
            num_tokens=len(self._blocks) * layout.block_size,
            first_block=0,
            num_blocks=len(self._blocks),
            lease_ms=LEASE_MS,
        )


def measure(kind: str, dtype: str, options: argparse.Namespace, folder: str) -> str:
    """One line of the table."""
    blocks = layout_of(dtype).blocks_for(options.tokens)
    context: Any = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs, kind, dtype, blocks, folder))
    process.start()
    sender = Sender(ours, kind, dtype, blocks)
    rounds = [(sender.hand_over(), sender.bare_send()) for _ in range(WARM_UP_ROUNDS + options.rounds)]
    sender.close()
    process.join()
    full, bare = (statistics.median(seconds) for seconds in zip(*rounds[WARM_UP_ROUNDS:], strict=True))
    rates = [sender.bytes() / seconds / 1e9 for seconds in (full, bare)]
    return (
        f"{kind:4} {dtype:8} {sender.bytes() / 1e6:6.1f} MB  handed over {rates[0]:5.2f} GB/s"
        f"  bare {rates[1]:5.2f} GB/s  share {bare / full:4.0%}  load {os.getloadavg()[0]:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kinds", nargs="+", default=["shm", "ipc", "tcp"], choices=["shm", "ipc", "tcp"])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    options = parser.parse_args()
    take_short_turns()
    for dtype in options.dtypes:
        for kind in options.kinds:
            with tempfile.TemporaryDirectory() as folder:
                print(measure(kind, dtype, options, folder), flush=True)


if __name__ == "__main__":
    main()
