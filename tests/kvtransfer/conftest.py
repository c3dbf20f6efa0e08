"""Two ends of a hand-off: over memory on a virtual clock, or over real transports with their own threads."""

import itertools
import os
import queue
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cache.layout import KVLayout
from kvtransfer import events, wire
from kvtransfer.assembly import TransportWishes, source_transport, target_transport
from kvtransfer.greeting import BlockShape, hello
from kvtransfer.identity import Identity
from kvtransfer.keys import make as make_keys
from kvtransfer.memory_transport import MemoryNetwork, deliver
from kvtransfer.source_endpoint import TransferSource
from kvtransfer.source_io import SourceLimits
from kvtransfer.target_endpoint import TransferTarget
from kvtransfer.target_io import TargetLimits
from kvtransfer.ticket import Ticket, mint, seal

KEY = bytes(range(32))
SOURCE = Identity(worker_id="source-a", epoch=11)
TARGET = Identity(worker_id="target-b", epoch=22)
LAYOUT = KVLayout(model_digest="m", layers=2, kv_heads=1, head_dim=8, block_size=4, dtype=torch.float32)
_SERIAL = itertools.count(1)


class World:
    """What every test of this folder needs to build tickets and blocks."""

    key = KEY
    source = SOURCE
    target = TARGET
    layout = LAYOUT
    lease_ms = 1000

    def ticket(self, blocks=5, first_block=0, lease_ms=None, layout=None, **changes) -> Ticket:
        layout = layout or self.layout
        ticket = mint(
            lambda count: next(_SERIAL).to_bytes(count, "big"),
            request_id="request",
            attempt=3,
            source=SOURCE,
            target=TARGET,
            layout_fingerprint=layout.fingerprint(),
            num_tokens=blocks * layout.block_size - 1,
            first_block=first_block,
            num_blocks=blocks,
            lease_ms=lease_ms or self.lease_ms,
        )
        return replace(ticket, **changes)

    def seal(self, ticket: Ticket) -> bytes:
        return seal(ticket, KEY)

    def blocks(self, ticket: Ticket, layout=None) -> list[bytearray]:
        """Distinct contents for the blocks that travel."""
        columns = np.arange((layout or self.layout).block_bytes())
        rows = (ticket.ticket_id[-1] * 31 + index * 7 + 1 for index in ticket.blocks_to_send())
        return [bytearray(((columns + row) % 251).astype(np.uint8).tobytes()) for row in rows]

    def hello(self, **changes) -> wire.Hello:
        shape = BlockShape(
            layout=LAYOUT.fields(), fingerprint=LAYOUT.fingerprint(), block_bytes=LAYOUT.block_bytes()
        )
        return replace(hello(shape, SOURCE, TARGET), **changes)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class MemoryPair:
    """A source and a target without threads: `run` gives both their turns and moves the clock."""

    def __init__(self, world: World, script, capacity_packets, run_blocks, target_limits, layout) -> None:
        self.world = world
        self.clock = Clock()
        self.network = MemoryNetwork(script, capacity_packets)
        self.source_events: list[events.SourceEvent] = []
        self.target_events: list[events.TargetEvent] = []
        self.places: dict[bytes, list[bytearray]] = {}
        self.received_bytes: dict[bytes, list[bytes]] = {}
        self.binds = self.commits = True
        self.source_runs = self.target_runs = True
        self._tickets: dict[bytes, Ticket] = {}
        self.target = TransferTarget(
            identity=TARGET,
            layout=world.layout,
            key=KEY,
            transport=self.network.listen("memory"),
            emit=self._on_target_event,
            clock=self.clock,
            limits=target_limits,
        )
        self.source = TransferSource(
            identity=SOURCE,
            layout=layout or world.layout,
            transport=self.network.source(),
            emit=self.source_events.append,
            clock=self.clock,
            limits=SourceLimits(run_bytes_max=run_blocks * world.layout.block_bytes()),
        )

    def expect(self, ticket: Ticket) -> None:
        self._tickets[ticket.ticket_id] = ticket
        self.target.expect(ticket)

    def hand_over(self, ticket: Ticket, first_token=7) -> list[bytearray]:
        """Expect, open, push and finish; returns the blocks, to be left alone until Closed."""
        self.expect(ticket)
        return self.send(ticket, first_token)

    def send(self, ticket: Ticket, first_token=7) -> list[bytearray]:
        blocks = self.world.blocks(ticket)
        self.source.open(self.world.seal(ticket), ticket, ("memory",))
        for index, block in zip(ticket.blocks_to_send(), blocks, strict=True):
            self.source.push(ticket.ticket_id, index, [memoryview(block)])
        self.source.finish(ticket.ticket_id, ticket.num_tokens, ((0, first_token),))
        return blocks

    def bind(self, ticket_id: bytes) -> None:
        ticket = self._tickets[ticket_id]
        places = [bytearray(self.world.layout.block_bytes()) for _ in ticket.blocks_to_send()]
        self.places[ticket_id] = places
        self.target.bind(ticket_id, [memoryview(place) for place in places])

    def run(self, until=lambda: False, seconds=30.0, step_s=0.02) -> bool:
        """Go on until the condition holds; False when the virtual time is over first."""
        end = self.clock.now + seconds
        while not until():
            if self.clock.now >= end:
                return False
            if self.source_runs:
                self.source.turn(0)
            if self.target_runs:
                self.target.turn(0)
            self.clock.now += step_s
        return True

    def run_to_close(self, *tickets: Ticket) -> None:
        ids = {ticket.ticket_id for ticket in tickets}

        def closed() -> bool:
            return all(
                ids <= {each.ticket_id for each in seen if isinstance(each, events.Closed)}
                for seen in (self.source_events, self.target_events)
            )

        assert self.run(closed), f"not closed: {self.source_events} {self.target_events}"

    def names(self, side, ticket: Ticket) -> list[str]:
        return [type(each).__name__ for each in side if each.ticket_id == ticket.ticket_id]

    def _on_target_event(self, event: events.TargetEvent) -> None:
        self.target_events.append(event)
        if isinstance(event, events.Opened) and self.binds:
            self.bind(event.ticket_id)
        if isinstance(event, events.Received):
            self.received_bytes[event.ticket_id] = [bytes(place) for place in self.places[event.ticket_id]]
            if self.commits:
                self.target.commit(event.ticket_id)


class Recorder:
    """Collects events of one end; waits for one by name."""

    def __init__(self) -> None:
        self.seen: list[events.SourceEvent | events.TargetEvent] = []
        self._queue: queue.Queue[events.SourceEvent | events.TargetEvent] = queue.Queue()

    def __call__(self, event: events.SourceEvent | events.TargetEvent) -> None:
        self._queue.put(event)

    def wait(self, name: str, ticket: Ticket) -> events.SourceEvent | events.TargetEvent:
        """The ticket's first event of that name, waiting for it."""
        for event in self.seen:
            if event.ticket_id == ticket.ticket_id and type(event).__name__ == name:
                return event
        while True:
            event = self._queue.get(timeout=20)
            self.seen.append(event)
            if event.ticket_id == ticket.ticket_id and type(event).__name__ == name:
                return event

    def names(self, ticket: Ticket) -> list[str]:
        while not self._queue.empty():
            self.seen.append(self._queue.get())
        return [type(event).__name__ for event in self.seen if event.ticket_id == ticket.ticket_id]


class Ends:
    """Builds sources and targets with their threads, over a transport of one kind, and closes what is left."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        self.folder = folder
        self._closing: list[TransferSource | TransferTarget] = []

    def new_target(
        self, *binds: str, kind="tcp", layout=LAYOUT, identity=TARGET, emit=None, limits=None, keys=None
    ):
        """binds: instead of the one address that the kind has."""
        recorder = Recorder()
        transport = target_transport(
            TransportWishes(
                block_bytes=layout.block_bytes(),
                shared_memory=kind == "shm",
                key_folder=keys or (self.keys() if kind == "curve" else None),
            ),
            identity,
            binds or self._binds(kind),
            os.urandom,
        )
        target = TransferTarget(
            identity=identity,
            layout=layout,
            key=KEY,
            transport=transport,
            emit=emit or recorder,
            clock=time.monotonic,
            limits=limits,
        )
        target.start()
        self._closing.append(target)
        return target, recorder

    def new_source(
        self, kind="tcp", layout=LAYOUT, identity=SOURCE, limits=None, keys=None, warn=lambda line: None
    ):
        recorder = Recorder()
        wishes = TransportWishes(
            block_bytes=layout.block_bytes(), key_folder=keys or (self.keys() if kind == "curve" else None)
        )
        source = TransferSource(
            identity=identity,
            layout=layout,
            transport=source_transport(wishes, identity),
            emit=recorder,
            clock=time.monotonic,
            limits=limits or SourceLimits(connect_ms=20_000),
            warn=warn,
        )
        source.start()
        self._closing.append(source)
        return source, recorder

    def keys(self) -> Path:
        """A folder that both ends may share."""
        folder = self.folder / "keys"
        if not folder.exists():
            make_keys(folder, "source")
            make_keys(folder, "target")
        return folder

    def close(self) -> None:
        for end in self._closing:
            end.close()

    def _binds(self, kind: str) -> tuple[str, ...]:
        if kind == "shm":
            return ()
        return (f"ipc://{self.folder}/kv-{next(_SERIAL)}",) if kind == "ipc" else ("tcp://127.0.0.1:0",)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def memory_pair(world):
    """Makes a MemoryPair; script: what becomes of each packet. run_blocks: in one message, at most."""

    def make(
        script=deliver, capacity_packets=64, window_blocks=4, run_blocks=1, layout=None, **limits
    ) -> MemoryPair:
        window_bytes = window_blocks * world.layout.block_bytes()
        target_limits = TargetLimits(window_bytes=window_bytes, **limits)
        return MemoryPair(world, script, capacity_packets, run_blocks, target_limits, layout)

    return make


@pytest.fixture
def ends(world, tmp_path):
    ends = Ends(world, tmp_path)
    yield ends
    ends.close()


@pytest.fixture
def patient(world):
    """On a real clock a busy machine must not end a lease."""
    world.lease_ms = 60_000
    return world


@pytest.fixture
def large():
    """A layout whose blocks are sent without a copy: 128 KiB each."""
    return replace(LAYOUT, layers=32, block_size=16, head_dim=32)


def send_all(world, source, ticket, endpoints, layout, first_token=7):
    """Open, push one by one, finish; returns the blocks."""
    blocks = world.blocks(ticket, layout)
    source.open(world.seal(ticket), ticket, endpoints)
    for index, block in zip(ticket.blocks_to_send(), blocks, strict=True):
        source.push(ticket.ticket_id, index, [memoryview(block)])
    source.finish(ticket.ticket_id, ticket.num_tokens, ((0, first_token),))
    return blocks


def bind_places(target, seen, ticket, layout):
    seen.wait("Opened", ticket)
    places = [bytearray(layout.block_bytes()) for _ in ticket.blocks_to_send()]
    target.bind(ticket.ticket_id, [memoryview(place) for place in places])
    return places


def receive_all(target, seen, ticket, layout):
    """Bind, wait for all, commit; returns the places."""
    places = bind_places(target, seen, ticket, layout)
    seen.wait("Received", ticket)
    target.commit(ticket.ticket_id)
    return places
