"""Whole transfers over torch.distributed (gloo), between real processes, some of which are killed."""

import multiprocessing
import queue
import threading
import time
from dataclasses import replace

import pytest

from kvtransfer.dist_group import SOURCE_RANK, GroupOptions, PairBroken, join
from kvtransfer.dist_target import DistTargetTransport
from kvtransfer.dist_transport import DistOptions, DistSourceTransport
from kvtransfer.errors import Reason
from kvtransfer.identity import Identity
from kvtransfer.source_endpoint import TransferSource
from kvtransfer.source_io import SourceLimits
from kvtransfer.target_endpoint import TransferTarget
from kvtransfer.zmq_socket import ZmqOptions
from kvtransfer.zmq_transport import ZmqSourceTransport, ZmqTargetTransport
from tests.kvtransfer.conftest import Recorder, World

LAYOUT = replace(World.layout, layers=32, block_size=16, head_dim=32)  # blocks of 128 KiB
BLOCK_BYTES = LAYOUT.block_bytes()
MOVE_S = 2.0
BLOCKS_THAT_MOVE = 3
OTHER_TARGET = Identity(worker_id="target-c", epoch=5)
OTHER_SOURCE = Identity(worker_id="source-d", epoch=6)


class StallingGroup:
    """A real group, of which this end starts no block after the first few; the other end waits in vain."""

    def __init__(self, group) -> None:
        self._group = group

    def send(self, number, memory):
        return self if number >= BLOCKS_THAT_MOVE else self._group.send(number, memory)

    def receive(self, number, memory):
        return self if number >= BLOCKS_THAT_MOVE else self._group.receive(number, memory)

    def wait(self, timeout_s):
        threading.Event().wait(2 * timeout_s)
        raise PairBroken("stalled on purpose")

    def drop(self): ...

    def destroy(self):
        self._group.destroy()


class WatchedGroup:
    """A real group that says which blocks this end has started."""

    def __init__(self, group, started) -> None:
        self._group = group
        self._started = started

    def send(self, number, memory):
        operation = self._group.send(number, memory)
        self._started.put(number)
        return operation

    def receive(self, number, memory):
        operation = self._group.receive(number, memory)
        self._started.put(number)
        return operation

    def destroy(self):
        self._group.destroy()


def stalling(*arguments):
    return StallingGroup(join(*arguments))


class DistEnds:
    """Builds ends over gloo, each on its own ZeroMQ transport, and closes what is left."""

    def __init__(self) -> None:
        self.started: queue.Queue[int] = queue.Queue()
        self._closing = []

    def new_source(self, identity=World.source, make_group=None, connect_ms=20_000):
        recorder = Recorder()
        carrier = ZmqSourceTransport(ZmqOptions(block_bytes=BLOCK_BYTES))
        source = TransferSource(
            identity=identity,
            layout=LAYOUT,
            transport=DistSourceTransport(options(), carrier, make_group=make_group or self._watched),
            emit=recorder,
            clock=time.monotonic,
            limits=SourceLimits(connect_ms=connect_ms),
        )
        source.start()
        self._closing.append(source)
        return source, recorder

    def new_target(self, identity=World.target, make_group=None, plain=False):
        """plain: over ZeroMQ alone."""
        recorder = Recorder()
        carrier = ZmqTargetTransport(ZmqOptions(block_bytes=BLOCK_BYTES), ["tcp://127.0.0.1:0"])
        pairs = DistTargetTransport(options(), carrier, make_group=make_group or self._watched)
        target = TransferTarget(
            identity=identity,
            layout=LAYOUT,
            key=World.key,
            transport=carrier if plain else pairs,
            emit=recorder,
            clock=time.monotonic,
        )
        target.start()
        self._closing.append(target)
        return target, recorder

    def wait_for_start_of(self, number):
        while self.started.get(timeout=20) != number:
            pass

    def close(self) -> None:
        for end in self._closing:
            end.close()

    def _watched(self, *arguments):
        return WatchedGroup(join(*arguments), self.started)


def options() -> DistOptions:
    return DistOptions(
        backends=("gloo",), block_bytes=BLOCK_BYTES, group=GroupOptions(join_s=10.0, move_s=MOVE_S)
    )


def new_ticket(**changes):
    return World().ticket(blocks=30, layout=LAYOUT, lease_ms=60_000, **changes)


def send_all(source, ticket, endpoints) -> None:
    source.open(World().seal(ticket), ticket, endpoints)
    blocks = World().blocks(ticket, LAYOUT)
    source.push(ticket.ticket_id, ticket.first_block, [memoryview(block) for block in blocks])
    source.finish(ticket.ticket_id, ticket.num_tokens, ((0, 7),))


def bind_places(target, on_target, ticket):
    on_target.wait("Opened", ticket)
    places = [bytearray(BLOCK_BYTES) for _ in ticket.blocks_to_send()]
    target.bind(ticket.ticket_id, [memoryview(place) for place in places])
    return places


def receive_all(target, on_target, ticket):
    places = bind_places(target, on_target, ticket)
    on_target.wait("Received", ticket)
    target.commit(ticket.ticket_id)
    return places


def source_process(pipe, stalls) -> None:
    """Sends what it is given, and says how it ended."""
    source, on_source = DistEnds().new_source(make_group=stalling if stalls else None)
    pipe.send(("up", None))
    while (order := pipe.recv()) is not None:
        tickets, endpoints = order
        for ticket in tickets:
            send_all(source, ticket, endpoints)
        for ticket in tickets:
            on_source.wait("Closed", ticket)
            pipe.send((ticket.ticket_id, on_source.names(ticket)))
    source.close()


def target_process(pipe, stalls) -> None:
    """Receives what it is told to expect."""
    target, on_target = DistEnds().new_target(make_group=stalling if stalls else None)
    pipe.send(("up", target.endpoints()))
    while (ticket := pipe.recv()) is not None:
        target.expect(ticket)
        pipe.send(("expected", None))
        receive_all(target, on_target, ticket)
    target.close()


class Child:
    def __init__(self, role, stalls) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=role, args=(theirs, stalls), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self):
        assert self.pipe.poll(60), "the child is silent"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def ends():
    ends = DistEnds()
    yield ends
    ends.close()


@pytest.fixture
def child():
    """Starts a child process; whatever happens, it is gone afterwards."""
    children = []

    def start(role, *, stalls=False) -> Child:
        children.append(Child(role, stalls))
        return children[-1]

    yield start
    for each in children:
        each.kill()


def test_bytes_land_equal_and_events_come_in_order_between_two_processes(child, ends):
    other = child(source_process)
    target, on_target = ends.new_target()
    tickets = [new_ticket() for _ in range(4)]
    for ticket in tickets:
        target.expect(ticket)
    assert other.hear() == ("up", None)
    other.pipe.send((tickets, target.endpoints()))
    for ticket in tickets:
        assert receive_all(target, on_target, ticket) == World().blocks(ticket, LAYOUT)
    for ticket in tickets:
        on_target.wait("Closed", ticket)
        assert on_target.names(ticket) == ["Opened", "Received", "Closed"]
        assert other.hear() == (ticket.ticket_id, ["Committed", "Closed"])
    assert sorted(ends.started.queue) == list(range(4 * 30)), "not every block came through the group"
    other.pipe.send(None)
    other.process.join()
    assert other.process.exitcode == 0


def test_a_source_killed_while_a_block_is_received_harms_only_its_own_transfer(child, ends):
    other = child(source_process, stalls=True)
    target, on_target = ends.new_target()
    ticket = new_ticket()
    target.expect(ticket)
    assert other.hear() == ("up", None)
    other.pipe.send(([ticket], target.endpoints()))
    places = bind_places(target, on_target, ticket)
    ends.wait_for_start_of(BLOCKS_THAT_MOVE)
    other.kill()
    assert on_target.wait("Failed", ticket).reason is Reason.PEER_LOST
    on_target.wait("Closed", ticket)
    assert_another_pair_goes_on(ends, target, on_target)
    assert on_target.names(ticket) == ["Opened", "Failed", "Closed"]
    target.close()
    assert on_target.names(ticket) == ["Opened", "Failed", "Closed"]
    sent, empty = World().blocks(ticket, LAYOUT), bytearray(BLOCK_BYTES)
    assert all(place in (empty, block) for place, block in zip(places, sent, strict=True))
    assert places[BLOCKS_THAT_MOVE:] == [empty] * (30 - BLOCKS_THAT_MOVE)


def assert_another_pair_goes_on(ends, target, on_target) -> None:
    source, on_source = ends.new_source(OTHER_SOURCE)
    ticket = new_ticket(source_id=OTHER_SOURCE.worker_id, source_epoch=OTHER_SOURCE.epoch)
    target.expect(ticket)
    send_all(source, ticket, target.endpoints()[:1])
    assert receive_all(target, on_target, ticket) == World().blocks(ticket, LAYOUT)
    on_source.wait("Committed", ticket)


def test_a_target_killed_while_a_block_is_sent_harms_only_its_own_transfer(child, ends):
    other = child(target_process, stalls=True)
    healthy, on_healthy = ends.new_target(OTHER_TARGET)
    source, on_source = ends.new_source()
    ticket = new_ticket()
    _, endpoints = other.hear()
    other.pipe.send(ticket)
    other.hear()
    send_all(source, ticket, endpoints)
    ends.wait_for_start_of(BLOCKS_THAT_MOVE)
    other.kill()
    assert on_source.wait("Failed", ticket).reason is Reason.PEER_LOST
    next_ticket = new_ticket(target_id=OTHER_TARGET.worker_id, target_epoch=OTHER_TARGET.epoch)
    healthy.expect(next_ticket)
    send_all(source, next_ticket, healthy.endpoints()[:1])
    assert receive_all(healthy, on_healthy, next_ticket) == World().blocks(next_ticket, LAYOUT)
    on_source.wait("Committed", next_ticket)
    on_source.wait("Closed", ticket)
    source.close()
    assert on_source.names(ticket) == ["Failed", "Closed"]


def test_a_stalled_peer_is_given_up_after_the_time_for_one_block(ends):
    """Both processes live, the messages go through, only the payloads do not."""
    target, on_target = ends.new_target(make_group=stalling)
    source, on_source = ends.new_source()
    ticket = new_ticket()
    target.expect(ticket)
    send_all(source, ticket, target.endpoints())
    bind_places(target, on_target, ticket)
    for seen, names in ((on_source, ["Failed", "Closed"]), (on_target, ["Opened", "Failed", "Closed"])):
        assert seen.wait("Failed", ticket).reason is Reason.PEER_LOST
        seen.wait("Closed", ticket)
        assert seen.names(ticket) == names
    again = new_ticket()
    target.expect(again)
    send_all(source, again, target.endpoints())
    assert receive_all(target, on_target, again) == World().blocks(again, LAYOUT)


def test_a_target_that_cannot_make_the_group_is_served_over_the_next_endpoint(ends):
    def fails(backend, rank, rendezvous, group_options):
        assert rank != SOURCE_RANK
        raise PairBroken("no route for payloads")

    target, on_target = ends.new_target(make_group=fails)
    source, on_source = ends.new_source()
    for _ in range(2):
        ticket = new_ticket()
        target.expect(ticket)
        send_all(source, ticket, target.endpoints())
        assert receive_all(target, on_target, ticket) == World().blocks(ticket, LAYOUT)
        on_source.wait("Closed", ticket)
        assert on_source.names(ticket) == ["Committed", "Closed"]
    assert ends.started.empty()


def test_a_target_without_this_transport_is_served_over_the_next_endpoint(ends):
    target, on_target = ends.new_target(plain=True)
    (carrier,) = target.endpoints()
    source, on_source = ends.new_source(connect_ms=300)
    ticket = new_ticket()
    target.expect(ticket)
    send_all(source, ticket, (f"gloo+{carrier}", f"nccl+{carrier}", carrier))
    assert receive_all(target, on_target, ticket) == World().blocks(ticket, LAYOUT)
    on_source.wait("Committed", ticket)


def test_a_cancelled_transfer_leaves_the_pair_to_the_others(ends):
    target, on_target = ends.new_target()
    source, on_source = ends.new_source()
    cancelled, kept = new_ticket(), new_ticket()
    for ticket in (cancelled, kept):
        target.expect(ticket)
    blocks = World().blocks(cancelled, LAYOUT)
    source.open(World().seal(cancelled), cancelled, target.endpoints())
    source.push(cancelled.ticket_id, 0, [memoryview(block) for block in blocks])
    send_all(source, kept, target.endpoints())
    bind_places(target, on_target, cancelled)
    source.cancel(cancelled.ticket_id)
    on_source.wait("Closed", cancelled)
    for block in blocks:
        block[:] = bytes(BLOCK_BYTES)
    on_target.wait("Closed", cancelled)
    assert on_source.names(cancelled) == ["Closed"]
    assert on_target.names(cancelled) == ["Opened", "Failed", "Closed"]
    assert receive_all(target, on_target, kept) == World().blocks(kept, LAYOUT)
    on_source.wait("Committed", kept)
