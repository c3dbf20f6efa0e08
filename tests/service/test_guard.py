"""What is known of a call before it is served: who asks, and with what. And what is read of one that must
not be served, or that anybody may make: nothing, and little."""

import asyncio

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc import StatusCode

from service import guard
from service.errors import NotServed, Unauthorised, Unavailable
from service.guard import call_of
from service.server import bind, create_server
from service.status import from_rpc_error
from tests.fakes.raw_peer import raw_peer

MESSAGE_BYTES_MAX = 1 << 20
GARBAGE = b"no message"


class Context:
    def __init__(self, metadata=(), shown=()):
        self._metadata, self._shown = metadata, dict(shown)

    def invocation_metadata(self):
        return self._metadata

    def auth_context(self):
        return self._shown


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


class Methods(grpc.GenericRpcHandler):
    """One method of each kind, and one that is open to everybody. parsed: what came to be read."""

    def __init__(self):
        self.parsed = []

    def service(self, call):
        made = {
            "/test/Unary": grpc.unary_unary_rpc_method_handler(self.unary, self.parse),
            "/test/Yields": grpc.unary_stream_rpc_method_handler(self.yields, self.parse),
            "/test/Writes": grpc.unary_stream_rpc_method_handler(self.writes, self.parse),
            "/test/Collects": grpc.stream_unary_rpc_method_handler(self.collects, self.parse),
            "/test/Echoes": grpc.stream_stream_rpc_method_handler(self.echoes, self.parse),
            "/test/Refuses": grpc.unary_unary_rpc_method_handler(self.refuses),
            "/grpc.health.v1.Health/Watch": grpc.unary_stream_rpc_method_handler(self.stays),
        }
        return made.get(call.method)

    def parse(self, message):
        self.parsed.append(message)
        if message == GARBAGE:
            raise DecodeError
        return message.decode()

    async def unary(self, request, context):
        return request.encode()

    async def yields(self, request, context):
        for letter in request:
            yield letter.encode()

    async def writes(self, request, context):
        for letter in request:
            await context.write(letter.encode())

    async def collects(self, requests, context):
        return "".join([each async for each in requests]).encode()

    async def echoes(self, requests, context):
        async for each in requests:
            yield each.encode()

    async def refuses(self, request, context):
        raise Unavailable("not now")

    async def stays(self, request, context):
        await context.write(b"here")
        await asyncio.Event().wait()


class Guarded:
    """A server behind a guard that asks for the key "right"."""

    def __init__(self):
        def check(call):
            if not call.method.startswith(guard.OPEN_METHODS) and call.authorization != "right":
                raise Unauthorised("no key")

        self.methods, self.server = (
            Methods(),
            create_server(
                [guard.Guard(check, message_bytes_max=MESSAGE_BYTES_MAX)], message_bytes_max=16 << 20
            ),
        )
        self.server.add_generic_rpc_handlers((self.methods,))
        self.port = bind(self.server, "127.0.0.1:0")

    def channel(self):
        """A connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", 32 << 20)]
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=options)


@pytest.fixture
async def guarded():
    guarded = Guarded()
    await guarded.server.start()
    yield guarded
    await guarded.server.stop(None)


RIGHT = {"metadata": (("authorization", "right"),), "timeout": 20}
ONE_MESSAGE = ("Unary", "Yields", "Writes")


def call(channel, name, message=b"abc", **given):
    """A call of a method with one message, as its client makes it."""
    if name == "Unary":
        return channel.unary_unary(f"/test/{name}")(message, **given)
    return channel.unary_stream(f"/test/{name}")(message, **given).read()


async def code_of(answer):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await answer
    return raised.value.code()


async def test_a_method_of_any_kind_is_to_its_client_what_it_was(guarded):
    async with guarded.channel() as channel:
        assert await channel.unary_unary("/test/Unary")(b"abc", **RIGHT) == b"abc"
        for name in ("Yields", "Writes"):
            answers = channel.unary_stream(f"/test/{name}")(b"abc", **RIGHT)
            assert [each async for each in answers] == [b"a", b"b", b"c"]
        assert await channel.stream_unary("/test/Collects")(iter([b"a", b"b"]), **RIGHT) == b"ab"
        echoes = channel.stream_stream("/test/Echoes")(iter([b"a", b"b"]), **RIGHT)
        assert [each async for each in echoes] == [b"a", b"b"]
        assert await code_of(channel.unary_unary("/test/Nobody")(b"", **RIGHT)) is StatusCode.UNIMPLEMENTED


async def test_a_blocking_client_sees_no_difference_either(guarded):
    def ask():
        with grpc.insecure_channel(f"127.0.0.1:{guarded.port}") as channel:
            assert channel.unary_unary("/test/Unary")(b"abc", **RIGHT) == b"abc"
            assert list(channel.unary_stream("/test/Writes")(b"abc", **RIGHT)) == [b"a", b"b", b"c"]

    await asyncio.to_thread(ask)


async def test_what_leaves_a_call_is_its_status(guarded):
    async with guarded.channel() as channel:
        assert await code_of(channel.unary_unary("/test/Refuses")(b"", **RIGHT)) is StatusCode.UNAVAILABLE


@pytest.mark.parametrize("name", ONE_MESSAGE)
@pytest.mark.parametrize("length", [3, 15 << 20])
async def test_without_a_right_no_message_is_read_and_the_client_hears_why(guarded, name, length):
    async with guarded.channel() as channel:
        answer = call(channel, name, b"x" * length, timeout=20)
        assert await code_of(answer) is StatusCode.UNAUTHENTICATED
    assert guarded.methods.parsed == []


@pytest.mark.parametrize("name", ONE_MESSAGE)
async def test_a_refusal_waits_for_no_message(guarded, name):
    async with raw_peer(guarded.port) as peer:
        for _ in range(50):
            peer.leave_unfinished(f"/test/{name}", length=15 << 20, sent=1000)
        await peer.until(lambda: peer.ended == 50)


@pytest.mark.parametrize("method", ["/test/Unary", "/test/Writes", "/grpc.health.v1.Health/Watch"])
async def test_a_message_that_never_becomes_whole_ends_its_call(guarded, method, monkeypatch):
    limit = "OPEN_MESSAGE_S" if method.startswith(guard.OPEN_METHODS) else "MESSAGE_S"
    monkeypatch.setattr(guard, limit, 0.05)
    async with raw_peer(guarded.port) as peer:
        peer.leave_unfinished(method, length=1000, sent=10, authorization="right")
        await peer.until(lambda: peer.ended == 1)
    assert guarded.methods.parsed == []


@pytest.mark.parametrize("name", ONE_MESSAGE)
async def test_a_call_without_its_message_is_refused(guarded, name):
    async with guarded.channel() as channel:
        answer = channel.stream_unary(f"/test/{name}")(iter([]), **RIGHT)
        assert await code_of(answer) is StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("name", [*ONE_MESSAGE, "Collects", "Echoes"])
async def test_what_is_no_message_of_the_method_is_refused_with_our_details_and_logged_by_nobody(
    guarded, name, caplog
):
    async with guarded.channel() as channel:
        method = channel.stream_unary if name in ("Unary", "Collects") else channel.stream_stream
        asked = method(f"/test/{name}")(iter([GARBAGE]), **RIGHT)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await (asked if name in ("Unary", "Collects") else asked.read())
    assert "message of this service" in from_rpc_error(refusal.value).violations[0].description
    assert refusal.value.code() is StatusCode.INVALID_ARGUMENT and not caplog.records


async def test_what_is_larger_than_a_message_may_be_is_not_parsed(guarded):
    async with guarded.channel() as channel:
        assert await code_of(call(channel, "Unary", b"x" * (MESSAGE_BYTES_MAX + 1), **RIGHT)) is (
            StatusCode.RESOURCE_EXHAUSTED
        )
        assert guarded.methods.parsed == []
        assert await call(channel, "Unary", b"x" * MESSAGE_BYTES_MAX, **RIGHT) == b"x" * MESSAGE_BYTES_MAX


@pytest.mark.parametrize("name", ONE_MESSAGE)
@pytest.mark.parametrize("length", [1000, 2**32 - 1])
async def test_a_call_that_ends_in_the_midst_of_its_message_ends(guarded, name, length):
    async with raw_peer(guarded.port) as peer:
        peer.leave_unfinished(f"/test/{name}", length, sent=10, last=True, authorization="right")
        await peer.until(lambda: peer.ended == 1)
    assert guarded.methods.parsed == []


async def test_what_is_open_to_everybody_takes_small_messages_only(guarded):
    async with guarded.channel() as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        assert await watch(b"x" * guard.OPEN_MESSAGE_BYTES_MAX, timeout=20).read() == b"here"
        refused = watch(b"x" * (guard.OPEN_MESSAGE_BYTES_MAX + 1), timeout=20).read()
        assert await code_of(refused) is StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
async def test_a_method_that_nobody_serves_is_refused_with_our_details_and_unread(guarded, kind):
    async with guarded.channel() as channel:
        many, streamed = kind.startswith("stream"), kind.endswith("stream")
        asked = getattr(channel, kind)("/test/Nobody")(iter([b"x"]) if many else b"x", timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await (asked.read() if streamed else asked)
    error = from_rpc_error(refusal.value)
    assert isinstance(error, NotServed) and error.reason == "NOT_SERVED"
    assert guarded.methods.parsed == []
