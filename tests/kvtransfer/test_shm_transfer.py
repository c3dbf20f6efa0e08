"""Blocks through shared memory: what a source can reach, and what is left of it when a process dies."""

import multiprocessing
import os
import signal
import socket
import struct

import pytest

from kvtransfer import shm_transport
from kvtransfer.assembly import TransportWishes, source_transport, target_transport
from kvtransfer.errors import BindRefused, Reason
from kvtransfer.shm_ring import PACKET_BYTES_MAX, attach, new_ring, pack, unpack
from kvtransfer.shm_transport import ShmSourceTransport, ShmTargetTransport
from kvtransfer.transport import LinkStatus, PeerGone
from tests.kvtransfer.conftest import SOURCE, TARGET, Ends, World, bind_places, receive_all, send_all

BLOCK_BYTES = 4096
RING_MARK = "memfd:crossdock-kv"


@pytest.fixture
def world(patient):
    return patient


@pytest.fixture
def name():
    return f"test-{os.getpid()}-{os.urandom(4).hex()}"


@pytest.fixture
def target(name):
    target = ShmTargetTransport(name, BLOCK_BYTES)
    yield target
    target.close()


@pytest.fixture
def source():
    source = ShmSourceTransport()
    yield source
    source.close()


class Raw:
    """Another process's end, as somebody might write it who keeps to no rule."""

    def __init__(self, name: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(10)
        self.socket.connect(b"\0" + name.encode())

    def attach(self):
        greeting, (descriptor,), _, _ = socket.recv_fds(self.socket, 100, 1)
        ring = attach(greeting, descriptor)
        os.close(descriptor)
        return ring

    def is_cut_off(self) -> bool:
        try:
            while self.socket.recv(100_000):
                pass
        except ConnectionResetError:
            pass
        return True


def arrivals(target, until):
    """Everything that comes until the condition holds."""
    seen = []
    while not until(seen):
        target.wait(10)
        while (arrival := target.receive()) is not None:
            seen.append(arrival)
    return seen


def connected(source, target):
    connection = source.dial(target.endpoints()[0], SOURCE, TARGET)
    target.wait(10)
    source.wait(10)
    assert connection.status() is LinkStatus.UP
    return connection


def rings_mapped() -> int:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum(RING_MARK in line for line in maps)


def test_a_block_may_be_changed_as_soon_as_it_was_read_although_the_target_has_not_looked(source, target):
    connection = connected(source, target)
    block = bytearray(b"a" * BLOCK_BYTES)
    read = []
    assert connection.send(b"header", [memoryview(block)], lambda: read.append(True))
    assert not read
    source.wait(10)
    assert read == [True]
    block[:] = b"b" * BLOCK_BYTES
    (arrival,) = arrivals(target, len)
    assert (arrival.header, [*map(bytes, arrival.payloads)]) == (b"header", [b"a" * BLOCK_BYTES])


def test_several_blocks_take_a_slot_each_and_are_lent_and_freed_together(source, name):
    block_bytes = shm_transport.STAGING_BYTES // 4
    target = ShmTargetTransport(name, block_bytes)
    connection = connected(source, target)
    blocks = [memoryview(bytes([number]) * block_bytes) for number in range(5)]
    for _ in range(5):
        assert connection.send(b"header", blocks[:3]) and not connection.send(b"header", blocks[:3])
        (arrival,) = arrivals(target, len)
        assert arrival.payloads == tuple(blocks[:3])
        source.wait(10)
        assert connection.receive() is None
    assert not connection.send(b"header", blocks) and connection.status() is LinkStatus.LOST
    target.close()


def test_a_source_stops_when_the_ring_is_full_and_goes_on_when_slots_are_freed(source, target):
    connection = connected(source, target)
    block = memoryview(bytes(BLOCK_BYTES))
    sent = 0
    while connection.send(b"header", [block]):
        sent += 1
    assert sent * BLOCK_BYTES <= shm_transport.STAGING_BYTES
    first = arrivals(target, lambda seen: len(seen) >= sent)
    assert len(first) == sent
    source.wait(10)
    assert connection.receive() is None
    assert connection.send(b"header", [block])


def test_a_slot_is_not_written_again_while_the_target_may_still_read_it(source, name):
    target = ShmTargetTransport(name, shm_transport.STAGING_BYTES)
    connection = connected(source, target)
    numbers = iter(range(100))
    number = next(numbers)

    def fill_the_ring():
        nonlocal number
        assert connection.receive() is None
        while connection.send(b"h", [memoryview(bytes([number]) * shm_transport.STAGING_BYTES)]):
            number = next(numbers)

    fill_the_ring()
    for expected in range(12):
        while (arrival := target.receive()) is None:
            target.wait(10)
        fill_the_ring()
        assert arrival.payloads[0][0] == arrival.payloads[0][-1] == expected
    target.close()


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\0\0",
        pack(b"header", [2**31]),
        pack(b"header", [0, shm_transport.STAGING_BYTES // BLOCK_BYTES]),
        pack(b"", range(5))[:-1],
        struct.pack("!I", 2**32 - 1),
        bytes(PACKET_BYTES_MAX + 1),
    ],
    ids=["nothing", "runt", "no such slot", "just behind the ring", "fewer", "far fewer", "too long"],
)
def test_a_source_that_breaks_the_rules_is_cut_off_and_no_other(target, source, name, packet):
    raw = Raw(name)
    target.wait(10)
    raw.attach()
    connection = connected(source, target)
    raw.socket.send(packet)
    (gone,) = arrivals(target, len)
    assert isinstance(gone, PeerGone)
    assert raw.is_cut_off()
    assert connection.send(b"header")
    assert [arrival.header for arrival in arrivals(target, len)] == [b"header"]


def test_a_source_that_uses_one_slot_again_and_again_makes_nothing_grow(target, name):
    raw = Raw(name)
    target.wait(10)
    raw.attach()
    for _ in range(100):
        for _ in range(50):
            raw.socket.send(pack(b"header", [0, 0]))
        arrivals(target, lambda seen: len(seen) >= 50)
    raw.socket.setblocking(False)
    told = 0
    try:
        while packet := raw.socket.recv(100_000):
            told += len(packet)
    except BlockingIOError:
        pass
    assert told <= 100 * 51 * len(pack(b"", [0]))


def shrinkable():
    descriptor = os.memfd_create("shrinkable")
    os.ftruncate(descriptor, 4 * BLOCK_BYTES)
    ring, other = new_ring(4, BLOCK_BYTES)
    os.close(other)
    return ring.greeting(), descriptor


def wrong_size():
    ring, other = new_ring(4, BLOCK_BYTES)
    os.close(other)
    _, descriptor = new_ring(3, BLOCK_BYTES)
    return ring.greeting(), descriptor


def wrong_greeting():
    _, descriptor = new_ring(4, BLOCK_BYTES)
    return b"welcome", descriptor


def no_slots():
    ring, descriptor = new_ring(1, BLOCK_BYTES)
    return ring.greeting()[:16] + bytes(12), descriptor


@pytest.mark.parametrize("offered", [shrinkable, wrong_size, wrong_greeting, no_slots])
def test_a_source_takes_no_memory_that_is_not_as_it_says_or_that_can_vanish(source, name, offered):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(b"\0" + name.encode())
        listener.listen()
        connection = source.dial(f"shm://{name}", SOURCE, TARGET)
        accepted, _ = listener.accept()
        greeting, descriptor = offered()
        socket.send_fds(accepted, [greeting], [descriptor])
        os.close(descriptor)
        source.wait(10)
        assert connection.status() is LinkStatus.LOST
        accepted.close()


@pytest.mark.parametrize("freed", [[0], [3], [4], [2, 2], [2**32 - 2]])
def test_a_target_that_frees_what_was_not_taken_is_given_up(source, name, freed):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(b"\0" + name.encode())
        listener.listen()
        connection = source.dial(f"shm://{name}", SOURCE, TARGET)
        accepted, _ = listener.accept()
        ring, descriptor = new_ring(4, BLOCK_BYTES)
        socket.send_fds(accepted, [ring.greeting()], [descriptor])
        os.close(descriptor)
        source.wait(10)
        assert connection.status() is LinkStatus.UP
        assert connection.send(b"header", [memoryview(bytes(BLOCK_BYTES))])
        (slot,), _ = unpack(memoryview(accepted.recv(100)))
        accepted.send(pack(b"", freed if freed != [3] else [slot, slot]))
        source.wait(10)
        assert connection.receive() is None
        assert connection.status() is LinkStatus.LOST
        accepted.close()


def test_processes_of_another_user_are_not_talked_to(source, target, name, monkeypatch):
    raw = Raw(name)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    target.wait(10)
    assert raw.is_cut_off()
    assert source.dial(f"shm://{name}", SOURCE, TARGET).status() is LinkStatus.LOST


def test_connections_are_bounded(target, name):
    raws = [Raw(name) for _ in range(shm_transport.CONNECTIONS_MAX)]
    target.wait(10)
    for raw in raws:
        raw.attach()
    surplus = Raw(name)
    target.wait(10)
    assert surplus.is_cut_off()
    raws[0].socket.close()
    assert isinstance(arrivals(target, len)[0], PeerGone)
    late = Raw(name)
    target.wait(10)
    late.attach()


@pytest.mark.parametrize("endpoint", ["shm://", "ipc://name", "shm://" + "x" * 101, "nonsense"])
def test_what_can_never_be_an_endpoint_is_refused(source, endpoint):
    with pytest.raises(ValueError, match="endpoint"):
        source.dial(endpoint, SOURCE, TARGET)


def test_a_name_in_use_is_refused(target, name):
    with pytest.raises(BindRefused):
        ShmTargetTransport(name, BLOCK_BYTES)


def test_shared_memory_is_offered_first_and_used_without_being_asked_for(world, ends, large, tmp_path):
    binds = ["tcp://127.0.0.1:0", f"ipc://{tmp_path}/kv"]
    target, on_target = ends.new_target(*binds, kind="shm", layout=large)
    endpoints = target.endpoints()
    assert [endpoint.partition(":")[0] for endpoint in endpoints] == ["shm", "ipc", "tcp"]
    on_another_host = ("shm://nobody-listens", *endpoints[1:])
    for dialled, rings in [(endpoints, 2), (on_another_host, 0)]:
        source, on_source = ends.new_source(layout=large)
        before = rings_mapped()
        ticket = world.ticket(layout=large)
        target.expect(ticket)
        sent = send_all(world, source, ticket, dialled, large)
        assert receive_all(target, on_target, ticket, large) == sent
        on_source.wait("Committed", ticket)
        assert rings_mapped() - before == rings


def test_it_is_neither_offered_nor_dialled_where_it_is_not_wanted():
    wishes = TransportWishes(block_bytes=BLOCK_BYTES, shared_memory=False)
    receiving = target_transport(wishes, TARGET, ["tcp://127.0.0.1:0"], os.urandom)
    assert [endpoint.partition(":")[0] for endpoint in receiving.endpoints()] == ["tcp"]
    sending = source_transport(wishes, SOURCE)
    with pytest.raises(ValueError, match="endpoint"):
        sending.dial("shm://name", SOURCE, TARGET)
    sending.close()
    receiving.close()


def hand_over_and_wait(pipe, folder, endpoints, sealed, ticket):
    """A source process with a transfer under way."""
    source, _ = Ends(World(), folder).new_source()
    source.open(sealed, ticket, endpoints)
    source.push(ticket.ticket_id, 0, [memoryview(bytes(World.layout.block_bytes()))])
    pipe.recv()


def take_and_wait(pipe, folder, ticket):
    """A target process with a transfer under way; says so."""
    target, seen = Ends(World(), folder).new_target(kind="shm")
    target.expect(ticket)
    pipe.send(target.endpoints())
    bind_places(target, seen, ticket, World.layout)
    pipe.send(True)
    pipe.recv()


@pytest.fixture
def child():
    """Starts a process that is killed at the end, if not before."""
    context = multiprocessing.get_context("spawn")
    started = []

    def start(function, *arguments):
        ours, theirs = context.Pipe()
        process = context.Process(target=function, args=(theirs, *arguments), daemon=True)
        process.start()
        started.append(process)
        theirs.close()
        return process, ours

    yield start
    for process in started:
        process.kill()
        process.join()


def test_a_source_that_is_killed_leaves_nothing_behind(world, ends, child, tmp_path):
    files, rings = sorted(os.listdir("/dev/shm")), rings_mapped()
    target, on_target = ends.new_target(kind="shm")
    ticket = world.ticket()
    target.expect(ticket)
    process, _ = child(hand_over_and_wait, tmp_path, target.endpoints(), world.seal(ticket), ticket)
    bind_places(target, on_target, ticket, world.layout)
    assert rings_mapped() == rings + 1
    os.kill(process.pid, signal.SIGKILL)
    assert on_target.wait("Failed", ticket).reason is Reason.PEER_LOST
    on_target.wait("Closed", ticket)
    assert rings_mapped() == rings
    assert sorted(os.listdir("/dev/shm")) == files


def test_a_target_that_is_killed_leaves_nothing_behind(world, ends, child, tmp_path):
    files, rings = sorted(os.listdir("/dev/shm")), rings_mapped()
    ticket = world.ticket()
    process, pipe = child(take_and_wait, tmp_path, ticket)
    source, on_source = ends.new_source()
    endpoints = pipe.recv()
    source.open(world.seal(ticket), ticket, endpoints)
    source.push(ticket.ticket_id, 0, [memoryview(bytes(world.layout.block_bytes()))])
    assert pipe.recv()
    assert rings_mapped() == rings + 1
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert on_source.wait("Failed", ticket).reason is Reason.PEER_LOST
    on_source.wait("Closed", ticket)
    process.join()
    assert rings_mapped() == rings
    assert sorted(os.listdir("/dev/shm")) == files
    with open("/proc/net/unix", encoding="utf-8") as sockets:
        assert endpoints[0].removeprefix("shm://") not in sockets.read()
