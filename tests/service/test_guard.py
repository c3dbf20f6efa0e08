"""What is known of a call before it is served: who asks, from where, and with what."""

import pytest

from service.guard import call_of


class Context:
    def __init__(self, peer="", metadata=(), shown=()):
        self._peer, self._metadata, self._shown = peer, metadata, dict(shown)

    def peer(self):
        return self._peer

    def invocation_metadata(self):
        return self._metadata

    def auth_context(self):
        return self._shown


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:5", True),
        ("ipv4:127.9.9.9:5", True),
        ("ipv6:[::1]:5", True),
        ("ipv6:%5B::1%5D:5", True),
        ("unix:/run/crossdock.sock", True),
        ("unix:", True),
        ("ipv4:10.0.0.1:5", False),
        ("ipv4:1.127.0.0:5", False),
        ("ipv6:[::ffff:10.0.0.1]:5", False),
        ("ipv6:[fe80::1]:5", False),
        ("", False),
    ],
)
def test_only_loopback_and_sockets_with_a_path_are_this_machine(peer, local):
    assert call_of("/m", Context(peer)).local is local


@pytest.mark.parametrize(
    ("metadata", "seen"),
    [
        ((), ""),
        (None, ""),
        ((("authorization", "Bearer a"),), "Bearer a"),
        ((("other", "x"), ("authorization", "Bearer a")), "Bearer a"),
        ((("authorization", "Bearer a"), ("authorization", "Bearer a")), "Bearer a"),
        ((("authorization", "Bearer a"), ("authorization", "Bearer b")), ""),
    ],
)
def test_of_two_credentials_that_differ_neither_counts(metadata, seen):
    assert call_of("/m", Context(metadata=metadata)).authorization == seen


def test_names_are_those_of_the_certificate():
    shown = {"x509_common_name": [b"ops"], "x509_subject_alternative_name": [b"a", b"\xff"], "other": [b"no"]}
    assert call_of("/m", Context(shown=shown)).identities == ("a", "\ufffd", "ops")
