"""Whole transfers over ZeroMQ inside one process, with the real threads and sockets."""

import multiprocessing
import os
import socket
import time
from dataclasses import replace

import numpy as np
import pytest
import zmq

from kvtransfer import wire
from kvtransfer.assembly import TransportWishes, target_transport
from kvtransfer.bind_rules import BindRules
from kvtransfer.digest import block_digest
from kvtransfer.errors import BindRefused, Reason
from kvtransfer.identity import Identity
from kvtransfer.source_io import SourceLimits
from kvtransfer.target_io import TargetLimits
from kvtransfer.transport import LinkStatus
from kvtransfer.zmq_socket import ZmqOptions
from kvtransfer.zmq_transport import ZmqSourceTransport, ZmqTargetTransport
from tests.kvtransfer.conftest import TARGET, receive_all, send_all


@pytest.fixture
def world(patient):
    return patient


def assert_receives(world, ends, target, on_target, endpoints, layout):
    """A new source's blocks arrive whole."""
    source, on_source = ends.new_source(layout=layout)
    ticket = world.ticket(layout=layout)
    target.expect(ticket)
    sent = send_all(world, source, ticket, endpoints, layout)
    assert receive_all(target, on_target, ticket, layout) == sent
    on_source.wait("Committed", ticket)


def test_several_addresses_are_bound_at_once_and_the_first_that_answers_is_used(world, ends, large, tmp_path):
    target, on_target = ends.new_target(f"ipc://{tmp_path}/kv", "tcp://127.0.0.1:0", layout=large)
    local, remote = target.endpoints()
    assert local == f"ipc://{tmp_path}/kv"
    for endpoints in [(local, remote), (f"ipc://{tmp_path}/nobody", remote), ("nonsense", remote)]:
        assert_receives(world, ends, target, on_target, endpoints, large)


def test_a_target_offers_what_is_advertised_in_place_of_its_tcp_addresses_alone(tmp_path):
    wishes = TransportWishes(block_bytes=64, shared_memory=False, advertised=("tcp://public:7001",))
    local = f"ipc://{tmp_path}/kv"
    target = target_transport(wishes, TARGET, (local, "tcp://127.0.0.1:0"), os.urandom)
    assert target.endpoints() == (local, "tcp://public:7001")
    target.close()
    with pytest.raises(BindRefused, match="advertised"):
        target_transport(wishes, TARGET, (f"{local}-2",), os.urandom)


def test_a_target_that_nobody_answers_for_is_unreachable(world, ends, tmp_path):
    source, on_source = ends.new_source(limits=SourceLimits(connect_ms=100))
    ticket = world.ticket()
    source.open(world.seal(ticket), ticket, (f"ipc://{tmp_path}/nobody",))
    failed = on_source.wait("Failed", ticket)
    assert failed.reason is Reason.UNREACHABLE
    on_source.wait("Closed", ticket)


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


def test_a_block_that_waits_in_a_socket_counts_as_being_read(world, ends, large, reluctant_target):
    source, on_source = ends.new_source(layout=large)
    ticket = world.ticket(blocks=200, layout=large, lease_ms=60_000)
    endpoint = reluctant_target.getsockopt(zmq.LAST_ENDPOINT).decode()
    blocks = send_all(world, source, ticket, (endpoint,), large)
    take_up(reluctant_target)
    header, *payloads = reluctant_target.recv_multipart()[1:]

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
        if isinstance(run := wire.decode(header).message, wire.BlockRun):
            assert b"".join(map(block_digest, payloads)) == run.digests
        header, *payloads = reluctant_target.recv_multipart()[1:]
    on_source.wait("Closed", ticket)


def test_a_target_that_stops_reading_frees_the_blocks_of_the_source(world, ends, large, reluctant_target):
    """Its sockets are full and stay full: the connection is given up, so that Closed can come."""
    source, on_source = ends.new_source(layout=large)
    ticket = world.ticket(blocks=200, layout=large, lease_ms=400)
    endpoint = reluctant_target.getsockopt(zmq.LAST_ENDPOINT).decode()
    send_all(world, source, ticket, (endpoint,), large)
    take_up(reluctant_target)
    assert on_source.wait("Failed", ticket).reason is Reason.LEASE_OVER
    on_source.wait("Closed", ticket)
    assert source.counters()["blocks_sent"] > 0
    assert on_source.names(ticket) == ["Failed", "Closed"]


def test_garbage_on_the_port_hurts_nobody(world, ends, large):
    target, on_target = ends.new_target(layout=large)
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
            assert_receives(world, ends, target, on_target, target.endpoints(), large)
    assert target.counters()["malformed"] >= 1


def test_a_message_of_more_blocks_than_one_may_have_is_malformed(world, ends):
    target, _ = ends.new_target()
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.RCVTIMEO, 10_000)
        peer.connect(target.endpoints()[0])
        run = wire.BlockRun(first_index=0, digests=bytes(16 * wire.RUN_BLOCKS_MAX))
        header = wire.encode(wire.for_ticket(world.ticket(), run))
        peer.send_multipart([header, *[b"x"] * (wire.RUN_BLOCKS_MAX + 1)])
        greet(peer, world)
        assert target.counters() == {"malformed": 1}
        peer.send_multipart([header, *[b"x"] * wire.RUN_BLOCKS_MAX])
        greet(peer, world)
    assert target.counters() == {"malformed": 1, "unknown_ticket": 1}


def greeting(world) -> bytes:
    fences = {"source_epoch": 11, "target_epoch": 22, "attempt": 0, "ticket_id": wire.NO_TICKET}
    return wire.encode(wire.Envelope(**fences, message=world.hello()))


def greet(peer, world) -> None:
    """What was sent before it is dealt with when the answer comes."""
    peer.send(greeting(world))
    assert isinstance(wire.decode(peer.recv()).message, wire.HelloAccepted)


def test_a_peer_that_keeps_sending_garbage_is_ignored(world, ends):
    target, _ = ends.new_target(limits=TargetLimits(malformed_max=3))
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.RCVTIMEO, 10_000)
        peer.connect(target.endpoints()[0])
        for _ in range(2):
            peer.send(b"\xc1")
        greet(peer, world)
        for _ in range(2):
            peer.send(b"\xc1")
        peer.send(greeting(world))
        other, _ = ends.new_source()
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
    transport = ZmqTargetTransport(
        ZmqOptions(block_bytes=1024), ["tcp://*:0"], rules=BindRules(allow_wildcard=True, allow_remote=True)
    )
    assert transport.endpoints()[0].startswith("tcp://0.0.0.0:")
    transport.close()


def test_an_address_in_use_is_refused(ends):
    target, _ = ends.new_target()
    with pytest.raises(BindRefused):
        ZmqTargetTransport(ZmqOptions(block_bytes=1024), target.endpoints())


def test_an_ipc_address_that_somebody_has_is_refused_and_stays_his(world, ends, large, tmp_path):
    target, on_target = ends.new_target(f"ipc://{tmp_path}/kv", layout=large)
    with pytest.raises(BindRefused, match="somebody listens there"):
        ZmqTargetTransport(ZmqOptions(block_bytes=64), [f"ipc://{tmp_path}/kv"])
    assert_receives(world, ends, target, on_target, target.endpoints(), large)


def test_an_ipc_address_that_a_dead_process_left_is_taken_over(tmp_path):
    path = tmp_path / "kv"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    target = ZmqTargetTransport(ZmqOptions(block_bytes=64), [f"ipc://{path}"])
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(path))
    target.close()


def test_a_file_that_is_no_socket_is_never_replaced_by_one(tmp_path):
    (tmp_path / "kv").write_text("precious")
    with pytest.raises(BindRefused, match="no socket"):
        ZmqTargetTransport(ZmqOptions(block_bytes=64), [f"ipc://{tmp_path}/kv"])
    assert (tmp_path / "kv").read_text() == "precious"


def test_a_target_that_ends_removes_its_ipc_files_and_nobody_elses(tmp_path):
    target = ZmqTargetTransport(ZmqOptions(block_bytes=64), [f"ipc://{tmp_path}/{name}" for name in "ab"])
    (tmp_path / "b").unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "b"))
        target.close()
        assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_target_that_can_have_only_some_of_its_addresses_leaves_no_file(tmp_path):
    with pytest.raises(BindRefused):
        ZmqTargetTransport(ZmqOptions(block_bytes=64), [f"ipc://{tmp_path}/kv", "ipc:///nowhere/at/all/kv"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["ipc://*", "ipc://@crossdock-test-of-names"])
def test_an_ipc_address_without_a_file_of_ours_is_bound_and_let_go(address):
    ZmqTargetTransport(ZmqOptions(block_bytes=64), [address]).close()


def stand_still(pipe, address):
    """A target that reads nothing until it is told to."""
    transport = ZmqTargetTransport(ZmqOptions(block_bytes=4096), [address])
    pipe.send(transport.endpoints()[0])
    pipe.recv()
    quiet = 0
    while quiet < 50:
        transport.wait(0.01)
        quiet += 1
        while transport.receive() is not None:
            quiet = 0
    pipe.send(True)
    transport.close()


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_target_that_stood_still_under_load_goes_on_though_its_source_has_gone(kind, tmp_path):
    """Its socket has stopped reading for longer than any heartbeat, and then the connection breaks."""
    context = multiprocessing.get_context("spawn")
    bind = f"ipc://{tmp_path}/kv" if kind == "ipc" else "tcp://127.0.0.1:0"
    ours, theirs = context.Pipe()
    process = context.Process(target=stand_still, args=(theirs, bind))
    process.start()
    address = ours.recv()
    source = ZmqSourceTransport(ZmqOptions(block_bytes=4096))
    connection = source.dial(address, Identity(worker_id="s", epoch=1), Identity(worker_id="t", epoch=2))
    while connection.status() is not LinkStatus.UP:
        source.wait(0.01)
    refused = 0
    while refused < 50:
        refused = 0 if connection.send(bytes(200), None, None) else refused + 1
        source.wait(0.001)
    source.wait(4.0)
    source.close()
    ours.send(True)
    assert ours.poll(20) and ours.recv()
    process.join()
    assert process.exitcode == 0
