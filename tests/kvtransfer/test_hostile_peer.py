"""What a peer may not do: every frame that is not exactly right is counted and has no effect."""

from dataclasses import replace

import numpy as np
import pytest

from kvtransfer import events, wire
from kvtransfer.digest import block_digest
from kvtransfer.errors import Overloaded, Reason, TicketRefused
from kvtransfer.identity import Identity


class Intruder:
    """Speaks to the target of a pair in raw messages."""

    def __init__(self, pair, identity=None) -> None:
        self._pair = pair
        world = pair.world
        self._connection = pair.network.source().dial("memory", identity or world.source, world.target)

    def say(self, envelope, *payloads) -> None:
        self.shout(wire.encode(envelope), *payloads)

    def shout(self, header: bytes, *payloads) -> None:
        assert self._connection.send(header, payloads)
        self._pair.target.turn(0)

    def greet(self, source_epoch=11, target_epoch=22, **changes) -> wire.Message:
        greeting = wire.Envelope(
            source_epoch=source_epoch,
            target_epoch=target_epoch,
            attempt=0,
            ticket_id=wire.NO_TICKET,
            message=self._pair.world.hello(**changes),
        )
        self.say(greeting)
        return self.hear()

    def open(self, ticket, **fences) -> wire.Message | None:
        message = wire.Open(sealed=self._pair.world.seal(ticket))
        self.say(replace(wire.for_ticket(ticket, message), **fences))
        return self.hear()

    def send_block(self, ticket, index=0, payload=None, digest=None, **fences) -> None:
        payload = bytes(self._pair.world.layout.block_bytes()) if payload is None else payload
        run = wire.BlockRun(first_index=index, digests=digest or block_digest(payload))
        self.say(replace(wire.for_ticket(ticket, run), **fences), memoryview(payload))

    def hear(self) -> wire.Message | None:
        last = None
        while (header := self._connection.receive()) is not None:
            last = wire.decode(header).message
        return last


@pytest.fixture
def pair(memory_pair):
    return memory_pair(malformed_max=5, peers_max=8)


@pytest.mark.parametrize(
    ("layout_changes", "named"),
    [
        ({"block_size": "8"}, ("block_size",)),
        ({"dtype": "bfloat16", "layers": "9"}, ("dtype", "layers")),
        ({"model": "other"}, ("model",)),
        ({"version": "0"}, ("version",)),
        ({"wire_version": "0"}, ("wire_version",)),
        ({"surplus": "1"}, ("surplus",)),
    ],
)
def test_the_handshake_names_what_differs(world, pair, layout_changes, named):
    layout = tuple(sorted({**dict(world.hello().layout), **layout_changes}.items()))
    assert Intruder(pair).greet(layout=layout) == wire.HelloRefused(fields=named)


def test_the_handshake_names_fingerprint_target_and_epoch(pair):
    assert Intruder(pair).greet(fingerprint=bytes(32)) == wire.HelloRefused(fields=("fingerprint",))
    assert Intruder(pair).greet(target_id="else") == wire.HelloRefused(fields=("target_id",))
    assert Intruder(pair).greet(target_epoch=21) == wire.HelloRefused(fields=("target_epoch",))


def test_the_failure_of_a_source_with_another_layout_names_the_fields(world, memory_pair):
    other = replace(world.layout, block_size=8)
    pair = memory_pair(layout=other)
    ticket = world.ticket(layout=other)
    pair.source.open(world.seal(ticket), ticket, ("memory",))
    assert pair.run(lambda: len(pair.source_events) == 2)
    failed = pair.source_events[0]
    assert (failed.reason, failed.detail) == (Reason.HANDSHAKE_REFUSED, "block_size")


def test_a_peer_of_another_version_is_told_so(pair):
    intruder = Intruder(pair)
    header = bytearray(wire.encode(wire.for_ticket(pair.world.ticket(), wire.Committed())))
    header[1] += 1
    intruder.shout(bytes(header))
    assert intruder.hear() == wire.HelloRefused(fields=("wire_version",))


def test_a_ticket_is_refused_for_its_own_reason(world, pair):
    expected = world.ticket()
    pair.expect(expected)
    intruder = Intruder(pair)
    assert intruder.open(expected).reason is Reason.NOT_GREETED
    intruder.greet()
    for changes, reason in [
        ({"source_id": "else"}, Reason.WRONG_SOURCE),
        ({"source_epoch": 10}, Reason.WRONG_EPOCH),
        ({"target_id": "else"}, Reason.WRONG_TARGET),
        ({"target_epoch": 21}, Reason.WRONG_EPOCH),
        ({"num_tokens": expected.num_tokens - 1}, Reason.UNKNOWN_TICKET),
        ({"ticket_id": b"x" * 16}, Reason.UNKNOWN_TICKET),
    ]:
        assert intruder.open(replace(expected, **changes)).reason is reason, changes
    for fences, reason in [
        ({"attempt": 4}, Reason.WRONG_ATTEMPT),
        ({"source_epoch": 10}, Reason.WRONG_EPOCH),
        ({"target_epoch": 23}, Reason.WRONG_EPOCH),
        ({"ticket_id": b"x" * 16}, Reason.UNKNOWN_TICKET),
    ]:
        assert intruder.open(expected, **fences).reason is reason, fences
    assert pair.target_events == []
    assert pair.target.counters()["refused_wrong_epoch"] == 4


def test_a_forged_ticket_is_refused(world, pair):
    ticket = world.ticket()
    pair.expect(ticket)
    intruder = Intruder(pair)
    intruder.greet()
    forged = bytearray(world.seal(ticket))
    forged[-1] ^= 1
    intruder.say(wire.for_ticket(ticket, wire.Open(sealed=bytes(forged))))
    assert intruder.hear().reason is Reason.BAD_SEAL
    assert pair.target_events == []


def test_an_open_ticket_cannot_be_opened_by_another_connection(world, pair):
    ticket = world.ticket()
    pair.expect(ticket)
    first, second = Intruder(pair), Intruder(pair)
    first.greet()
    second.greet()
    assert isinstance(first.open(ticket), wire.Grant)
    assert second.open(ticket).reason is Reason.SPENT
    assert isinstance(first.open(ticket), wire.Grant)
    assert pair.names(pair.target_events, ticket) == ["Opened"]


def test_a_spent_ticket_stays_spent(world, pair):
    ticket = world.ticket()
    pair.hand_over(ticket)
    pair.run_to_close(ticket)
    intruder = Intruder(pair)
    intruder.greet()
    assert intruder.open(ticket).reason is Reason.SPENT
    assert pair.names(pair.target_events, ticket) == ["Opened", "Received", "Closed"]


def test_only_the_right_block_from_the_right_peer_is_placed(world, pair):
    ticket = world.ticket(first_block=1)
    pair.expect(ticket)
    owner, other = Intruder(pair), Intruder(pair)
    owner.greet()
    other.greet()
    owner.send_block(ticket, 1)
    owner.open(ticket)
    pair.target.turn(0)
    size = world.layout.block_bytes()
    full = bytes([255]) * size
    owner.send_block(replace(ticket, ticket_id=b"x" * 16), 1, full)
    other.send_block(ticket, 1, full)
    owner.send_block(ticket, 1, full, attempt=2)
    owner.send_block(ticket, 1, full, source_epoch=10)
    owner.send_block(ticket, 1, full, target_epoch=21)
    owner.send_block(ticket, 0, full)
    owner.send_block(ticket, 5, full)
    owner.send_block(ticket, 1, full[:-1])
    owner.send_block(ticket, 1, full + b"\xff")
    assert all(place == bytes(size) for place in pair.places[ticket.ticket_id])
    owner.send_block(ticket, 1, bytes([254]) * size, digest=block_digest(full))
    owner.send_block(ticket, 1, full)
    assert pair.places[ticket.ticket_id][0] == full
    owner.send_block(ticket, 1, bytes(size))
    assert pair.places[ticket.ticket_id][0] == full
    assert pair.target.counters() == {
        "wrong_peer": 2,
        "unknown_ticket": 1,
        "fenced": 3,
        "index_out_of_range": 2,
        "wrong_size": 2,
        "damaged_block": 1,
        "duplicate_block": 1,
        "blocks_placed": 1,
    }


@pytest.mark.parametrize("times", [1, 2])
def test_what_is_verified_is_what_lies_in_the_block_and_not_what_was_sent(world, pair, monkeypatch, times):
    """A source that shares memory can change bytes after a look at them and before they are copied."""
    copy, scribbles = np.copyto, iter([True] * times)

    def copy_scribbled(place, payload):
        copy(place, payload)
        place[3] ^= next(scribbles, False)

    monkeypatch.setattr(np, "copyto", copy_scribbled)
    ticket = world.ticket(blocks=1)
    blocks = pair.hand_over(ticket)
    pair.run_to_close(ticket)
    assert pair.target.counters()["damaged_block"] == times
    if times == 1:
        assert pair.received_bytes[ticket.ticket_id] == [bytes(block) for block in blocks]
    else:
        assert pair.names(pair.target_events, ticket) == ["Opened", "Failed", "Closed"]


def test_a_block_before_the_places_are_bound_is_not_placed(world, pair):
    pair.binds = False
    ticket = world.ticket()
    pair.expect(ticket)
    owner = Intruder(pair)
    owner.greet()
    owner.open(ticket)
    owner.send_block(ticket)
    assert pair.target.counters() == {"unexpected_blockrun": 1}


def test_a_peer_that_talks_garbage_is_ignored_and_nobody_else_is(world, pair):
    intruder = Intruder(pair)
    for noise in (b"", b"\xc1", b"GET / HTTP/1.1\r\n", bytes(70_000), b"\x91" * 3000):
        intruder.shout(noise)
    assert pair.target.counters() == {"malformed": 5}
    intruder.greet()
    assert intruder.hear() is None
    assert pair.target.counters()["ignored_peer"] == 1
    ticket = world.ticket()
    pair.hand_over(ticket)
    pair.run_to_close(ticket)
    assert pair.names(pair.source_events, ticket) == ["Committed", "Closed"]


def test_a_message_of_the_wrong_direction_or_with_too_few_or_too_many_payloads_is_malformed(world, pair):
    ticket = world.ticket()
    intruder = Intruder(pair)
    intruder.say(wire.for_ticket(ticket, wire.Committed()))
    intruder.say(wire.for_ticket(ticket, wire.Abort(reason=Reason.CANCELLED)), memoryview(b"x"))
    two = wire.for_ticket(ticket, wire.BlockRun(first_index=0, digests=bytes(32)))
    for surplus in (0, 1, 3):
        intruder.say(two, *[memoryview(b"x")] * surplus)
    assert pair.target.counters() == {"malformed": 5}


def test_many_new_peers_do_not_push_out_one_at_work(world, pair):
    pair.binds = False
    ticket = world.ticket()
    blocks = pair.hand_over(ticket)
    assert pair.run(lambda: pair.names(pair.target_events, ticket) == ["Opened"])
    for _ in range(20):
        Intruder(pair).greet()
    pair.run(seconds=2 * ticket.lease_ms / 1000)
    pair.bind(ticket.ticket_id)
    pair.run_to_close(ticket)
    assert pair.received_bytes[ticket.ticket_id] == [bytes(block) for block in blocks]


def test_a_target_that_answers_garbage_is_given_up(world, memory_pair):
    pair = memory_pair(lambda packet: (packet if packet.to_target else replace(packet, header=b"\xc1"),))
    ticket = world.ticket()
    pair.hand_over(ticket)
    assert pair.run(lambda: "Closed" in pair.names(pair.source_events, ticket))
    assert pair.names(pair.source_events, ticket) == ["Failed", "Closed"]


def answering(changed):
    """A script: what the target says is replaced by what `changed` makes of its envelope."""

    def script(packet):
        if packet.to_target:
            return (packet,)
        return (replace(packet, header=wire.encode(changed(wire.decode(packet.header)))),)

    return script


@pytest.mark.parametrize("fence", ["attempt", "source_epoch", "target_epoch"])
def test_a_source_hears_no_answer_of_another_attempt_or_epoch(world, memory_pair, fence):
    def changed(envelope):
        if envelope.ticket_id == wire.NO_TICKET:
            return envelope
        return replace(envelope, **{fence: getattr(envelope, fence) + 1})

    pair = memory_pair(answering(changed))
    ticket = world.ticket()
    pair.hand_over(ticket)
    assert pair.run(lambda: "Closed" in pair.names(pair.source_events, ticket))
    assert pair.source_events[0].reason is Reason.LEASE_OVER
    assert pair.source.counters()["fenced"] > 0
    assert "blocks_sent" not in pair.source.counters()


def test_a_source_takes_no_welcome_from_somebody_else(world, memory_pair):
    def changed(envelope):
        if not isinstance(envelope.message, wire.HelloAccepted):
            return envelope
        return replace(envelope, target_epoch=envelope.target_epoch + 1)

    pair = memory_pair(answering(changed))
    ticket = world.ticket()
    pair.hand_over(ticket)
    assert pair.run(lambda: "Closed" in pair.names(pair.source_events, ticket))
    failed = pair.source_events[0]
    assert (failed.reason, failed.detail) == (Reason.HANDSHAKE_REFUSED, "target")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"target_id": "else"}, Reason.WRONG_TARGET),
        ({"target_epoch": 21}, Reason.WRONG_EPOCH),
        ({"layout_fingerprint": bytes(32)}, Reason.WRONG_LAYOUT),
        ({"num_blocks": 4}, Reason.WRONG_RANGE),
    ],
)
def test_a_target_expects_only_what_is_meant_for_it(world, pair, changes, reason):
    with pytest.raises(TicketRefused) as refused:
        pair.target.expect(replace(world.ticket(blocks=5), **changes))
    assert refused.value.reason is reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"source_id": "else"}, Reason.WRONG_SOURCE),
        ({"source_epoch": 12}, Reason.WRONG_EPOCH),
        ({"layout_fingerprint": bytes(32)}, Reason.WRONG_LAYOUT),
        ({"num_blocks": 4}, Reason.WRONG_RANGE),
    ],
)
def test_a_source_opens_only_what_is_meant_for_it(world, pair, changes, reason):
    ticket = replace(world.ticket(blocks=5), **changes)
    with pytest.raises(TicketRefused) as refused:
        pair.source.open(world.seal(ticket), ticket, ("memory",))
    assert refused.value.reason is reason


def test_a_ticket_in_use_cannot_be_used_twice_at_once(world, pair):
    ticket = world.ticket()
    pair.hand_over(ticket)
    with pytest.raises(TicketRefused):
        pair.target.expect(ticket)
    with pytest.raises(TicketRefused):
        pair.source.open(world.seal(ticket), ticket, ("memory",))


def test_a_target_at_its_limit_takes_no_more(world, memory_pair):
    pair = memory_pair(transfers_max=2)
    tickets = [world.ticket() for _ in range(3)]
    for ticket in tickets[:2]:
        pair.expect(ticket)
    with pytest.raises(Overloaded):
        pair.target.expect(tickets[2])
    pair.target.withdraw(tickets[0].ticket_id)
    assert pair.run(lambda: pair.target_events == [events.Closed(ticket_id=tickets[0].ticket_id)])
    pair.expect(tickets[2])


def test_another_process_at_the_target_address_is_not_taken_for_it(world, pair):
    """A restart at the same address is another peer."""
    ticket = world.ticket(target_epoch=21)
    pair.source.open(world.seal(ticket), ticket, ("memory",))
    assert pair.run(lambda: len(pair.source_events) == 2)
    failed = pair.source_events[0]
    assert (failed.reason, failed.detail) == (Reason.HANDSHAKE_REFUSED, "target_epoch")
    assert Identity(worker_id="target-b", epoch=21) == ticket.target()
