"""Whole transfers over the in-process transport, with a script for what goes wrong on the way."""

import random
from dataclasses import replace

import pytest

from kvtransfer import events, wire
from kvtransfer.errors import Reason, WireError


def is_block(packet) -> bool:
    return bool(packet.payloads)


def message_of(packet):
    try:
        return wire.decode(packet.header).message
    except WireError:
        return None


def flipped(packet, bit=0):
    """With one bit changed: of the last of its blocks."""
    *others, last = packet.payloads
    damaged = bytearray(last)
    damaged[bit // 8] ^= 1 << bit % 8
    return replace(packet, payloads=(*others, memoryview(damaged)))


def once(condition, effect):
    """A script that applies its effect to the first packet that meets the condition."""
    used = []

    def script(packet):
        if not used and condition(packet):
            used.append(packet)
            return effect(packet)
        return (packet,)

    return script


def assert_handed_over(pair, ticket, blocks) -> None:
    assert pair.names(pair.source_events, ticket) == ["Committed", "Closed"]
    assert pair.names(pair.target_events, ticket) == ["Opened", "Received", "Closed"]
    assert pair.received_bytes[ticket.ticket_id] == [bytes(block) for block in blocks]


@pytest.mark.parametrize(("count", "first_block"), [(1, 0), (5, 0), (5, 3), (5, 5), (40, 1)])
def test_every_block_lands_where_it_belongs(world, memory_pair, count, first_block):
    pair = memory_pair()
    ticket = world.ticket(blocks=count, first_block=first_block)
    blocks = pair.hand_over(ticket, first_token=12345)
    pair.run_to_close(ticket)
    assert_handed_over(pair, ticket, blocks)
    received = next(each for each in pair.target_events if isinstance(each, events.Received))
    assert (received.num_tokens, received.first_token) == (ticket.num_tokens, 12345)


def test_blocks_pushed_while_others_are_computed_leave_before_the_run_is_finished(world, memory_pair):
    pair = memory_pair()
    ticket = world.ticket(blocks=3)
    blocks = world.blocks(ticket)
    pair.expect(ticket)
    pair.source.open(world.seal(ticket), ticket, ("memory",))
    pair.source.push(ticket.ticket_id, 0, [memoryview(blocks[0]), memoryview(blocks[1])])
    assert pair.run(lambda: pair.target.counters().get("blocks_placed") == 2)
    pair.source.push(ticket.ticket_id, 2, [memoryview(blocks[2])])
    pair.source.finish(ticket.ticket_id, ticket.num_tokens, 1)
    pair.run_to_close(ticket)
    assert_handed_over(pair, ticket, blocks)


def test_many_transfers_share_one_link(world, memory_pair):
    pair = memory_pair(capacity_packets=5)
    tickets = [world.ticket(blocks=6) for _ in range(12)]
    blocks = [pair.hand_over(ticket) for ticket in tickets]
    pair.run_to_close(*tickets)
    for ticket, sent in zip(tickets, blocks, strict=True):
        assert_handed_over(pair, ticket, sent)


@pytest.mark.parametrize("run_blocks", [1, 2, 8])
def test_no_more_than_the_window_is_under_way(world, memory_pair, run_blocks):
    under_way = []

    def script(packet):
        if is_block(packet):
            sent = pair.source.counters()["blocks_sent"]
            under_way.append(sent - pair.target.counters().get("blocks_placed", 0))
        return (packet,)

    pair = memory_pair(script, window_blocks=3, run_blocks=run_blocks)
    ticket = world.ticket(blocks=20)
    blocks = pair.hand_over(ticket)
    pair.run_to_close(ticket)
    assert_handed_over(pair, ticket, blocks)
    assert max(under_way) == 3


@pytest.mark.parametrize("run_blocks", [1, 3])
def test_a_damaged_block_is_sent_once_more_and_alone(world, memory_pair, run_blocks):
    pair = memory_pair(once(is_block, lambda packet: (flipped(packet, 77),)), run_blocks=run_blocks)
    ticket = world.ticket()
    blocks = pair.hand_over(ticket)
    pair.run_to_close(ticket)
    assert_handed_over(pair, ticket, blocks)
    assert pair.target.counters()["damaged_block"] == 1
    assert pair.source.counters()["blocks_sent"] == 6


def test_a_block_damaged_twice_ends_the_transfer(world, memory_pair):
    def script(packet):
        message = message_of(packet)
        return (flipped(packet),) if is_block(packet) and message.first_index == 2 else (packet,)

    pair = memory_pair(script)
    ticket = world.ticket()
    pair.hand_over(ticket)
    pair.run_to_close(ticket)
    assert pair.names(pair.target_events, ticket) == ["Opened", "Failed", "Closed"]
    assert pair.names(pair.source_events, ticket) == ["Failed", "Closed"]
    assert {each.reason for each in pair.source_events if isinstance(each, events.Failed)} == {Reason.DAMAGED}


@pytest.mark.parametrize("kind", [wire.Open, wire.Grant, wire.BlockRun, wire.Manifest, wire.Committed])
def test_one_lost_message_of_any_kind_is_made_good(world, memory_pair, kind):
    pair = memory_pair(once(lambda packet: isinstance(message_of(packet), kind), lambda packet: ()))
    ticket = world.ticket()
    blocks = pair.hand_over(ticket)
    pair.run_to_close(ticket)
    assert_handed_over(pair, ticket, blocks)


def test_a_repeated_message_changes_nothing(world, memory_pair):
    pair = memory_pair(lambda packet: (packet, packet))
    ticket = world.ticket(blocks=9)
    blocks = pair.hand_over(ticket)
    pair.run_to_close(ticket)
    assert_handed_over(pair, ticket, blocks)
    assert pair.target.counters()["duplicate_block"] > 0


def test_blocks_out_of_order_are_placed_by_their_index(world, memory_pair):
    pair = memory_pair(lambda packet: (replace(packet, delay=4 if is_block(packet) else 0),))
    tickets = [world.ticket(blocks=7) for _ in range(3)]
    blocks = [pair.hand_over(ticket) for ticket in tickets]
    pair.run_to_close(*tickets)
    for ticket, sent in zip(tickets, blocks, strict=True):
        assert_handed_over(pair, ticket, sent)


def test_a_manifest_that_does_not_fit_the_blocks_is_refused(world, memory_pair):
    def script(packet):
        message = message_of(packet)
        if not isinstance(message, wire.Manifest):
            return (packet,)
        envelope = replace(wire.decode(packet.header), message=replace(message, first_token=99))
        return (replace(packet, header=wire.encode(envelope)),)

    pair = memory_pair(script)
    ticket = world.ticket()
    pair.hand_over(ticket, first_token=7)
    pair.run_to_close(ticket)
    assert pair.names(pair.target_events, ticket) == ["Opened", "Failed", "Closed"]
    failed = next(each for each in pair.source_events if isinstance(each, events.Failed))
    assert failed.reason is Reason.MANIFEST_DIFFERS


@pytest.mark.parametrize("seed", range(60))
def test_on_a_bad_network_a_transfer_is_exact_or_failed_and_always_closed(world, memory_pair, seed):
    chance = random.Random(seed)

    def script(packet):
        roll = chance.random()
        if roll < 0.06:
            return ()
        if roll < 0.12:
            return (packet, replace(packet, delay=chance.randrange(5)))
        if roll < 0.2:
            return (replace(packet, delay=1 + chance.randrange(6)),)
        if roll < 0.24 and is_block(packet):
            return (flipped(packet, chance.randrange(8 * len(packet.payloads[-1]))),)
        if roll < 0.27:
            header = bytearray(packet.header)
            header[chance.randrange(len(header))] ^= 1 << chance.randrange(8)
            return (replace(packet, header=bytes(header)),)
        if roll < 0.28 and is_block(packet):
            return (replace(packet, payloads=(packet.payloads[0][:-1], *packet.payloads[1:])),)
        return (packet,)

    pair = memory_pair(script, run_blocks=1 + seed % 3)
    tickets = [world.ticket(blocks=6, first_block=chance.randrange(4)) for _ in range(3)]
    blocks = [pair.hand_over(ticket) for ticket in tickets]
    assert pair.run(lambda: all("Closed" in pair.names(pair.source_events, each) for each in tickets))
    pair.run(seconds=2.0)
    for ticket in tickets:
        if not pair.names(pair.target_events, ticket):
            # Its source never got through: whoever reserved takes the reservation back.
            pair.target.withdraw(ticket.ticket_id)
    pair.run_to_close(*tickets)
    for ticket, sent in zip(tickets, blocks, strict=True):
        on_source = pair.names(pair.source_events, ticket)
        on_target = pair.names(pair.target_events, ticket)
        assert on_source in (["Committed", "Closed"], ["Failed", "Closed"]), f"seed {seed}"
        assert on_target[-1] == "Closed" and on_target.count("Closed") == 1, f"seed {seed}"
        if "Received" in on_target:
            expected = [bytes(block) for block in sent]
            assert pair.received_bytes[ticket.ticket_id] == expected, f"seed {seed}"
        assert "Committed" not in on_source or "Received" in on_target, f"seed {seed}"


def test_a_source_that_overwrites_its_blocks_after_closed_harms_nobody(world, memory_pair):
    pair = memory_pair()
    ticket = world.ticket()
    blocks = pair.hand_over(ticket)
    sent = [bytes(block) for block in blocks]
    pair.commits = False
    assert pair.run(lambda: ticket.ticket_id in pair.received_bytes)
    pair.source.cancel(ticket.ticket_id)
    assert pair.run(lambda: "Closed" in pair.names(pair.source_events, ticket))
    for block in blocks:
        block[:] = bytes(len(block))
    pair.target.commit(ticket.ticket_id)
    pair.run_to_close(ticket)
    assert [bytes(place) for place in pair.places[ticket.ticket_id]] == sent


def test_a_cancelled_source_is_closed_only_when_its_blocks_are_read(world, memory_pair):
    pair = memory_pair()
    ticket = world.ticket(lease_ms=2000)
    pair.hand_over(ticket)
    pair.binds = False
    assert pair.run(lambda: pair.names(pair.target_events, ticket) == ["Opened"])
    pair.bind(ticket.ticket_id)
    pair.target.turn(0)
    pair.source.turn(0)
    pair.target_runs = False
    pair.source.cancel(ticket.ticket_id)
    assert not pair.run(lambda: "Closed" in pair.names(pair.source_events, ticket), seconds=1.0)
    pair.target_runs = True
    pair.run_to_close(ticket)
    assert pair.names(pair.source_events, ticket) == ["Closed"]
    failed = next(each for each in pair.target_events if isinstance(each, events.Failed))
    assert failed.reason is Reason.CANCELLED


def test_blocks_stuck_in_a_connection_are_freed_by_giving_it_up(world, memory_pair):
    pair = memory_pair()
    ticket = world.ticket(lease_ms=500)
    pair.hand_over(ticket)
    assert pair.run(lambda: pair.names(pair.target_events, ticket) == ["Opened"])
    pair.target.turn(0)
    pair.target_runs = False
    assert pair.run(lambda: "Closed" in pair.names(pair.source_events, ticket))
    assert pair.names(pair.source_events, ticket) == ["Failed", "Closed"]


def test_a_silent_target_ends_the_transfer_after_the_lease(world, memory_pair):
    pair = memory_pair()
    ticket = world.ticket(lease_ms=700)
    pair.hand_over(ticket)
    pair.target_runs = False
    started = pair.clock.now
    assert pair.run(lambda: pair.names(pair.source_events, ticket) == ["Failed", "Closed"])
    assert 0.7 <= pair.clock.now - started < 1.3


def test_a_silent_source_ends_the_transfer_after_the_lease(world, memory_pair):
    pair = memory_pair()
    ticket = world.ticket(lease_ms=700)
    pair.expect(ticket)
    pair.source.open(world.seal(ticket), ticket, ("memory",))
    assert pair.run(lambda: pair.names(pair.target_events, ticket) == ["Opened"])
    pair.source_runs = False
    assert pair.run(lambda: pair.names(pair.target_events, ticket) == ["Opened", "Failed", "Closed"])
    assert pair.target_events[1].reason is Reason.LEASE_OVER


def test_waiting_for_room_many_leases_long_costs_nothing(world, memory_pair):
    pair = memory_pair()
    pair.binds = False
    ticket = world.ticket(lease_ms=500)
    blocks = pair.hand_over(ticket)
    pair.run(seconds=5.0)
    assert pair.names(pair.target_events, ticket) == ["Opened"]
    pair.bind(ticket.ticket_id)
    pair.run_to_close(ticket)
    assert_handed_over(pair, ticket, blocks)


def test_computing_many_leases_long_costs_nothing(world, memory_pair):
    pair = memory_pair()
    ticket = world.ticket(blocks=2, lease_ms=500)
    blocks = world.blocks(ticket)
    pair.expect(ticket)
    pair.source.open(world.seal(ticket), ticket, ("memory",))
    pair.source.push(ticket.ticket_id, 0, [memoryview(blocks[0])])
    pair.run(seconds=5.0)
    pair.source.push(ticket.ticket_id, 1, [memoryview(blocks[1])])
    pair.source.finish(ticket.ticket_id, ticket.num_tokens, 1)
    pair.run_to_close(ticket)
    assert_handed_over(pair, ticket, blocks)


def test_a_broken_connection_ends_the_transfer_on_both_ends(world, memory_pair):
    pair = memory_pair()
    pair.binds = False
    ticket = world.ticket()
    pair.hand_over(ticket)
    assert pair.run(lambda: pair.names(pair.target_events, ticket) == ["Opened"])
    pair.network.cut()
    pair.run_to_close(ticket)
    for side in (pair.source_events, pair.target_events):
        assert next(each for each in side if isinstance(each, events.Failed)).reason is Reason.PEER_LOST


def test_a_connection_that_breaks_after_all_was_verified_does_not_undo_it(world, memory_pair):
    pair = memory_pair()
    pair.commits = False
    ticket = world.ticket()
    pair.hand_over(ticket)
    assert pair.run(lambda: "Received" in pair.names(pair.target_events, ticket))
    pair.network.cut()
    pair.run(seconds=3.0)
    pair.target.commit(ticket.ticket_id)
    pair.run_to_close(ticket)
    assert pair.names(pair.target_events, ticket) == ["Opened", "Received", "Closed"]
    assert pair.names(pair.source_events, ticket) == ["Failed", "Closed"]


def test_a_new_transfer_after_a_broken_connection_gets_a_new_one(world, memory_pair):
    pair = memory_pair()
    first = world.ticket()
    pair.hand_over(first)
    pair.run_to_close(first)
    pair.network.cut()
    pair.run(seconds=0.1)
    second = world.ticket()
    blocks = pair.hand_over(second)
    pair.run_to_close(second)
    assert_handed_over(pair, second, blocks)


@pytest.mark.parametrize("stage", ["expected", "opened", "bound", "received"])
def test_withdrawing_at_any_stage_closes_the_target_and_tells_the_source(world, memory_pair, stage):
    pair = memory_pair()
    pair.binds = stage == "received"
    pair.commits = False
    ticket = world.ticket()
    pair.expect(ticket)
    if stage == "expected":
        pair.target.withdraw(ticket.ticket_id)
    pair.send(ticket)
    if stage == "received":
        assert pair.run(lambda: "Received" in pair.names(pair.target_events, ticket))
    elif stage != "expected":
        assert pair.run(lambda: pair.names(pair.target_events, ticket) == ["Opened"])
    if stage == "bound":
        pair.bind(ticket.ticket_id)
    pair.target.withdraw(ticket.ticket_id)
    pair.target.withdraw(ticket.ticket_id)
    pair.run_to_close(ticket)
    assert "Failed" not in pair.names(pair.target_events, ticket)
    failed = next(each for each in pair.source_events if isinstance(each, events.Failed))
    assert failed.reason is Reason.WITHDRAWN


def test_closing_both_ends_closes_every_ticket_once(world, memory_pair):
    pair = memory_pair()
    tickets = [world.ticket() for _ in range(3)]
    for ticket in tickets:
        pair.hand_over(ticket)
    pair.run(seconds=0.06)
    pair.source.close()
    pair.target.close()
    for ticket in tickets:
        assert pair.names(pair.source_events, ticket).count("Closed") == 1
        assert pair.names(pair.target_events, ticket).count("Closed") == 1


def test_a_ticket_that_is_expected_while_its_opening_arrives_is_known(world, memory_pair):
    """The source is told after the target expects: by the time a thread of the target reads the opening, the
    call is there, but the thread may have looked for calls a moment too early."""
    pair = memory_pair()
    ticket = world.ticket()
    receive = pair.target._transport.receive

    def expecting_at_the_last_moment():
        arrival = receive()
        if arrival is not None and isinstance(message_of(arrival), wire.Open) and not pair.target_events:
            pair.expect(ticket)
            pair.target._transport.receive = receive
        return arrival

    pair.target._transport.receive = expecting_at_the_last_moment
    pair.send(ticket)
    assert pair.run(lambda: "Closed" in pair.names(pair.source_events, ticket))
    assert pair.names(pair.source_events, ticket) == ["Committed", "Closed"]
