"""A ticket is read by the worker it is for, with the attempt it is for, or refused by reason."""

from dataclasses import replace

import pytest

from kvtransfer.desk import End, TicketDesk
from kvtransfer.errors import Reason, TicketRefused
from kvtransfer.identity import Identity
from kvtransfer.ticket import mint, seal

KEY = bytes(range(32))
PRINT = bytes(32)
TICKET = mint(
    lambda count: bytes(range(1, count + 1)),
    request_id="r",
    attempt=3,
    source=Identity(worker_id="p", epoch=11),
    target=Identity(worker_id="d", epoch=22),
    layout_fingerprint=PRINT,
    num_tokens=9,
    first_block=0,
    num_blocks=3,
    lease_ms=1000,
)
IDENTITIES = {End.SOURCE: Identity(worker_id="p", epoch=11), End.TARGET: Identity(worker_id="d", epoch=22)}


def read(end, sealed=None, ticket=TICKET, block_size=4, **shown):
    desk = TicketDesk(
        key=KEY, identity=IDENTITIES[end], end=end, layout_fingerprint=PRINT, block_size=block_size
    )
    came_with = {"request_id": "r", "attempt": 3, "num_tokens": 9, **shown}
    return desk.read(seal(ticket, KEY) if sealed is None else sealed, **came_with)


def reason(end, **given):
    with pytest.raises(TicketRefused) as refusal:
        read(end, **given)
    return refusal.value.reason


@pytest.mark.parametrize("end", End)
def test_the_right_ticket_is_read_as_often_as_it_is_shown(end):
    assert read(end) == read(end) == TICKET


@pytest.mark.parametrize("end", End)
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"request_id": "other"}, Reason.WRONG_ATTEMPT),
        ({"attempt": 2}, Reason.WRONG_ATTEMPT),
        ({"attempt": 4}, Reason.WRONG_ATTEMPT),
        ({"layout_fingerprint": b"\1" * 32}, Reason.WRONG_LAYOUT),
        ({"num_tokens": 8}, Reason.WRONG_RANGE),
        ({"num_tokens": 10}, Reason.WRONG_RANGE),
        ({"num_blocks": 2}, Reason.WRONG_RANGE),
        ({"num_blocks": 4}, Reason.WRONG_RANGE),
    ],
)
def test_a_ticket_for_something_else_is_refused_by_reason(end, changes, expected):
    assert reason(end, ticket=replace(TICKET, **changes)) is expected


@pytest.mark.parametrize("end", End)
@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ({"request_id": "R"}, Reason.WRONG_ATTEMPT),
        ({"attempt": 0}, Reason.WRONG_ATTEMPT),
        ({"num_tokens": 0}, Reason.WRONG_RANGE),
        ({"num_tokens": 12}, Reason.WRONG_RANGE),
        ({"block_size": 5}, Reason.WRONG_RANGE),
    ],
)
def test_the_right_ticket_with_something_else_is_refused_too(end, shown, expected):
    assert reason(end, **shown) is expected


@pytest.mark.parametrize(
    ("end", "changes", "expected"),
    [
        (End.SOURCE, {"source_id": "q"}, Reason.WRONG_SOURCE),
        (End.SOURCE, {"source_epoch": 10}, Reason.WRONG_EPOCH),
        (End.SOURCE, {"source_epoch": 12}, Reason.WRONG_EPOCH),
        (End.TARGET, {"target_id": "p"}, Reason.WRONG_TARGET),
        (End.TARGET, {"target_epoch": 21}, Reason.WRONG_EPOCH),
        (End.TARGET, {"target_epoch": 23}, Reason.WRONG_EPOCH),
    ],
)
def test_a_ticket_for_another_worker_or_another_start_of_it_is_refused(end, changes, expected):
    assert reason(end, ticket=replace(TICKET, **changes)) is expected


@pytest.mark.parametrize(
    ("end", "changes"),
    [
        (End.SOURCE, {"target_id": "x", "target_epoch": 1}),
        (End.TARGET, {"source_id": "x", "source_epoch": 1}),
    ],
)
def test_the_other_end_may_be_anybody(end, changes):
    assert read(end, ticket=replace(TICKET, **changes)) == replace(TICKET, **changes)


SEALED = seal(TICKET, KEY)


@pytest.mark.parametrize("end", End)
@pytest.mark.parametrize(
    "sealed",
    [
        b"",
        b"\0",
        SEALED[:-1],
        SEALED[1:],
        SEALED + b"\0",
        SEALED * 100,
        bytes([SEALED[0] ^ 1]) + SEALED[1:],
        SEALED[:-1] + bytes([SEALED[-1] ^ 1]),
        seal(TICKET, bytes(32)),
        bytes(10_000_000),
    ],
    ids=[
        "nothing",
        "a byte",
        "cut",
        "late",
        "long",
        "often",
        "bent",
        "resealed badly",
        "another key",
        "huge",
    ],
)
def test_what_is_not_sealed_by_the_gateway_is_refused_for_one_reason(end, sealed):
    assert reason(end, sealed=sealed) is Reason.BAD_SEAL
