"""Both state machines: every state with every event does what the table says, or raises and changes nothing."""

import copy
from itertools import product

import pytest

from kvtransfer import events, incoming, outgoing, wire
from kvtransfer.actions import Count, Emit, Place, Send, TargetAction
from kvtransfer.digest import block_digest, manifest_digest
from kvtransfer.errors import IllegalTransition, Reason
from kvtransfer.incoming import IncomingTransfer
from kvtransfer.outgoing import OutgoingTransfer

BLOCK_BYTES = 8
BLOCKS = 3
PEER = b"peer"


def content(index) -> memoryview:
    return memoryview(bytes([index + 1] * BLOCK_BYTES))


def digests(count=BLOCKS) -> list[bytes]:
    return [block_digest(content(index)) for index in range(count)]


def outgoing_in(world, state, pushed) -> OutgoingTransfer:
    """A transfer in `state` with so many blocks pushed; one read is under way where there can be one."""
    states = outgoing.State
    transfer = OutgoingTransfer(world.ticket(blocks=BLOCKS), b"sealed", BLOCK_BYTES, 1, 0.0)
    transfer.start(0.0)
    if state in (states.SEALED, states.COMMITTED):
        pushed = BLOCKS
    transfer.push(0, digests(pushed), 0.0)
    if state is not states.OPENING:
        transfer.granted(BLOCK_BYTES, 0.0)
    if state in (states.SEALED, states.COMMITTED):
        transfer.granted(BLOCKS * BLOCK_BYTES, 0.0)
        transfer.finish(7, 0.0)
    if state is states.COMMITTED:
        transfer.committed(0.0)
    if state in (states.ENDED, states.CLOSED):
        transfer.cancel(0.0)
    if state is states.CLOSED:
        transfer.read_done(0.0)
    assert transfer.state is state
    return transfer


OUTGOING_EVENTS = {
    outgoing.Event.PUSH: lambda transfer: transfer.push(2, digests()[2:], 1.0),
    outgoing.Event.FINISH: lambda transfer: transfer.finish(7, 1.0),
    outgoing.Event.GRANT: lambda transfer: transfer.granted(BLOCK_BYTES, 1.0),
    outgoing.Event.RESEND: lambda transfer: transfer.resend((0,), 1.0),
    outgoing.Event.COMMIT: lambda transfer: transfer.committed(1.0),
    outgoing.Event.REFUSE: lambda transfer: transfer.refused(Reason.WITHDRAWN, "", 1.0),
    outgoing.Event.CANCEL: lambda transfer: transfer.cancel(1.0),
    outgoing.Event.LOSE: lambda transfer: transfer.lost(Reason.PEER_LOST, "", 1.0),
}


@pytest.mark.parametrize(("state", "event"), list(product(outgoing.State, OUTGOING_EVENTS)))
def test_outgoing_does_what_its_table_says(world, state, event):
    transfer = outgoing_in(world, state, pushed=2 if event is outgoing.Event.PUSH else BLOCKS)
    expected = outgoing.TRANSITIONS.get((state, event))
    if expected is not None:
        if expected is outgoing.State.ENDED and state is outgoing.State.OPENING:
            # Nothing was sent, so nothing is being read.
            expected = outgoing.TRANSITIONS[expected, outgoing.Event.DRAIN]
        OUTGOING_EVENTS[event](transfer)
        assert transfer.state is expected
        return
    before = copy.deepcopy(vars(transfer))
    with pytest.raises(IllegalTransition):
        OUTGOING_EVENTS[event](transfer)
    assert vars(transfer) == before


def test_every_outgoing_event_is_taken_from_outside_or_made_inside():
    assert set(outgoing.Event) - set(OUTGOING_EVENTS) == {outgoing.Event.SEAL, outgoing.Event.DRAIN}


def manifest(transfer) -> wire.Manifest:
    digest = manifest_digest(transfer.ticket, 7, digests())
    return wire.Manifest(num_tokens=transfer.ticket.num_tokens, digest=digest, first_token=7)


def run(*indices) -> wire.BlockRun:
    """Of blocks that follow each other."""
    return wire.BlockRun(first_index=indices[0], digests=b"".join(digests()[index] for index in indices))


def placing(*indices) -> Place:
    """What a run asks for."""
    return Place(
        indices=indices,
        digests=tuple(digests()[index] for index in indices),
        payloads=tuple(content(index) for index in indices),
    )


def place(transfer, *indices) -> list[TargetAction]:
    """The blocks come, and are written as they came. What is to be done then."""
    contents = [content(index) for index in indices]
    assert transfer.blocks(run(*indices), contents, 0.0) == [placing(*indices)]
    return transfer.placed(placing(*indices), [digests()[index] for index in indices], 0.0)


def incoming_in(world, state) -> IncomingTransfer:
    """A transfer in `state`; FILLING has one block."""
    states = incoming.State
    transfer = IncomingTransfer(world.ticket(blocks=BLOCKS), BLOCK_BYTES, BLOCK_BYTES, 0.0)
    if state is not states.EXPECTED:
        transfer.opened(PEER, 0.0)
    if state in (states.FILLING, states.VERIFIED, states.COMMITTED):
        transfer.bind(0.0)
        place(transfer, 0)
    if state in (states.VERIFIED, states.COMMITTED):
        place(transfer, 1)
        place(transfer, 2)
        transfer.manifest(manifest(transfer), 0.0)
    if state is states.COMMITTED:
        transfer.commit(0.0)
    if state is states.ENDED:
        transfer.withdraw(Reason.WITHDRAWN, 0.0)
    assert transfer.state is state
    return transfer


INCOMING_EVENTS = {
    incoming.Event.OPEN: lambda transfer: transfer.opened(PEER, 1.0),
    incoming.Event.BIND: lambda transfer: transfer.bind(1.0),
    incoming.Event.BLOCKS: lambda transfer: transfer.blocks(run(1), [content(1)], 1.0),
    incoming.Event.PLACED: lambda transfer: transfer.placed(placing(1), [digests()[1]], 1.0),
    incoming.Event.MANIFEST: lambda transfer: transfer.manifest(manifest(transfer), 1.0),
    incoming.Event.COMMIT: lambda transfer: transfer.commit(1.0),
    incoming.Event.WITHDRAW: lambda transfer: transfer.withdraw(Reason.WITHDRAWN, 1.0),
    incoming.Event.ABORT: lambda transfer: transfer.aborted(Reason.CANCELLED, 1.0),
    incoming.Event.LOSE: lambda transfer: transfer.lost(1.0),
}


@pytest.mark.parametrize(("state", "event"), list(product(incoming.State, INCOMING_EVENTS)))
def test_incoming_does_what_its_table_says(world, state, event):
    transfer = incoming_in(world, state)
    expected = incoming.TRANSITIONS.get((state, event))
    if expected is not None:
        INCOMING_EVENTS[event](transfer)
        assert transfer.state is expected
        return
    before = copy.deepcopy(vars(transfer))
    with pytest.raises(IllegalTransition):
        INCOMING_EVENTS[event](transfer)
    assert vars(transfer) == before


def test_every_incoming_event_is_taken_from_outside_or_made_inside():
    assert set(incoming.Event) - set(INCOMING_EVENTS) == {incoming.Event.VERIFY, incoming.Event.REFUSE}


def test_source_sends_only_within_the_grant(world):
    transfer = OutgoingTransfer(world.ticket(blocks=BLOCKS), b"sealed", BLOCK_BYTES, 1, 0.0)
    assert sent_indices(transfer.push(0, digests(), 0.0)) == []
    assert sent_indices(transfer.granted(BLOCK_BYTES * 2 - 1, 0.0)) == [0]
    assert sent_indices(transfer.granted(BLOCK_BYTES, 0.0)) == []
    assert sent_indices(transfer.granted(BLOCK_BYTES * 3, 0.0)) == [1, 2]


def test_source_sends_a_block_again_once_however_often_it_is_asked(world):
    transfer = outgoing_in(world, outgoing.State.SEALED, BLOCKS)
    transfer.granted(BLOCK_BYTES * 9, 0.0)
    assert sent_indices(transfer.resend((1, 1, 99), 0.0)) == [1]
    assert sent_indices(transfer.resend((1,), 0.0)) == []


def test_source_without_credit_for_a_lease_gives_up(world):
    transfer = OutgoingTransfer(world.ticket(blocks=BLOCKS, lease_ms=1000), b"sealed", BLOCK_BYTES, 1, 0.0)
    transfer.push(0, digests(), 0.0)
    transfer.granted(BLOCK_BYTES, 0.0)
    for tenth in range(1, 10):
        transfer.granted(BLOCK_BYTES, tenth / 10)
        transfer.tick(tenth / 10)
    assert not transfer.over()
    transfer.granted(BLOCK_BYTES, 1.0)
    failed = [each.event for each in transfer.tick(1.0) if isinstance(each, Emit)]
    assert failed[0].reason is Reason.STALLED


def test_target_that_misses_a_block_for_a_lease_after_the_manifest_gives_up(world):
    transfer = incoming_in(world, incoming.State.FILLING)
    transfer.manifest(manifest(transfer), 0.0)
    for tenth in range(1, 10):
        transfer.opened(PEER, tenth / 10)
        assert not any(isinstance(each, Emit) for each in transfer.tick(tenth / 10))
    transfer.opened(PEER, 1.0)
    failed = [each.event for each in transfer.tick(1.0) if isinstance(each, Emit)]
    assert failed[0].reason is Reason.INCOMPLETE


def test_target_to_which_no_source_comes_gives_up_after_a_few_leases(world):
    ticket = world.ticket(blocks=BLOCKS, lease_ms=1000)
    transfer = IncomingTransfer(ticket, BLOCK_BYTES, BLOCK_BYTES, 5.0)
    patience = incoming.LEASES_TO_OPEN * ticket.lease_s()
    assert transfer.tick(5.0 + patience - 0.01) == []
    failed, closed = (each.event for each in transfer.tick(5.0 + patience))
    assert failed.reason is Reason.LEASE_OVER
    assert closed == events.Closed(ticket_id=ticket.ticket_id)


def test_target_asks_for_missing_blocks_and_grants_the_bytes_for_them(world):
    transfer = incoming_in(world, incoming.State.FILLING)
    messages = [each.message for each in transfer.manifest(manifest(transfer), 0.0) if isinstance(each, Send)]
    grant, resend = messages
    assert resend == wire.Resend(indices=(1, 2))
    assert grant.total_bytes == (2 + 2) * BLOCK_BYTES


def test_the_last_grant_is_announced_at_once_however_small_it_is(world):
    """Or the source stands still until the target's next look at its timers."""
    blocks, window = 9, 8
    transfer = IncomingTransfer(world.ticket(blocks=blocks), BLOCK_BYTES, window * BLOCK_BYTES, 0.0)
    transfer.opened(PEER, 0.0)
    (first,) = transfer.bind(0.0)
    assert first.message == wire.Grant(total_bytes=window * BLOCK_BYTES)
    sent = [each.message for each in place(transfer, 0) if isinstance(each, Send)]
    assert sent == [wire.Grant(total_bytes=blocks * BLOCK_BYTES)]
    assert not any(isinstance(each, Send) for each in place(transfer, 1))


def test_source_puts_blocks_that_follow_each_other_into_one_message_as_far_as_credit_and_its_size_go(world):
    transfer = OutgoingTransfer(world.ticket(blocks=9), b"sealed", BLOCK_BYTES, 3, 0.0)
    transfer.push(0, digests(9), 0.0)
    assert sent_runs(transfer.granted(BLOCK_BYTES * 8, 0.0)) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert sent_runs(transfer.granted(BLOCK_BYTES * 99, 0.0)) == [[8]]
    assert sent_runs(transfer.resend((1, 2, 5, 7, 8), 0.0)) == [[1, 2], [5], [7, 8]]
    transfer.cancel(0.0)
    closings = [transfer.read_done(0.0) for _ in range(4 + 3)]
    assert [bool(each) for each in closings] == [False] * 6 + [True]


def test_target_counts_each_block_of_a_run_by_itself_and_places_those_that_fit(world):
    ticket = world.ticket(blocks=BLOCKS, first_block=1)
    transfer = IncomingTransfer(ticket, BLOCK_BYTES, BLOCK_BYTES * 9, 0.0)
    transfer.opened(PEER, 0.0)
    transfer.bind(0.0)
    short = content(1)[:-1]
    actions = transfer.blocks(run(0, 1, 2), [content(0), short, content(2)], 0.0)
    assert actions == [Count(name="index_out_of_range"), Count(name="wrong_size"), placing(2)]
    transfer.placed(placing(2), [digests()[2]], 0.0)
    assert transfer.blocks(run(1, 2), [content(1), content(2)], 0.0) == [
        Count(name="duplicate_block"),
        placing(1),
    ]


def test_target_keeps_what_is_whole_of_a_run_and_asks_for_the_rest(world):
    transfer = IncomingTransfer(world.ticket(blocks=BLOCKS), BLOCK_BYTES, BLOCK_BYTES * 9, 0.0)
    transfer.opened(PEER, 0.0)
    transfer.bind(0.0)
    damaged = transfer.placed(placing(0, 1, 2), [bytes(16), digests()[1], bytes(16)], 0.0)
    assert [each.message for each in damaged if isinstance(each, Send)] == [
        wire.Grant(total_bytes=(BLOCKS + 2) * BLOCK_BYTES),
        wire.Resend(indices=(0, 2)),
    ]
    assert [each for each in damaged if isinstance(each, Count)] == [
        Count(name="blocks_placed", count=1),
        Count(name="damaged_block", count=2),
    ]
    failed = [each.event for each in transfer.placed(placing(2), [bytes(16)], 0.0) if isinstance(each, Emit)]
    assert failed[0].reason is Reason.DAMAGED


def sent_indices(actions) -> list[int]:
    return [index for each in actions if isinstance(each, Send) for index in each.payload_indices]


def sent_runs(actions) -> list[list[int]]:
    return [list(each.payload_indices) for each in actions if isinstance(each, Send) and each.payload_indices]
