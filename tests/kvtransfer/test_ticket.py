"""Tickets: sealed, opened, and refused at the slightest difference."""

import hashlib
import hmac
from dataclasses import fields, replace

import msgpack
import pytest

from kvtransfer.errors import Reason, TicketRefused, WireError
from kvtransfer.ticket import TICKET_VERSION, Ticket, open_sealed, seal


def test_a_sealed_ticket_opens_to_the_same_ticket(world):
    ticket = world.ticket(first_block=2)
    assert open_sealed(seal(ticket, world.key), world.key) == ticket


def test_every_flipped_bit_is_refused(world):
    sealed = world.seal(world.ticket())
    for bit in range(8 * len(sealed)):
        forged = bytearray(sealed)
        forged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TicketRefused) as refused:
            open_sealed(bytes(forged), world.key)
        assert refused.value.reason is Reason.BAD_SEAL


@pytest.mark.parametrize("keep", [0, 1, 31, 32, 33, -1])
def test_a_cut_ticket_is_refused(world, keep):
    with pytest.raises(TicketRefused):
        open_sealed(world.seal(world.ticket())[:keep], world.key)


def test_another_key_does_not_open_it(world):
    with pytest.raises(TicketRefused):
        open_sealed(world.seal(world.ticket()), bytes(32))


def test_a_ticket_longer_than_the_limit_is_refused(world):
    with pytest.raises(TicketRefused):
        open_sealed(world.seal(world.ticket()) + bytes(1024), world.key)


@pytest.mark.parametrize("field", [field.name for field in fields(Ticket)])
def test_a_well_signed_ticket_with_a_wrong_type_is_refused(world, field):
    ticket = world.ticket()
    names = [each.name for each in fields(Ticket)]
    values = [TICKET_VERSION, *(getattr(ticket, name) for name in names)]
    signed(world, values)  # opens as it is
    values[1 + names.index(field)] = True
    with pytest.raises(TicketRefused):
        signed(world, values)


def test_a_well_signed_ticket_of_another_version_or_length_is_refused(world):
    values = [TICKET_VERSION, *(getattr(world.ticket(), each.name) for each in fields(Ticket))]
    for changed in ([TICKET_VERSION + 1, *values[1:]], [True, *values[1:]], values[:-1], [*values, 0], []):
        with pytest.raises(TicketRefused):
            signed(world, changed)


@pytest.mark.parametrize(
    "changes",
    [
        {"ticket_id": bytes(16)},
        {"ticket_id": b"short"},
        {"request_id": ""},
        {"request_id": "x" * 257},
        {"attempt": -1},
        {"attempt": True},
        {"source_id": ""},
        {"source_epoch": 2**64},
        {"layout_fingerprint": bytes(31)},
        {"num_tokens": 0},
        {"num_tokens": 2.0},
        {"first_block": 6},
        {"num_blocks": 0},
        {"num_blocks": 10_000},
        {"lease_ms": 0},
        {"lease_ms": 3_600_001},
    ],
)
def test_a_value_outside_its_limits_makes_no_ticket(world, changes):
    with pytest.raises(WireError):
        replace(world.ticket(blocks=5), **changes)


def test_the_seal_is_an_hmac_over_the_domain_and_the_fields(world):
    sealed = world.seal(world.ticket())
    expected = hmac.new(world.key, b"crossdock ticket\x00" + sealed[:-32], hashlib.sha256).digest()
    assert sealed[-32:] == expected


def signed(world, values) -> Ticket:
    body = msgpack.packb(values)
    mac = hmac.new(world.key, b"crossdock ticket\x00" + body, hashlib.sha256).digest()
    return open_sealed(body + mac, world.key)
