"""A request that never ends is ended by us."""

import asyncio
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gateway import http_protocol, patience
from gateway.http_protocol import BoundedHttp
from gateway.http_server import HttpServer
from service.bind_rules import LOOPBACK, BindError

PARTS = 12
"""Of an answer that takes longer than any wait for a request."""


CLOSING = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
"""A request after which its connection ends, to be ended itself."""


async def echo(request):
    return Response(await request.body())


async def slow(request):
    async def parts():
        for _ in range(PARTS):
            yield b"part"
            await asyncio.sleep(0.1)

    return StreamingResponse(parts())


@pytest.fixture
async def server(monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.2)
    monkeypatch.setattr(http_protocol, "BODY_S", 0.4)
    routes = [Route("/", echo, methods=["POST"]), Route("/slow", slow)]
    server = HttpServer(Starlette(routes=routes), "127.0.0.1", 0, LOOPBACK, None)
    await server.start()
    yield server
    await server.stop()


async def answer_to(server, *said, every_s=0.0):
    """What comes until the other end hangs up. said: piece by piece."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in said:
            writer.write(piece)
            await asyncio.sleep(every_s)
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()


async def test_no_header_says_where_a_request_comes_from(monkeypatch):
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")

    async def whence(request):
        return Response(f"{request.client.host} {request.url.scheme}")

    server = HttpServer(Starlette(routes=[Route("/", whence)]), "127.0.0.1", 0, LOOPBACK, None)
    await server.start()
    lies = b"x-forwarded-for: 10.9.9.9\r\nx-forwarded-proto: https\r\n"
    head = b"GET / HTTP/1.1\r\nhost: x\r\n" + lies + b"connection: close\r\n\r\n"
    assert (await answer_to(server, head)).endswith(b"127.0.0.1 http")
    await server.stop()


@pytest.mark.parametrize("said", [[], [b"P"], [b"POST / HTTP/1.1\r\n", b"host: x\r\n", b"a: b\r\n"]])
async def test_a_head_that_does_not_end_in_time_is_cut_off(server, said):
    assert (await answer_to(server, *said, every_s=0.05)).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "head",
    [CLOSING.replace(b"/", b"/%b", 1) + b"\r\n", CLOSING + b"a: %b\r\n\r\n"],
    ids=["a path", "a header"],
)
async def test_a_head_has_its_limit_whether_it_comes_at_once_or_not(server, head):
    over = b"a" * (http_protocol.HEAD_BYTES_MAX + 1)
    answers = [await answer_to(server, head % over), await answer_to(server, (head % over)[:-1], b"\n")]
    assert all(answer.startswith(b"HTTP/1.1 431 ") for answer in answers)
    under = over[: http_protocol.HEAD_BYTES_MAX - 100]
    assert not (await answer_to(server, head % under)).startswith(b"HTTP/1.1 431 ")


async def test_heads_of_several_requests_are_counted_each_by_itself(server):
    large = b"a: %b\r\n\r\n" % (b"a" * 50_000)
    one = b"GET /slow HTTP/1.1\r\nhost: x\r\n" + large
    said = await answer_to(server, one, CLOSING + large)
    assert b"HTTP/1.1 200 " in said and b" 431 " not in said


async def test_to_http_1_0_an_answer_of_no_told_length_ends_with_its_connection(server):
    head, _, body = (await answer_to(server, b"GET /slow HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and body == b"part" * PARTS
    whole = await answer_to(server, b"POST / HTTP/1.0\r\ncontent-length: 2\r\n\r\nab")
    assert b"content-length: 2\r\n" in whole and whole.endswith(b"\r\n\r\nab")


async def test_a_body_that_does_not_end_in_time_is_cut_off(server):
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
    answer = await answer_to(server, head, *[b"x"] * 5, every_s=0.05)
    assert b"408" in answer or answer == b""


@pytest.mark.parametrize(
    "behind",
    [b"P", b"POST / HTTP/1.1\r\nhost: x\r\n", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\na"],
    ids=["a byte", "half a head", "half a body"],
)
async def test_what_is_on_its_way_behind_a_request_cuts_nothing_off_its_answer(server, behind):
    """Nothing of it comes in time; that is told once the answer is complete."""
    said = await answer_to(server, b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n", behind, every_s=0.05)
    answer, end, rest = said.partition(b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.count(b"part") == PARTS and end
    assert rest == b"" or b" 408 " in rest


@pytest.mark.parametrize("garbage", [b"}", b"\x00\xff", b"GET / HTTP/9\r\n\r\n"])
@pytest.mark.parametrize("requests", [1, 3])
async def test_what_is_no_request_takes_nothing_from_the_answers_to_those_before_it(
    server, garbage, requests
):
    """It is refused behind them."""
    whole = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nabcd"
    said = await answer_to(server, whole * requests + garbage, b"more of it", every_s=0.05)
    answers, _, refusal = said.rpartition(b"\r\n\r\nabcd")
    assert answers.count(b"HTTP/1.1 200 ") == requests
    assert refusal.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 ")) and b'"error"' in refusal
    streamed = await answer_to(server, b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n" + garbage)
    assert streamed.count(b"part") == PARTS and b"0\r\n\r\nHTTP/1.1 4" in streamed


async def test_a_slow_request_that_ends_in_time_is_answered_and_so_is_the_next(server):
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for _ in range(3):
        for piece in (head[:10], head[10:], b"ab", b"cd"):
            writer.write(piece)
            await asyncio.sleep(0.05)
        said = await reader.readuntil(b"abcd")
        assert said.startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(0.5)
    writer.close()


async def test_a_request_that_is_not_whole_when_the_server_ends_is_told_so():
    begun = asyncio.Event()

    async def wait(request):
        begun.set()
        return Response(await request.body())

    server = HttpServer(
        Starlette(routes=[Route("/", wait, methods=["POST"])]), "127.0.0.1", 0, LOOPBACK, None
    )
    await server.start()
    reached = asyncio.create_task(
        answer_to(server, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nab")
    )
    await begun.wait()
    await server.stop()
    answer = await reached
    assert answer.startswith(b"HTTP/1.1 503 ") and b'"code":"draining"' in answer


async def test_an_answer_that_is_cut_is_followed_by_no_other(server):
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readuntil(b"part")
    await server.stop()
    with suppress(ConnectionError):
        assert b"503" not in await reader.read()
    writer.close()


def test_other_machines_are_not_listened_to_without_tls():
    with pytest.raises(BindError, match="allow-insecure"):
        HttpServer(Starlette(), "10.0.0.1", 0, LOOPBACK, None)


async def endless(request):
    async def parts():
        try:
            while True:
                yield b"x" * 65_536
                await asyncio.sleep(0)
        finally:
            request.app.state.over.set()

    return StreamingResponse(parts())


async def test_an_answer_that_is_not_read_is_given_up(monkeypatch):
    monkeypatch.setattr(patience, "STALL_S", 0.3)
    app = Starlette(routes=[Route("/", endless)])
    app.state.over = asyncio.Event()
    server = HttpServer(app, "127.0.0.1", 0, LOOPBACK, None)
    await server.start()
    host, port = server.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await asyncio.wait_for(app.state.over.wait(), 20)
    writer.close()
    await server.stop()


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_is_sent_when_it_is_read_the_last_of_it_too(streams):
    """Who sends it keeps its place until then."""
    large, sent = b"x" * (64 << 20), asyncio.Event()

    async def app(scope, receive, send):
        headers = [] if streams else [(b"content-length", b"%d" % len(large))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": large})
        sent.set()

    server = HttpServer(app, "127.0.0.1", 0, LOOPBACK, None)
    await server.start()
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readexactly(1024)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sent.wait(), 0.5)
    await reader.readexactly(len(large) - 1024)
    await asyncio.wait_for(sent.wait(), 20)
    writer.close()
    await server.stop()


async def test_a_connection_whose_host_is_gone_is_given_up_as_over_grpc(server):
    """What the system does for it shows in the timer of its end, of which 02 is keep-alive."""
    host, port = server.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    try:
        while not (timers := timers_of(int(port))):
            await asyncio.sleep(0.01)
        assert timers == ["02"]
    finally:
        writer.close()


def timers_of(port):
    """Of the connections that were made to it, at its end."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row[5][:2] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "01"]


class Held:
    """A transport that holds so many unread bytes, and a loop whose timers the test lets go off."""

    def __init__(self):
        self.unread, self.aborted, self._timers = 0, False, []

    def get_write_buffer_size(self):
        return self.unread

    def abort(self):
        self.aborted = True

    def call_later(self, delay, act, *args):
        self._timers.append((delay, act, args))
        return SimpleNamespace(cancel=self._timers.clear)

    def go_off(self):
        """Every timer that there is; their delays."""
        due, self._timers = self._timers, []
        for _, act, args in due:
            act(*args)
        return [delay for delay, _, _ in due]


def unread_answer(unread):
    """A connection that so much of an answer waits at, and its transport."""
    held = Held()
    protocol = BoundedHttp.__new__(BoundedHttp)
    protocol.transport = protocol.loop = held
    protocol.flow = SimpleNamespace(pause_writing=lambda: None, resume_writing=lambda: None)
    held.unread = unread
    protocol.pause_writing()
    return protocol, held


def test_an_answer_that_is_read_slowly_is_not_given_up():
    protocol, held = unread_answer(3 * patience.STALL_BYTES)
    for _ in range(3):
        held.unread -= patience.STALL_BYTES
        assert held.go_off() == [patience.STALL_S] and not held.aborted
    protocol.resume_writing()
    assert held.go_off() == []


@pytest.mark.parametrize("unread", [100_000, 3 * patience.STALL_BYTES])
@pytest.mark.parametrize("read", [0, 1, 99_999])
def test_an_answer_of_which_next_to_nothing_is_read_is_given_up(unread, read):
    _, held = unread_answer(unread)
    held.unread -= read
    assert held.go_off() == [patience.STALL_S] and held.aborted
