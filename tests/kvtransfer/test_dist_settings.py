"""What surrounds a pair: settings, endpoints, signals, the rendezvous, and how workers put it together."""

import os
import threading
import time

import pytest

from kvtransfer import dist_endpoint, dist_signals
from kvtransfer.assembly import TransportWishes, source_limits, source_transport, target_transport
from kvtransfer.dist_group import GroupOptions, PairBroken, Rendezvous
from kvtransfer.dist_signals import Entry, Join, Joined, Leave, Ready
from kvtransfer.dist_transport import DistOptions
from kvtransfer.errors import BindRefused, WireError
from kvtransfer.transport import LinkStatus
from tests.fakes.dist_wires import WAIT_S
from tests.kvtransfer.conftest import World


def wishes_for(backends=("gloo",), **changes) -> TransportWishes:
    return TransportWishes(block_bytes=64, shared_memory=False, backends=backends, **changes)


def test_what_is_no_endpoint_of_a_pair_is_left_to_the_carrier():
    carriers = ("ipc:///run/kv", "tcp://127.0.0.1:7", "shm:///run/ring")
    assert dist_endpoint.offered(("gloo",), carriers) == ("gloo+ipc:///run/kv", "gloo+tcp://127.0.0.1:7")
    assert dist_endpoint.split("gloo+tcp://127.0.0.1:7") == ("gloo", "tcp://127.0.0.1:7")
    for other in (*carriers, "mpi+tcp://127.0.0.1:7", "gloo+shm://x", "gloo+", "+tcp://x", ""):
        assert dist_endpoint.split(other) is None


@pytest.mark.parametrize(
    "signal",
    [
        Join(backend="gloo", block_bytes=1),
        Entry(key="0/1", value=bytes(4096)),
        Joined(),
        Ready(number=2**64 - 1, count=64, payload_bytes=2**32 - 1, header=b"h"),
        Leave(),
    ],
)
def test_a_signal_is_read_as_it_was_said(signal):
    encoded = dist_signals.encode(signal)
    assert dist_signals.is_signal(encoded)
    assert dist_signals.decode(encoded) == signal
    for cut in range(1, len(encoded)):
        with pytest.raises(WireError):
            dist_signals.decode(encoded[:cut])


def test_a_rendezvous_waits_for_the_other_end_and_gives_up_when_told():
    said = []
    rendezvous = Rendezvous(lambda key, value: said.append((key, value)), 10 * WAIT_S)
    rendezvous.set("0", b"here")
    rendezvous.learn("1", b"there")
    assert (rendezvous.get("0"), rendezvous.get("1"), said) == (b"here", b"there", [("0", b"here")])
    threading.Timer(0.01, rendezvous.give_up).start()
    with pytest.raises(PairBroken):
        rendezvous.get("2")


def test_a_rendezvous_whose_other_end_is_silent_fails():
    with pytest.raises(PairBroken):
        Rendezvous(lambda key, value: None, 0.01).get("1")


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "", "*", "localhost", "10.0.0.1"])
def test_an_address_that_would_be_open_to_others_is_refused(address):
    with pytest.raises(BindRefused):
        GroupOptions(address=address)


def test_a_remote_address_needs_leave():
    assert GroupOptions(address="10.0.0.1", allow_remote=True).address == "10.0.0.1"


@pytest.mark.parametrize("backend", ["mpi", "nccl", ""])
def test_a_backend_that_cannot_or_may_not_be_used_is_refused(backend):
    with pytest.raises(BindRefused):
        DistOptions(backends=(backend,), block_bytes=64)


def test_workers_that_wish_for_it_offer_it_first_and_meet_over_it():
    """As the workers are put together, without a choice of address, group or patience."""
    target = target_transport(wishes_for(), World.target, ["tcp://127.0.0.1:0"], os.urandom)
    pair, plain = target.endpoints()
    assert pair == f"gloo+{plain}"
    source = source_transport(wishes_for(), World.source)
    connection = source.dial(pair, World.source, World.target)
    deadline = time.monotonic() + source_limits(wishes_for()).connect_ms / 1000
    while connection.status() is not LinkStatus.UP:
        assert time.monotonic() < deadline, "the two ends do not meet"
        source.wait(0.01)
        connection.receive()
        target.wait(0)
        target.receive()
    source.close()
    target.close()


def test_workers_that_do_not_wish_for_it_have_none_of_it():
    target = target_transport(wishes_for(()), World.target, ["tcp://127.0.0.1:0"], os.urandom)
    assert [endpoint.partition(":")[0] for endpoint in target.endpoints()] == ["tcp"]
    target.close()
    source = source_transport(wishes_for(()), World.source)
    with pytest.raises(ValueError, match="endpoint"):
        source.dial("gloo+tcp://127.0.0.1:1", World.source, World.target)
    source.close()


@pytest.mark.parametrize("changes", [{"group_address": "10.0.0.1"}, {"backends": ("nccl",)}])
def test_workers_are_not_opened_to_other_machines_by_a_wish_alone(changes):
    with pytest.raises(BindRefused):
        source_transport(wishes_for(**changes), World.source)
    with pytest.raises(BindRefused):
        target_transport(wishes_for(**changes), World.target, ["tcp://127.0.0.1:0"], os.urandom)
