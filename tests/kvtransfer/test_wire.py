"""The codec of the data channel: everything goes through unchanged, anything else is a WireError."""

import contextlib

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtransfer import wire
from kvtransfer.errors import Reason, UnknownVersion, WireError
from kvtransfer.schema import U32_MAX, U64_MAX

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=16)
DIGESTS = st.binary(min_size=16, max_size=16)
U32 = st.integers(0, U32_MAX)
U64 = st.integers(0, U64_MAX)

MESSAGES = st.one_of(
    st.builds(
        wire.Hello,
        layout=st.lists(st.tuples(NAMES, NAMES), max_size=32).map(tuple),
        fingerprint=st.binary(min_size=32, max_size=32),
        source_id=NAMES,
        target_id=NAMES,
    ),
    st.builds(wire.HelloAccepted, target_id=NAMES),
    st.builds(wire.HelloRefused, fields=st.lists(NAMES, max_size=64).map(tuple)),
    st.builds(wire.Open, sealed=st.binary(min_size=1, max_size=1024)),
    st.builds(wire.Grant, total_bytes=st.integers(0, 2**63 - 1)),
    st.builds(
        wire.BlockRun, first_index=U32, digests=st.lists(DIGESTS, min_size=1, max_size=64).map(b"".join)
    ),
    st.builds(wire.Resend, indices=st.lists(U32, max_size=50).map(tuple)),
    st.builds(wire.Manifest, num_tokens=st.integers(1, U32_MAX), digest=DIGESTS, first_token=U32),
    st.builds(wire.Committed),
    st.builds(wire.Refused, reason=st.sampled_from(Reason), detail=NAMES),
    st.builds(wire.Abort, reason=st.sampled_from(Reason)),
)
ENVELOPES = st.builds(
    wire.Envelope, source_epoch=U64, target_epoch=U64, attempt=U32, ticket_id=DIGESTS, message=MESSAGES
)
GRANT = wire.Envelope(
    source_epoch=1, target_epoch=2, attempt=3, ticket_id=bytes(16), message=wire.Grant(total_bytes=4)
)


def raw(*values) -> bytes:
    return msgpack.packb(values)


def grant_with(position, value) -> bytes:
    values = list(msgpack.unpackb(wire.encode(GRANT)))
    values[position] = value
    return msgpack.packb(values)


@given(ENVELOPES)
def test_a_message_comes_out_as_it_went_in(envelope):
    assert wire.decode(wire.encode(envelope)) == envelope


@given(st.binary(max_size=300))
@example(b"")
@example(b"\xc1")
@example(b"\xdd\x7f\xff\xff\xff")
@example(b"\x91" * 5000)
@example(b"\xc7\x00\x05")
@example(b"\xd6\xff\x00\x00\x00\x00")
@example(b"\x92\x01\xa2\xff\xfe")
@example(b"\x80\x80")
def test_any_bytes_are_a_message_or_a_wire_error(header):
    with contextlib.suppress(WireError):
        assert isinstance(wire.decode(header), wire.Envelope)


@given(ENVELOPES, st.data())
def test_any_damage_gives_a_message_or_a_wire_error(envelope, data):
    header = bytearray(wire.encode(envelope))
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(header)))
    for mutant in (bytes(header), bytes(header[:cut]), bytes(header) + b"\x00"):
        with contextlib.suppress(WireError):
            assert isinstance(wire.decode(mutant), wire.Envelope)


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, True),
        (0, "1"),
        (1, 0),
        (1, 200),
        (1, True),
        (2, -1),
        (2, 2**64 - 1 + 0.0),
        (3, True),
        (4, 2**32),
        (5, b"short"),
        (5, "sixteen letters!"),
        (6, -1),
        (6, 2**63),
        (6, None),
        (6, False),
        (6, [4]),
    ],
)
def test_a_value_of_another_type_or_range_is_refused(position, value):
    assert wire.decode(grant_with(6, 5)).message == wire.Grant(total_bytes=5)
    with pytest.raises(WireError):
        wire.decode(grant_with(position, value))


def test_another_version_is_told_apart_from_garbage():
    with pytest.raises(UnknownVersion):
        wire.decode(grant_with(0, wire.WIRE_VERSION + 1))


def test_missing_and_additional_fields_are_refused():
    values = msgpack.unpackb(wire.encode(GRANT))
    for changed in (values[:-1], [*values, 0], [], values[:1], dict.fromkeys(range(3), 1), 5, "text"):
        with pytest.raises(WireError):
            wire.decode(msgpack.packb(changed))


@pytest.mark.parametrize(
    "message",
    [
        wire.Open(sealed=bytes(1025)),
        wire.Open(sealed=b""),
        wire.Resend(indices=tuple(range(wire.RESEND_INDICES_MAX + 1))),
        wire.HelloRefused(fields=("x" * 65,)),
        wire.Refused(reason=Reason.SPENT, detail="x" * 513),
        wire.Hello(layout=(("a", "b"),) * 33, fingerprint=bytes(32), source_id="s", target_id="t"),
        wire.BlockRun(first_index=2**32, digests=bytes(16)),
        wire.BlockRun(first_index=0, digests=bytes(15)),
        wire.BlockRun(first_index=0, digests=bytes(33)),
        wire.BlockRun(first_index=0, digests=b""),
        wire.BlockRun(first_index=0, digests=bytes(16 * 65)),
    ],
)
def test_a_message_over_its_limits_is_refused_on_the_way_out_and_on_the_way_in(message):
    envelope = wire.Envelope(source_epoch=1, target_epoch=2, attempt=3, ticket_id=bytes(16), message=message)
    with pytest.raises(WireError):
        wire.encode(envelope)


def test_a_header_over_the_limit_is_refused_whatever_it_holds():
    with pytest.raises(WireError, match="longer than"):
        wire.decode(raw(*[0] * (wire.HEADER_BYTES_MAX + 1)))
