"""Both ends of a pair without torch.distributed: what is announced, what is received into, what a peer may not."""

import queue
import threading
import time

import pytest
import torch

from kvtransfer import dist_endpoint, dist_signals
from kvtransfer.dist_group import ENTRIES_MAX, GroupOptions, PairBroken, Rendezvous
from kvtransfer.dist_signals import Entry, Join, Joined, Leave, Ready
from kvtransfer.dist_target import DistTargetTransport
from kvtransfer.dist_transport import DistOptions, DistSourceTransport
from kvtransfer.errors import BindRefused, WireError
from kvtransfer.memory_transport import MemoryNetwork
from kvtransfer.transport import Arrival, LinkStatus, PeerGone

BLOCK_BYTES = 64
WINDOW_BLOCKS = 3
ENDPOINT = "gloo+ipc://memory"
WAIT_S = 20


class Wires:
    """Makes groups inside this process; what each end does is in the log. move_at_once: else a block moves
    when there is a permit for it."""

    def __init__(self, *, move_at_once=True) -> None:
        self.log: queue.Queue[tuple[str, int]] = queue.Queue()
        self.seen: list[tuple[str, int]] = []
        self.permits = threading.Semaphore(10**6 if move_at_once else 0)
        self.payloads: queue.Queue[bytes] = queue.Queue()
        self.staging: list[torch.Tensor] = []
        self.breaks_at = -1

    def join(self, backend, rank, rendezvous, options):
        rendezvous.set(str(rank), b"address")
        rendezvous.get(str(1 - rank))
        return FakeGroup(self)

    def let_all_move(self) -> None:
        """At the end of a test: nobody waits in vain."""
        self.permits.release(100)
        for _ in range(100):
            self.payloads.put(bytes(BLOCK_BYTES))

    def add(self, what, number=-1):
        self.log.put((what, number))

    def wait_for(self, what, number=-1):
        while (what, number) not in self.seen:
            self.seen.append(self.log.get(timeout=WAIT_S))

    def count(self, what) -> int:
        while not self.log.empty():
            self.seen.append(self.log.get())
        return sum(1 for each, _ in self.seen if each == what)


class FakeGroup:
    def __init__(self, wires) -> None:
        self._wires = wires

    def send(self, number, memory):
        self._wires.add("send", number)
        return FakeOperation(self._wires, number, lambda: self._wires.payloads.put(bytes(memory.numpy())))

    def receive(self, number, memory):
        self._wires.staging.append(memory)
        self._wires.add("receive", number)

        def fill():
            try:
                payload = self._wires.payloads.get(timeout=WAIT_S)
            except queue.Empty:
                raise PairBroken("nothing came") from None
            memory.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

        return FakeOperation(self._wires, number, fill)

    def destroy(self):
        self._wires.add("destroyed")


class FakeOperation:
    def __init__(self, wires, number, move) -> None:
        self._wires = wires
        self._number = number
        self._move = move

    def wait(self, timeout_s):
        self._wires.add("wait", self._number)
        if not self._wires.permits.acquire(timeout=timeout_s) or self._number == self._wires.breaks_at:
            raise PairBroken("broken on purpose")
        self._move()

    def drop(self):
        self._wires.add("dropped", self._number)


class Peer:
    """Speaks to a target in raw headers."""

    def __init__(self, world, network) -> None:
        self.transport = network.source()
        self.connection = self.transport.dial("ipc://memory", world.source, world.target)

    def say(self, *signals) -> None:
        for signal in signals:
            assert self.connection.send(dist_signals.encode(signal), None, None)

    def announce(self, first, count, payload_bytes=BLOCK_BYTES) -> None:
        for number in range(first, first + count):
            header = f"block {number}".encode()
            self.say(Ready(number=number, payload_bytes=payload_bytes, header=header))

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
        self.peer.say(Join(backend="gloo", block_bytes=BLOCK_BYTES), Entry(key="0", value=b"address"))
        heard = []
        while Joined() not in heard:
            assert self.transport.receive() is None
            self.transport.wait(0.05)
            heard += self.peer.hear()
        assert heard == [Entry(key="1", value=b"address"), Joined()]


def options_with(**changes) -> DistOptions:
    group = GroupOptions(join_s=WAIT_S, move_s=changes.pop("move_s", WAIT_S))
    fields = {
        "backends": ("gloo",),
        "block_bytes": BLOCK_BYTES,
        "window_bytes": WINDOW_BLOCKS * BLOCK_BYTES,
    } | changes
    return DistOptions(group=group, **fields)


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


def payload(number) -> bytes:
    return bytes([number + 1]) * BLOCK_BYTES


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
    assert (arrival.header, bytes(arrival.payload)) == (b"block 0", payload(0))
    assert target.wires.count("receive") == 1


def test_a_message_does_not_overtake_a_block_that_was_announced_before_it(alone):
    target = alone()
    target.join()
    assert target.peer.connection.send(b"before", None, None)
    target.peer.announce(0, 2)
    assert target.peer.connection.send(b"after", None, None)
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
        assert bytes(arrival.payload) == payload(number)
        assert target.wires.count("receive") <= number + WINDOW_BLOCKS
    assert target.wires.count("receive") == 10


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
        Ready(number=0, payload_bytes=BLOCK_BYTES - 1, header=b"short"),
        Ready(number=0, payload_bytes=BLOCK_BYTES + 1, header=b"long"),
        Ready(number=1, payload_bytes=BLOCK_BYTES, header=b"out of order"),
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


def test_a_peer_that_fills_the_rendezvous_is_cut_off(alone):
    target = alone()
    target.join()
    target.peer.say(*(Entry(key=str(index), value=b"x") for index in range(ENTRIES_MAX)))
    assert isinstance(target.next(), PeerGone)


def test_signals_without_a_pair_count_as_messages_that_are_none(alone):
    target = alone()
    stray = [
        dist_signals.encode(Entry(key="1", value=b"x")),
        dist_signals.encode(Ready(number=0, payload_bytes=BLOCK_BYTES, header=b"h")),
        dist_signals.encode(Joined()),
        dist_signals.MARK + b"garbage",
    ]
    for header in stray:
        assert target.peer.connection.send(header, None, None)
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
        assert bytes(target.next().payload) == payload(number)
    fresh = [memory.data_ptr() for memory in target.wires.staging][-WINDOW_BLOCKS:]
    assert used.isdisjoint(fresh)


class Both:
    """Two ends over memory, with fake groups between them."""

    def __init__(self, world, wires, clock=time.monotonic) -> None:
        self.world = world
        self.wires = wires
        network = MemoryNetwork()
        options = options_with()
        self.target = DistTargetTransport(options, network.listen("ipc://memory"), make_group=wires.join)
        self.source = DistSourceTransport(options, network.source(), make_group=wires.join, clock=clock)
        self.cut = network.cut
        self.arrivals: list[Arrival | PeerGone | tuple[bytes, bytes]] = []

    def dial(self):
        return self.source.dial(ENDPOINT, self.world.source, self.world.target)

    def until(self, condition) -> None:
        """Both ends work until the condition holds. Blocks arrive as (header, copy of the payload)."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, "nothing happens"
            self.source.wait(0.01)
            while (arrival := self.target.receive()) is not None:
                copied = getattr(arrival, "payload", None)
                self.arrivals.append(arrival if copied is None else (arrival.header, bytes(copied)))

    def up(self):
        connection = self.dial()
        self.until(lambda: connection.receive() or connection.status() is LinkStatus.UP)
        return connection


@pytest.fixture
def both(world):
    made = []

    def make(clock=time.monotonic, **wishes) -> Both:
        made.append(Both(world, Wires(**wishes), clock))
        return made[-1]

    yield make
    for each in made:
        each.wires.let_all_move()
        each.source.close()
        each.target.close()


def test_payloads_arrive_with_their_headers_and_memory_is_given_back_once(both):
    ends = both()
    connection = ends.up()
    reads = []
    for number in range(10):
        block = memoryview(bytearray(payload(number)))
        header = f"h{number}".encode()
        ends.until(lambda header=header, block=block: connection.send(header, block, lambda: reads.append(1)))
    ends.until(lambda: len(ends.arrivals) == 10 == len(reads))
    assert ends.arrivals == [(f"h{number}".encode(), payload(number)) for number in range(10)]


def test_a_full_connection_takes_no_more_until_something_was_read(both):
    ends = both(move_at_once=False)
    connection = ends.up()
    reads = []
    block = memoryview(bytearray(BLOCK_BYTES))
    sent = 0
    while connection.send(b"h", block, lambda: reads.append(1)):
        sent += 1
    assert sent == WINDOW_BLOCKS
    ends.wires.permits.release(100)
    ends.until(lambda: reads)
    assert connection.send(b"h", block, lambda: None)


def test_memory_is_given_back_only_when_the_group_is_gone(both):
    ends = both(move_at_once=False)
    connection = ends.up()
    reads = []
    block = memoryview(bytearray(BLOCK_BYTES))
    assert connection.send(b"h", block, lambda: reads.append(ends.wires.count("destroyed")))
    ends.wires.wait_for("wait", 0)
    ends.wires.breaks_at = 0
    ends.cut()
    assert connection.status() is LinkStatus.LOST
    connection.close()
    assert reads == []
    ends.wires.permits.release(100)
    ends.until(lambda: reads)
    assert reads[0] >= 1


def test_closing_the_source_waits_for_what_is_being_read(both):
    ends = both(move_at_once=False)
    connection = ends.up()
    assert connection.send(b"h", memoryview(bytearray(BLOCK_BYTES)), lambda: None)
    ends.wires.wait_for("wait", 0)
    closing = threading.Thread(target=ends.source.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    ends.wires.permits.release(100)
    closing.join(WAIT_S)
    assert ends.wires.count("destroyed") >= 1


def test_an_endpoint_whose_pair_broke_is_left_alone_for_a_while(both):
    now = [100.0]
    ends = both(clock=lambda: now[0])
    ends.wires.breaks_at = 0
    connection = ends.up()
    reads = []
    assert connection.send(b"h", memoryview(bytearray(BLOCK_BYTES)), lambda: reads.append(1))
    ends.until(lambda: connection.receive() or connection.status() is LinkStatus.LOST)
    ends.until(lambda: reads)
    with pytest.raises(ValueError, match="failed"):
        ends.dial()
    now[0] += options_with().shun_s + 1
    ends.wires.breaks_at = -1
    assert ends.up().status() is LinkStatus.UP


def test_the_loss_of_the_carrier_is_not_held_against_the_pair(both):
    ends = both()
    connection = ends.up()
    ends.cut()
    assert connection.status() is LinkStatus.LOST
    connection.close()
    assert ends.up().status() is LinkStatus.UP


def test_a_source_dials_only_the_backends_it_was_given(both):
    ends = both()
    with pytest.raises(ValueError, match="not wanted"):
        ends.source.dial("nccl+ipc://memory", ends.world.source, ends.world.target)


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
        Ready(number=2**64 - 1, payload_bytes=2**32 - 1, header=b"h"),
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
    rendezvous = Rendezvous(lambda key, value: said.append((key, value)), WAIT_S)
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
        DistOptions(backends=(backend,), block_bytes=BLOCK_BYTES)
