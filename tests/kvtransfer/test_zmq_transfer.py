"""Whole transfers over ZeroMQ inside one process, with the real threads and sockets."""

import socket
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import zmq

from kvtransfer import wire
from kvtransfer.digest import block_digest
from kvtransfer.errors import BindRefused, Reason
from kvtransfer.identity import Identity
from kvtransfer.source_io import SourceLimits
from kvtransfer.target_io import TargetLimits
from kvtransfer.zmq_socket import ZmqOptions
from kvtransfer.zmq_transport import ZmqTargetTransport


@pytest.fixture
def world(world):
    """On a real clock a busy machine must not end a lease."""
    world.lease_ms = 60_000
    return world


@pytest.fixture
def large(world):
    """A layout whose blocks are sent without a copy: 128 KiB each."""
    return replace(world.layout, layers=32, block_size=16, head_dim=32)


def send_all(world, source, ticket, endpoints, layout, first_token=7):
    blocks = world.blocks(ticket, layout)
    source.open(world.seal(ticket), ticket, endpoints)
    for index, block in zip(ticket.blocks_to_send(), blocks, strict=True):
        source.push(ticket.ticket_id, index, [memoryview(block)])
    source.finish(ticket.ticket_id, ticket.num_tokens, first_token)
    return blocks


def bind_places(target, seen, ticket, layout):
    seen.wait("Opened", ticket)
    places = [bytearray(layout.block_bytes()) for _ in ticket.blocks_to_send()]
    target.bind(ticket.ticket_id, [memoryview(place) for place in places])
    return places


def receive_all(target, seen, ticket, layout):
    places = bind_places(target, seen, ticket, layout)
    seen.wait("Received", ticket)
    target.commit(ticket.ticket_id)
    return places


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_bytes_land_equal_and_events_come_in_order(world, zmq_ends, large, tmp_path, scheme):
    bind = "tcp://127.0.0.1:0" if scheme == "tcp" else f"ipc://{tmp_path}/kv"
    target, on_target = zmq_ends.new_target(bind, layout=large)
    source, on_source = zmq_ends.new_source(layout=large)
    tickets = [world.ticket(blocks=30, layout=large) for _ in range(4)]
    blocks = []
    for ticket in tickets:
        target.expect(ticket)
        blocks.append(send_all(world, source, ticket, target.endpoints(), large))
    for ticket, sent in zip(tickets, blocks, strict=True):
        assert receive_all(target, on_target, ticket, large) == sent
    for ticket in tickets:
        on_source.wait("Closed", ticket)
        on_target.wait("Closed", ticket)
        assert on_source.names(ticket) == ["Committed", "Closed"]
        assert on_target.names(ticket) == ["Opened", "Received", "Closed"]


def test_several_addresses_are_bound_at_once_and_the_first_that_answers_is_used(
    world, zmq_ends, large, tmp_path
):
    target, on_target = zmq_ends.new_target(f"ipc://{tmp_path}/kv", "tcp://127.0.0.1:0", layout=large)
    local, remote = target.endpoints()
    assert local == f"ipc://{tmp_path}/kv"
    for endpoints in [(local, remote), (f"ipc://{tmp_path}/nobody", remote), ("nonsense", remote)]:
        source, on_source = zmq_ends.new_source(layout=large)
        ticket = world.ticket(layout=large)
        target.expect(ticket)
        sent = send_all(world, source, ticket, endpoints, large)
        assert receive_all(target, on_target, ticket, large) == sent
        on_source.wait("Committed", ticket)


def test_an_address_where_another_process_listens_is_passed_over(world, zmq_ends, large):
    wrong, _ = zmq_ends.new_target(layout=large, identity=Identity(worker_id="else", epoch=1))
    target, on_target = zmq_ends.new_target(layout=large)
    source, on_source = zmq_ends.new_source(layout=large)
    ticket = world.ticket(layout=large)
    target.expect(ticket)
    sent = send_all(world, source, ticket, (*wrong.endpoints(), *target.endpoints()), large)
    assert receive_all(target, on_target, ticket, large) == sent
    on_source.wait("Committed", ticket)
    assert wrong.counters()["refused_handshake"] == 1


def test_a_target_that_nobody_answers_for_is_unreachable(world, zmq_ends, tmp_path):
    source, on_source = zmq_ends.new_source(limits=SourceLimits(connect_ms=100))
    ticket = world.ticket()
    source.open(world.seal(ticket), ticket, (f"ipc://{tmp_path}/nobody",))
    failed = on_source.wait("Failed", ticket)
    assert failed.reason is Reason.UNREACHABLE
    on_source.wait("Closed", ticket)


def test_a_source_of_another_layout_is_refused_by_name(world, zmq_ends, large):
    target, _ = zmq_ends.new_target(layout=large)
    source, on_source = zmq_ends.new_source()
    ticket = world.ticket()
    source.open(world.seal(ticket), ticket, target.endpoints())
    failed = on_source.wait("Failed", ticket)
    assert failed.reason is Reason.HANDSHAKE_REFUSED
    assert failed.detail == "block_size, head_dim, layers"


def test_a_source_of_another_epoch_is_refused_by_name(world, zmq_ends):
    target, _ = zmq_ends.new_target()
    old = replace(world.source, epoch=10)
    source, on_source = zmq_ends.new_source(identity=old)
    expected = world.ticket()
    target.expect(expected)
    thawed = replace(expected, source_epoch=10)
    source.open(world.seal(expected), thawed, target.endpoints())
    failed = on_source.wait("Failed", thawed)
    assert (failed.reason, failed.detail) == (Reason.WRONG_EPOCH, "source_epoch")


def test_a_source_with_another_attempt_is_refused_by_name(world, zmq_ends):
    target, _ = zmq_ends.new_target()
    source, on_source = zmq_ends.new_source()
    expected = world.ticket()
    target.expect(expected)
    older = replace(expected, attempt=2)
    source.open(world.seal(expected), older, target.endpoints())
    assert on_source.wait("Failed", older).reason is Reason.WRONG_ATTEMPT


def test_cancelling_in_the_middle_closes_both_ends_once(world, zmq_ends, large):
    target, on_target = zmq_ends.new_target(layout=large)
    source, on_source = zmq_ends.new_source(layout=large)
    ticket = world.ticket(blocks=40, layout=large)
    target.expect(ticket)
    blocks = world.blocks(ticket, large)
    source.open(world.seal(ticket), ticket, target.endpoints())
    source.push(ticket.ticket_id, 0, [memoryview(block) for block in blocks[:20]])
    places = bind_places(target, on_target, ticket, large)
    source.push(ticket.ticket_id, 20, [memoryview(block) for block in blocks[20:]])
    source.cancel(ticket.ticket_id)
    on_source.wait("Closed", ticket)
    for block in blocks:
        block[:] = bytes(len(block))
    on_target.wait("Closed", ticket)
    assert on_source.names(ticket) == ["Closed"]
    assert on_target.names(ticket) == ["Opened", "Failed", "Closed"]
    original = world.blocks(ticket, large)
    empty = bytes(large.block_bytes())
    assert all(place in (empty, sent) for place, sent in zip(places, original, strict=True))


def test_blocks_may_be_reused_as_soon_as_closed_came(world, zmq_ends, large):
    """The second key: after Closed nobody reads, so what is written then never arrives anywhere."""
    target, on_target = zmq_ends.new_target(layout=large)
    source, on_source = zmq_ends.new_source(layout=large)
    for _ in range(10):
        ticket = world.ticket(blocks=8, layout=large)
        target.expect(ticket)
        blocks = send_all(world, source, ticket, target.endpoints(), large)
        places = receive_all(target, on_target, ticket, large)
        on_source.wait("Closed", ticket)
        for block in blocks:
            block[:] = bytes(len(block))
        assert places == world.blocks(ticket, large)


def test_a_stalled_target_delays_neither_the_caller_nor_another_target(world, zmq_ends, large):
    unblock = threading.Event()

    def stall(event):
        unblock.wait(20)

    stalled, _ = zmq_ends.new_target(layout=large, emit=stall)
    try:
        healthy, on_healthy = zmq_ends.new_target(
            layout=large, identity=Identity(worker_id="target-c", epoch=5)
        )
        source, on_source = zmq_ends.new_source(layout=large)
        stuck = world.ticket(blocks=60, layout=large, lease_ms=400)
        stalled.expect(stuck)
        send_all(world, source, stuck, stalled.endpoints(), large)
        ticket = world.ticket(blocks=20, layout=large, target_id="target-c", target_epoch=5)
        healthy.expect(ticket)
        sent = send_all(world, source, ticket, healthy.endpoints(), large)
        assert receive_all(healthy, on_healthy, ticket, large) == sent
        on_source.wait("Committed", ticket)
        assert on_source.wait("Failed", stuck).reason is Reason.LEASE_OVER
        on_source.wait("Closed", stuck)
    finally:
        unblock.set()


@pytest.fixture
def reluctant_target():
    """A target that takes a transfer and grants everything, but reads blocks only when it is told to."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.RCVHWM, 1)
        router.setsockopt(zmq.RCVBUF, 64 * 1024)
        router.setsockopt(zmq.RCVTIMEO, 10_000)
        router.bind("tcp://127.0.0.1:0")
        yield router


def take_up(router) -> None:
    for answer in (wire.HelloAccepted(target_id="target-b"), wire.Grant(total_bytes=2**40)):
        peer, header = router.recv_multipart()
        router.send_multipart([peer, wire.encode(replace(wire.decode(header), message=answer))])


def test_a_block_that_waits_in_a_socket_counts_as_being_read(world, zmq_ends, large, reluctant_target):
    source, on_source = zmq_ends.new_source(layout=large)
    ticket = world.ticket(blocks=200, layout=large, lease_ms=60_000)
    endpoint = reluctant_target.getsockopt(zmq.LAST_ENDPOINT).decode()
    blocks = send_all(world, source, ticket, (endpoint,), large)
    take_up(reluctant_target)
    header, payload = reluctant_target.recv_multipart()[1:]

    def let_source_work(rounds):
        """A transfer that fails at once shows that the source's thread has come round."""
        for _ in range(rounds):
            hopeless = world.ticket(layout=large)
            source.open(world.seal(hopeless), hopeless, ("nonsense",))
            on_source.wait("Closed", hopeless)

    let_source_work(rounds=40)
    source.cancel(ticket.ticket_id)
    let_source_work(rounds=2)
    if "Closed" in on_source.names(ticket):
        for block in blocks:
            block[:] = bytes(len(block))
    while not isinstance(wire.decode(header).message, wire.Abort):
        frame = wire.decode(header).message
        assert not isinstance(frame, wire.BlockFrame) or block_digest(payload) == frame.digest
        header, *payloads = reluctant_target.recv_multipart()[1:]
        payload = payloads[0] if payloads else b""
    on_source.wait("Closed", ticket)


def test_a_target_that_stops_reading_frees_the_blocks_of_the_source(world, zmq_ends, large, reluctant_target):
    """Its sockets are full and stay full: the connection is given up, so that Closed can come."""
    source, on_source = zmq_ends.new_source(layout=large)
    ticket = world.ticket(blocks=200, layout=large, lease_ms=400)
    endpoint = reluctant_target.getsockopt(zmq.LAST_ENDPOINT).decode()
    send_all(world, source, ticket, (endpoint,), large)
    take_up(reluctant_target)
    assert on_source.wait("Failed", ticket).reason is Reason.LEASE_OVER
    on_source.wait("Closed", ticket)
    assert source.counters()["blocks_sent"] > 0
    assert on_source.names(ticket) == ["Failed", "Closed"]


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_a_target_that_dies_fails_the_source_without_waiting_for_the_lease(
    world, zmq_ends, large, tmp_path, scheme
):
    bind = "tcp://127.0.0.1:0" if scheme == "tcp" else f"ipc://{tmp_path}/kv"
    target, on_target = zmq_ends.new_target(bind, layout=large)
    source, on_source = zmq_ends.new_source(layout=large)
    ticket = world.ticket(layout=large, lease_ms=3_600_000)
    target.expect(ticket)
    send_all(world, source, ticket, target.endpoints(), large)
    on_target.wait("Opened", ticket)
    target.close()
    assert on_source.wait("Failed", ticket).reason is Reason.PEER_LOST
    on_source.wait("Closed", ticket)
    assert on_target.names(ticket) == ["Opened", "Closed"]


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_a_source_that_dies_fails_the_target_without_waiting_for_the_lease(
    world, zmq_ends, large, tmp_path, scheme
):
    bind = "tcp://127.0.0.1:0" if scheme == "tcp" else f"ipc://{tmp_path}/kv"
    target, on_target = zmq_ends.new_target(bind, layout=large)
    source, on_source = zmq_ends.new_source(layout=large)
    ticket = world.ticket(layout=large, lease_ms=3_600_000)
    target.expect(ticket)
    source.open(world.seal(ticket), ticket, target.endpoints())
    on_target.wait("Opened", ticket)
    source.close()
    assert on_source.names(ticket) == ["Closed"]
    assert on_target.wait("Failed", ticket).reason is Reason.PEER_LOST
    on_target.wait("Closed", ticket)


def test_garbage_on_the_port_hurts_nobody(world, zmq_ends, large):
    target, on_target = zmq_ends.new_target(layout=large)
    (endpoint,) = target.endpoints()
    address = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
    noise = np.random.default_rng(1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as intruder:
        intruder.setsockopt(zmq.LINGER, 0)
        intruder.connect(endpoint)
        for size in (0, 1, 40, 3000):
            intruder.send(noise.bytes(size))
        intruder.send_multipart([noise.bytes(20)] * 3)
        intruder.send_multipart([noise.bytes(20)] * 50)
        for _ in range(10):
            with socket.create_connection(address) as raw:
                raw.sendall(noise.bytes(2000))
        with zmq.Context() as other, other.socket(zmq.DEALER) as oversize:
            oversize.setsockopt(zmq.LINGER, 0)
            oversize.connect(endpoint)
            oversize.send(bytes(large.block_bytes() + 5000))
            source, on_source = zmq_ends.new_source(layout=large)
            ticket = world.ticket(layout=large)
            target.expect(ticket)
            sent = send_all(world, source, ticket, target.endpoints(), large)
            assert receive_all(target, on_target, ticket, large) == sent
            on_source.wait("Committed", ticket)
    assert target.counters()["malformed"] >= 1


def test_a_peer_that_keeps_sending_garbage_is_ignored(world, zmq_ends):
    target, _ = zmq_ends.new_target(limits=TargetLimits(malformed_max=3))
    greeting = wire.Envelope(
        source_epoch=11, target_epoch=22, attempt=0, ticket_id=wire.NO_TICKET, message=world.hello()
    )
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.RCVTIMEO, 10_000)
        peer.connect(target.endpoints()[0])
        for _ in range(2):
            peer.send(b"\xc1")
        peer.send(wire.encode(greeting))
        assert isinstance(wire.decode(peer.recv()).message, wire.HelloAccepted)
        for _ in range(2):
            peer.send(b"\xc1")
        peer.send(wire.encode(greeting))
        other, _ = zmq_ends.new_source()
        ticket = world.ticket()
        other.open(world.seal(ticket), ticket, target.endpoints())
        deadline = time.monotonic() + 10
        while "ignored_peer" not in target.counters() and time.monotonic() < deadline:
            peer.poll(1)
        assert target.counters()["ignored_peer"] >= 1
        assert peer.poll(0) == 0


@pytest.mark.parametrize(
    "address",
    [
        "tcp://*:5555",
        "tcp://0.0.0.0:0",
        "tcp://[::]:0",
        "tcp://0:0",
        "tcp://:5555",
        "tcp://127.0.0.1",
        "udp://127.0.0.1:1",
        "ipc://",
        "nonsense",
        "ipc:///nowhere/at/all/kv",
    ],
)
def test_an_address_that_may_not_or_cannot_be_bound_is_refused(address):
    with pytest.raises(BindRefused):
        ZmqTargetTransport(ZmqOptions(block_bytes=1024), [address])


def test_every_interface_is_bound_when_it_is_allowed():
    transport = ZmqTargetTransport(ZmqOptions(block_bytes=1024), ["tcp://*:0"], allow_wildcard=True)
    assert transport.endpoints()[0].startswith("tcp://0.0.0.0:")
    transport.close()


def test_an_address_in_use_is_refused(zmq_ends):
    target, _ = zmq_ends.new_target()
    with pytest.raises(BindRefused):
        ZmqTargetTransport(ZmqOptions(block_bytes=1024), target.endpoints())
