"""The receiving end of a pair: what is received, into what, in which order, and what a peer may not do."""

import time

import pytest

from kvtransfer import dist_signals
from kvtransfer.dist_group import ENTRIES_MAX
from kvtransfer.dist_signals import Entry, Join, Joined, Leave, Ready
from kvtransfer.dist_target import DistTargetTransport
from kvtransfer.memory_transport import MemoryNetwork
from kvtransfer.transport import Arrival, PeerGone
from kvtransfer.wire import RUN_BYTES_MAX
from tests.fakes.dist_wires import BLOCK_BYTES, WAIT_S, WINDOW_BLOCKS, Wires, options_with, payload


class Peer:
    """Speaks to a target in raw headers."""

    def __init__(self, world, network) -> None:
        self.transport = network.source()
        self.connection = self.transport.dial("ipc://memory", world.source, world.target)

    def say(self, *signals) -> None:
        for signal in signals:
            assert self.connection.send(dist_signals.encode(signal))

    def announce(self, first, count, *, run=1) -> None:
        """Messages of `run` blocks each."""
        for number in range(first, first + count, run):
            header = f"block {number}".encode()
            self.say(Ready(number=number, count=run, payload_bytes=BLOCK_BYTES, header=header))

    def hear(self):
        """Everything said to it so far."""
        heard = []
        while (header := self.connection.receive()) is not None:
            heard.append(dist_signals.decode(header))
        return heard


class TargetOnly:
    """A target whose group is made of fakes, one raw peer, and the far end of the wires."""

    def __init__(self, world, wires, **changes) -> None:
        self.wires = wires
        self._block_bytes = changes.get("block_bytes", BLOCK_BYTES)
        self._world = world
        self._network = MemoryNetwork()
        listening = self._network.listen("ipc://memory")
        self.transport = DistTargetTransport(options_with(**changes), listening, make_group=wires.join)
        self.peer = self.new_peer()

    def new_peer(self) -> Peer:
        return Peer(self._world, self._network)

    def next(self):
        """The next arrival, waiting for it."""
        deadline = time.monotonic() + WAIT_S
        while (arrival := self.transport.receive()) is None:
            assert time.monotonic() < deadline, "nothing arrives"
            self.transport.wait(0.05)
        return arrival

    def all_there_is(self) -> list[Arrival | PeerGone]:
        arrivals = []
        while (arrival := self.transport.receive()) is not None:
            arrivals.append(arrival)
        return arrivals

    def join(self) -> None:
        """The peer and the target make a group."""
        self.peer.say(Join(backend="gloo", block_bytes=self._block_bytes), Entry(key="0", value=b"address"))
        heard = []
        while Joined() not in heard:
            assert self.transport.receive() is None
            self.transport.wait(0.05)
            heard += self.peer.hear()
        assert heard == [Entry(key="1", value=b"address"), Joined()]


@pytest.fixture
def alone(world):
    """Makes a TargetOnly, and closes it."""
    made = []

    def make(*, move_at_once=True, **changes) -> TargetOnly:
        made.append(TargetOnly(world, Wires(move_at_once=move_at_once), **changes))
        return made[-1]

    yield make
    for each in made:
        each.wires.let_all_move()
        each.transport.close()


def contents(arrival) -> list[bytes]:
    return [bytes(each) for each in arrival.payloads]


def test_a_block_is_received_only_after_it_was_announced(alone):
    target = alone()
    target.join()
    assert target.transport.receive() is None
    assert target.wires.count("receive") == 0
    target.peer.announce(0, 1)
    assert target.transport.receive() is None
    target.wires.wait_for("receive", 0)
    target.wires.payloads.put(payload(0))
    arrival = target.next()
    assert (arrival.header, contents(arrival)) == (b"block 0", [payload(0)])
    assert target.wires.count("receive") == 1


def test_a_message_does_not_overtake_a_block_that_was_announced_before_it(alone):
    target = alone()
    target.join()
    assert target.peer.connection.send(b"before")
    target.peer.announce(0, 2)
    assert target.peer.connection.send(b"after")
    assert [each.header for each in target.all_there_is()] == [b"before"]
    for number in range(2):
        target.wires.payloads.put(payload(number))
    assert [target.next().header for _ in range(3)] == [b"block 0", b"block 1", b"after"]


def test_no_more_is_received_than_there_is_staging_for(alone):
    target = alone()
    target.join()
    target.peer.announce(0, 10)
    for number in range(10):
        target.wires.payloads.put(payload(number))
    assert target.transport.receive() is None
    target.wires.wait_for("receive", WINDOW_BLOCKS - 1)
    for number in range(10):
        arrival = target.next()
        assert contents(arrival) == [payload(number)]
        assert target.wires.count("receive") <= number + WINDOW_BLOCKS
    assert target.wires.count("receive") == 10


@pytest.mark.parametrize("window_blocks", [2, 4])
def test_a_message_of_several_blocks_arrives_when_all_are_here_and_its_staging_is_used_again(
    alone, window_blocks
):
    target = alone(window_bytes=window_blocks * BLOCK_BYTES)
    target.join()
    target.peer.announce(0, 12, run=3)
    for first in range(0, 12, 3):
        assert target.transport.receive() is None
        target.wires.wait_for("receive", first + 2)
        assert target.wires.count("receive") == first + 3
        for number in range(first, first + 3):
            target.wires.payloads.put(payload(number))
        arrival = target.next()
        assert arrival.header == f"block {first}".encode()
        assert contents(arrival) == [payload(number) for number in range(first, first + 3)]
    assert len({memory.data_ptr() for memory in target.wires.staging}) <= 2 * 3


@pytest.mark.parametrize(
    "wish", [Join(backend="gloo", block_bytes=BLOCK_BYTES + 1), Join(backend="nccl", block_bytes=BLOCK_BYTES)]
)
def test_a_pair_of_another_size_or_backend_is_refused(alone, wish):
    target = alone()
    target.peer.say(wish)
    assert target.transport.receive() is None
    assert target.peer.hear() == [Leave()]


def test_a_target_has_only_so_many_pairs(alone):
    target = alone(pairs_max=0)
    target.peer.say(Join(backend="gloo", block_bytes=BLOCK_BYTES))
    assert target.transport.receive() is None
    assert target.peer.hear() == [Leave()]


@pytest.mark.parametrize(
    "offence",
    [
        Ready(number=0, count=1, payload_bytes=BLOCK_BYTES - 1, header=b"short"),
        Ready(number=0, count=1, payload_bytes=BLOCK_BYTES + 1, header=b"long"),
        Ready(number=1, count=1, payload_bytes=BLOCK_BYTES, header=b"out of order"),
        Join(backend="gloo", block_bytes=BLOCK_BYTES),
    ],
)
def test_a_peer_that_announces_what_cannot_be_is_cut_off_before_anything_is_received(alone, offence):
    target = alone()
    target.join()
    target.peer.say(offence)
    gone = target.next()
    assert isinstance(gone, PeerGone)
    assert target.peer.hear() == [Leave()]
    target.wires.wait_for("destroyed")
    assert target.wires.count("receive") == 0
    stray = Entry(key="late", value=b"x")
    target.peer.say(stray)
    assert target.next().header == dist_signals.encode(stray)


def test_a_peer_that_announces_more_blocks_than_a_message_may_have_is_cut_off(alone):
    block_bytes = RUN_BYTES_MAX // 2
    target = alone(block_bytes=block_bytes)
    target.join()
    target.peer.say(Ready(number=0, count=3, payload_bytes=block_bytes, header=b"h"))
    assert isinstance(target.next(), PeerGone)
    assert target.wires.count("receive") == 0


def test_a_peer_that_fills_the_rendezvous_is_cut_off(alone):
    target = alone()
    target.join()
    target.peer.say(*(Entry(key=str(index), value=b"x") for index in range(ENTRIES_MAX)))
    assert isinstance(target.next(), PeerGone)


def test_signals_without_a_pair_count_as_messages_that_are_none(alone):
    target = alone()
    stray = [
        dist_signals.encode(Entry(key="1", value=b"x")),
        dist_signals.encode(Ready(number=0, count=1, payload_bytes=BLOCK_BYTES, header=b"h")),
        dist_signals.encode(Joined()),
        dist_signals.MARK + b"garbage",
    ]
    for header in stray:
        assert target.peer.connection.send(header)
    assert [arrival.header for arrival in target.all_there_is()] == stray


def test_staging_of_a_pair_that_broke_is_not_used_again(alone):
    """Whoever writes late writes into memory that nobody else has."""
    target = alone(move_at_once=False, move_s=0.05)
    target.join()
    target.peer.announce(0, 2)
    assert isinstance(target.next(), PeerGone)
    target.wires.wait_for("dropped", 0)
    order = [what for what, _ in target.wires.seen if what in ("destroyed", "dropped")]
    assert order == ["destroyed", "dropped"]
    used = {memory.data_ptr() for memory in target.wires.staging}
    target.wires.permits.release(100)
    target.peer = target.new_peer()
    target.join()
    target.peer.announce(0, WINDOW_BLOCKS)
    for number in range(WINDOW_BLOCKS):
        target.wires.payloads.put(payload(number))
        assert contents(target.next()) == [payload(number)]
    fresh = [memory.data_ptr() for memory in target.wires.staging][-WINDOW_BLOCKS:]
    assert used.isdisjoint(fresh)
