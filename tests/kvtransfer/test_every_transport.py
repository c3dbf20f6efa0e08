"""Whole transfers between the real threads of both ends, over every transport there is."""

import threading
from dataclasses import replace

import pytest

from kvtransfer.counters import COMMITTED_OVER
from kvtransfer.errors import Reason
from kvtransfer.identity import Identity
from tests.kvtransfer.conftest import bind_places, receive_all, send_all

KINDS = ["shm", "ipc", "tcp", "curve"]
OTHER = Identity(worker_id="target-else", epoch=1)
ANOTHER = Identity(worker_id="target-c", epoch=5)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def world(patient):
    return patient


def test_bytes_land_equal_and_events_come_in_order(world, ends, kind, large):
    target, on_target = ends.new_target(kind=kind, layout=large)
    source, on_source = ends.new_source(kind=kind, layout=large)
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
    over = {name: count for name, count in source.counters().items() if name.startswith(COMMITTED_OVER)}
    assert over == {f"{COMMITTED_OVER}{target.endpoints()[0].partition('://')[0]}": 4}


@pytest.mark.parametrize("first_block", [3, 5])
def test_what_the_target_holds_does_not_travel(world, ends, kind, large, first_block):
    target, on_target = ends.new_target(kind=kind, layout=large)
    source, on_source = ends.new_source(kind=kind, layout=large)
    ticket = world.ticket(blocks=5, first_block=first_block, layout=large)
    target.expect(ticket)
    sent = send_all(world, source, ticket, target.endpoints(), large)
    assert len(sent) == 5 - first_block
    assert receive_all(target, on_target, ticket, large) == sent
    on_source.wait("Closed", ticket)
    assert on_source.names(ticket) == ["Committed", "Closed"]
    assert source.counters().get("blocks_sent", 0) == target.counters().get("blocks_placed", 0) == len(sent)


def test_an_address_where_another_process_listens_is_passed_over(world, ends, kind, large):
    wrong, _ = ends.new_target(kind=kind, layout=large, identity=OTHER)
    target, on_target = ends.new_target(kind=kind, layout=large)
    source, on_source = ends.new_source(kind=kind, layout=large)
    ticket = world.ticket(layout=large)
    target.expect(ticket)
    sent = send_all(world, source, ticket, (*wrong.endpoints(), *target.endpoints()), large)
    assert receive_all(target, on_target, ticket, large) == sent
    on_source.wait("Committed", ticket)
    assert wrong.counters()["refused_handshake"] == 1


def test_a_source_of_another_layout_is_refused_by_name(world, ends, kind, large):
    target, _ = ends.new_target(kind=kind, layout=large)
    source, on_source = ends.new_source(kind=kind)
    ticket = world.ticket()
    source.open(world.seal(ticket), ticket, target.endpoints())
    failed = on_source.wait("Failed", ticket)
    assert failed.reason is Reason.HANDSHAKE_REFUSED
    assert failed.detail == "block_size, head_dim, layers"


def test_a_source_of_another_epoch_is_refused_by_name(world, ends, kind):
    target, _ = ends.new_target(kind=kind)
    old = replace(world.source, epoch=10)
    source, on_source = ends.new_source(kind=kind, identity=old)
    expected = world.ticket()
    target.expect(expected)
    thawed = replace(expected, source_epoch=10)
    source.open(world.seal(expected), thawed, target.endpoints())
    failed = on_source.wait("Failed", thawed)
    assert (failed.reason, failed.detail) == (Reason.WRONG_EPOCH, "source_epoch")


def test_a_source_with_another_attempt_is_refused_by_name(world, ends, kind):
    target, _ = ends.new_target(kind=kind)
    source, on_source = ends.new_source(kind=kind)
    expected = world.ticket()
    target.expect(expected)
    older = replace(expected, attempt=2)
    source.open(world.seal(expected), older, target.endpoints())
    assert on_source.wait("Failed", older).reason is Reason.WRONG_ATTEMPT


def test_cancelling_in_the_middle_closes_both_ends_once(world, ends, kind, large):
    target, on_target = ends.new_target(kind=kind, layout=large)
    source, on_source = ends.new_source(kind=kind, layout=large)
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


def test_blocks_may_be_reused_as_soon_as_closed_came(world, ends, kind, large):
    """The second key: after Closed nobody reads, so what is written then never arrives anywhere."""
    target, on_target = ends.new_target(kind=kind, layout=large)
    source, on_source = ends.new_source(kind=kind, layout=large)
    for _ in range(10):
        ticket = world.ticket(blocks=8, layout=large)
        target.expect(ticket)
        blocks = send_all(world, source, ticket, target.endpoints(), large)
        places = receive_all(target, on_target, ticket, large)
        on_source.wait("Closed", ticket)
        for block in blocks:
            block[:] = bytes(len(block))
        assert places == world.blocks(ticket, large)


def test_a_stalled_target_delays_neither_the_caller_nor_another_target(world, ends, kind, large):
    unblock = threading.Event()

    def stall(event):
        unblock.wait(20)

    stalled, _ = ends.new_target(kind=kind, layout=large, emit=stall)
    try:
        healthy, on_healthy = ends.new_target(kind=kind, layout=large, identity=ANOTHER)
        source, on_source = ends.new_source(kind=kind, layout=large)
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


def test_a_target_that_dies_fails_the_source_without_waiting_for_the_lease(world, ends, kind, large):
    target, on_target = ends.new_target(kind=kind, layout=large)
    source, on_source = ends.new_source(kind=kind, layout=large)
    ticket = world.ticket(layout=large, lease_ms=3_600_000)
    target.expect(ticket)
    send_all(world, source, ticket, target.endpoints(), large)
    on_target.wait("Opened", ticket)
    target.close()
    assert on_source.wait("Failed", ticket).reason is Reason.PEER_LOST
    on_source.wait("Closed", ticket)
    assert on_target.names(ticket) == ["Opened", "Closed"]


def test_a_source_that_dies_fails_the_target_without_waiting_for_the_lease(world, ends, kind, large):
    target, on_target = ends.new_target(kind=kind, layout=large)
    source, on_source = ends.new_source(kind=kind, layout=large)
    ticket = world.ticket(layout=large, lease_ms=3_600_000)
    target.expect(ticket)
    source.open(world.seal(ticket), ticket, target.endpoints())
    on_target.wait("Opened", ticket)
    source.close()
    assert on_source.names(ticket) == ["Closed"]
    assert on_target.wait("Failed", ticket).reason is Reason.PEER_LOST
    on_target.wait("Closed", ticket)
