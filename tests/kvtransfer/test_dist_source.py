"""The sending end of a pair: when memory is given back, what a full or broken pair means, and when it is left alone."""

import threading
import time

import pytest

from kvtransfer.dist_target import DistTargetTransport
from kvtransfer.dist_transport import DistSourceTransport
from kvtransfer.memory_transport import MemoryNetwork
from kvtransfer.transport import Arrival, LinkStatus, PeerGone
from tests.fakes.dist_wires import BLOCK_BYTES, WAIT_S, WINDOW_BLOCKS, Wires, options_with, payload

ENDPOINT = "gloo+ipc://memory"


class Both:
    """Two ends over memory, with fake groups between them."""

    def __init__(self, world, wires, clock, changes) -> None:
        self.world = world
        self.wires = wires
        network = MemoryNetwork()
        options = options_with(**changes)
        self.target = DistTargetTransport(options, network.listen("ipc://memory"), make_group=wires.join)
        self.source = DistSourceTransport(options, network.source(), make_group=wires.join, clock=clock)
        self.cut = network.cut
        self.arrivals: list[Arrival | PeerGone | tuple[bytes, bytes]] = []

    def dial(self):
        return self.source.dial(ENDPOINT, self.world.source, self.world.target)

    def until(self, condition) -> None:
        """Both ends work until the condition holds. Blocks arrive as (header, copy of the payloads)."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, "nothing happens"
            self.source.wait(0.01)
            while (arrival := self.target.receive()) is not None:
                copied = b"".join(getattr(arrival, "payloads", ()))
                self.arrivals.append((arrival.header, copied) if copied else arrival)

    def up(self):
        connection = self.dial()
        self.until(lambda: connection.receive() or connection.status() is LinkStatus.UP)
        return connection


@pytest.fixture
def both(world):
    made = []

    def make(*, clock=time.monotonic, move_at_once=True, **changes) -> Both:
        made.append(Both(world, Wires(move_at_once=move_at_once), clock, changes))
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
        ends.until(
            lambda header=header, block=block: connection.send(header, (block,), lambda: reads.append(1))
        )
    ends.until(lambda: len(ends.arrivals) == 10 == len(reads))
    assert ends.arrivals == [(f"h{number}".encode(), payload(number)) for number in range(10)]


def test_a_full_connection_takes_no_more_until_something_was_read(both):
    ends = both(move_at_once=False)
    connection = ends.up()
    reads = []
    block = memoryview(bytearray(BLOCK_BYTES))
    sent = 0
    while connection.send(b"h", (block,), lambda: reads.append(1)):
        sent += 1
    assert sent == WINDOW_BLOCKS
    ends.wires.permits.release(100)
    ends.until(lambda: reads)
    assert connection.send(b"h", (block,), lambda: None)


def test_memory_is_given_back_only_when_the_group_is_gone(both):
    ends = both(move_at_once=False)
    connection = ends.up()
    reads = []
    block = memoryview(bytearray(BLOCK_BYTES))
    assert connection.send(b"h", (block,), lambda: reads.append(ends.wires.count("destroyed")))
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
    assert connection.send(b"h", [memoryview(bytearray(BLOCK_BYTES))], lambda: None)
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
    assert connection.send(b"h", [memoryview(bytearray(BLOCK_BYTES))], lambda: reads.append(1))
    ends.until(lambda: connection.receive() or connection.status() is LinkStatus.LOST)
    ends.until(lambda: reads)
    with pytest.raises(ValueError, match="failed"):
        ends.dial()
    now[0] += options_with().shun_s + 1
    ends.wires.breaks_at = -1
    assert ends.up().status() is LinkStatus.UP


def test_the_loss_of_the_carrier_is_not_held_against_the_pair(both):
    ends = both(move_at_once=False)
    connection = ends.up()
    reads = []
    assert connection.send(b"h", [memoryview(bytearray(BLOCK_BYTES))], lambda: reads.append(1))
    ends.wires.wait_for("send", 0)
    ends.wires.breaks_at = 0
    ends.cut()
    assert connection.status() is LinkStatus.LOST
    connection.close()
    ends.wires.permits.release(100)
    ends.until(lambda: reads)
    assert ends.up().status() is LinkStatus.UP


def test_a_target_that_refuses_the_pair_is_told_from_one_that_is_slow(both):
    ends = both(pairs_max=0)
    connection = ends.dial()
    ends.until(lambda: connection.receive() or connection.status() is LinkStatus.LOST)
    with pytest.raises(ValueError, match="failed"):
        ends.dial()


def test_an_endpoint_that_did_not_join_in_the_time_it_was_given_is_left_alone_for_a_while(both):
    ends = both()
    connection = ends.dial()
    assert connection.status() is LinkStatus.DIALLING
    connection.close()
    with pytest.raises(ValueError, match="failed"):
        ends.dial()


def test_a_source_dials_only_the_backends_it_was_given(both):
    ends = both()
    with pytest.raises(ValueError, match="not wanted"):
        ends.source.dial("nccl+ipc://memory", ends.world.source, ends.world.target)
