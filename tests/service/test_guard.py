"""What is known of a call before it is served: who asks, from where, and with what."""

import grpc
import pytest

from service.channel import open_channel
from service.errors import NotServed
from service.guard import Guard, call_of
from service.server import bind, create_server
from service.status import from_rpc_error


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


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
async def test_a_method_that_nobody_serves_is_refused_with_our_details_and_unread(kind):
    server = create_server([Guard(lambda call: None)])
    port = bind(server, "127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        many, streamed = kind.startswith("stream"), kind.endswith("stream")
        call = getattr(channel, kind)("/crossdock.v1.InferenceService/Nothing")(
            iter([b"x"]) if many else b"x", timeout=10
        )
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await (call.read() if streamed else call)
    error = from_rpc_error(refusal.value)
    assert isinstance(error, NotServed) and error.reason == "NOT_SERVED"
    await server.stop(None)
