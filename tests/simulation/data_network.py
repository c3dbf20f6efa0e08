"""The data network between workers: connections with latency, and a script for what happens to single packets.

Behaves as a zero-copy transport at its worst: the memory of payloads is read when the packet arrives, not when it is
sent, so that a block that is freed too early arrives as somebody else's bytes. Packets of one direction keep their
order unless a fault says otherwise.
"""

from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import count

from kvtransfer.transport import Arrival, Delivery, LinkStatus, PeerGone, unread

REDIAL_S = 0.05


@dataclass(frozen=True, slots=True)
class Packet:
    """number: of the sending, over the whole network. late_s: how much later than its turn it arrives."""

    number: int
    to_target: bool
    header: bytes
    payloads: tuple[memoryview, ...]
    late_s: float = 0.0


class DataNetwork:
    """script: packet to the packets that arrive in its place. capacity_packets: under way on one connection, per
    direction."""

    def __init__(self, agenda, dice, script, *, latency_s, capacity_packets):
        self.agenda = agenda
        self.script = script
        self.capacity_packets = capacity_packets
        self.listeners = {}
        self.lines = {}
        self.dialled = {}
        self.names = count()
        self.numbers = count()
        self._dice = dice
        self._latency_s = latency_s
        self._stalled_until = {}

    def latency(self):
        return self._latency_s * 2 * self._dice.random()

    def next_arrival(self, route, last):
        """When something sent now arrives, after what was sent before it."""
        return max(self.agenda.now + self.latency(), last, self._stalled_until.get(route, 0.0))

    def stall(self, route, seconds):
        """Let nothing through between a source and a target for a while. Nothing is lost by it."""
        self._stalled_until[route] = self.agenda.now + seconds

    def sever(self, route):
        """Break every connection between a source and a target."""
        lines = [line for line in self.lines.values() if line.route == route]
        for line in lines:
            line.sever(self.latency(), self.latency())
        return bool(lines)

    def abandon(self, process, notice_s=0.0):
        """Break every connection of a process, which says nothing any more. notice_s: until its peers notice."""
        for line in [line for line in self.lines.values() if process in line.processes()]:
            line.sever(notice_s, notice_s)

    def bury(self, process, notice_s):
        """A process is dead."""
        self.listeners = {name: side for name, side in self.listeners.items() if side.process is not process}
        self.abandon(process, notice_s)


class SourceSide:
    """See `transport.SourceTransport`."""

    def __init__(self, network, process):
        self.process = process
        self._network = network
        self._reads = deque()
        self._lines = []

    def dial(self, endpoint, source, target):
        line = Line(self._network, self, endpoint, source)
        self._lines.append(line)
        return line

    def wait(self, timeout_s):
        while self._reads:
            self._reads.popleft()()

    def wake(self):
        self.process.transfers.wake()

    def read_done(self, on_read):
        self._reads.append(on_read)
        self.wake()

    def close(self):
        for line in self._lines:
            line.close()


class TargetSide:
    """See `transport.TargetTransport`."""

    def __init__(self, network, process, endpoint):
        self.process = process
        self.lines = {}
        self.inbox = deque()
        self._endpoint = endpoint
        network.listeners[endpoint] = self

    def endpoints(self):
        return (self._endpoint,)

    def receive(self):
        if not self.inbox:
            return None
        line, message = self.inbox.popleft()
        if isinstance(message, Arrival):
            line.taken()
        else:
            del self.lines[line.name]
        return message

    def send(self, peer, header):
        line = self.lines.get(peer)
        return Delivery.GONE if line is None else line.answer(header)

    def wait(self, timeout_s):
        pass

    def wake(self):
        self.process.transfers.wake()

    def close(self):
        for line in list(self.lines.values()):
            line.sever(0.0, 0.0)


class Line:
    """One connection; for its source a `transport.Connection`. identity: of the source that dialled."""

    def __init__(self, network, source, endpoint, identity):
        self.name = f"{identity.worker_id}/{identity.epoch}/{next(network.names)}".encode()
        self.route = (identity.worker_id, endpoint)
        self.identity = identity
        self._network = network
        self._source = source
        self._target = None
        self._status = LinkStatus.DIALLING
        self._target_sees_it = False
        self._under_way = {True: 0, False: 0}
        self._last = {True: 0.0, False: 0.0}
        self._answers = deque()
        network.lines[self.name] = self
        network.dialled[self.name] = identity
        network.agenda.after(network.latency(), self._connect)

    def processes(self):
        return [side.process for side in (self._source, self._target) if side is not None]

    def status(self):
        return self._status

    def send(self, header, payloads=(), on_read=unread):
        if self._status is not LinkStatus.UP or self._full(True):
            return False
        done = partial(self._source.read_done, on_read) if payloads else None
        self._transmit(True, header, tuple(payloads), done)
        return True

    def receive(self):
        return self._answers.popleft() if self._answers else None

    def answer(self, header):
        """The target sends."""
        if not self._target_sees_it:
            return Delivery.GONE
        if self._full(False):
            return Delivery.FULL
        self._transmit(False, header, (), None)
        return Delivery.QUEUED

    def taken(self):
        """The target has taken a packet out of its inbox."""
        self._under_way[True] -= 1
        self._source.wake()

    def close(self):
        self._status = LinkStatus.LOST
        self._answers.clear()
        self._network.agenda.after(self._network.latency(), self._gone_at_target)

    def sever(self, source_s, target_s):
        """Break: after so many seconds each end sees it."""
        self._network.agenda.after(source_s, self._gone_at_source)
        self._network.agenda.after(target_s, self._gone_at_target)

    def _full(self, to_target):
        return self._under_way[to_target] >= self._network.capacity_packets

    def _transmit(self, to_target, header, payloads, done):
        network = self._network
        copies = network.script(Packet(next(network.numbers), to_target, header, payloads))
        reading = _Reading(done, len(copies))
        for packet in copies:
            self._under_way[to_target] += 1
            at = network.next_arrival(self.route, self._last[to_target])
            if not packet.late_s:
                self._last[to_target] = at
            network.agenda.at(at + packet.late_s, partial(self._come_out, packet, reading))
        if not copies:
            network.agenda.after(network.latency(), reading.end)

    def _come_out(self, packet, reading):
        if packet.to_target and self._target_sees_it:
            payloads = tuple(memoryview(bytes(payload)) for payload in packet.payloads)
            self._target.inbox.append(
                (self, Arrival(peer=self.name, header=packet.header, payloads=payloads))
            )
            self._target.wake()
        else:
            self._under_way[packet.to_target] -= 1
        if not packet.to_target and self._status is LinkStatus.UP:
            self._answers.append(packet.header)
            self._source.wake()
        reading.end()

    def _connect(self):
        if self._status not in (LinkStatus.DIALLING, LinkStatus.FAILING):
            return
        target = self._network.listeners.get(self.route[1])
        if target is None or target.process.frozen:
            self._status = LinkStatus.FAILING if target is None else self._status
            self._source.wake()
            self._network.agenda.after(REDIAL_S, self._connect)
            return
        self._target = target
        self._status = LinkStatus.UP
        self._target_sees_it = True
        target.lines[self.name] = self
        self._source.wake()

    def _gone_at_source(self):
        if self._status is not LinkStatus.LOST:
            self._status = LinkStatus.LOST
            self._source.wake()

    def _gone_at_target(self):
        self._network.lines.pop(self.name, None)
        if self._target_sees_it:
            self._target_sees_it = False
            self._target.inbox.append((self, PeerGone(peer=self.name)))
            self._target.wake()


class _Reading:
    """Says once that the last copy of a message came out: nobody reads the memory of its payloads any more."""

    def __init__(self, done, copies):
        self._done = done
        self._left = copies

    def end(self):
        self._left -= 1
        if self._left <= 0 and self._done is not None:
            self._done()
