"""The gRPC server of a process: its address, and its end."""

import asyncio
import os
import signal
import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.bind_rules import BindError, BindRules, is_wildcard
from service.channel import open_channel
from service.health import READINESS, Health
from service.server import bind, create_server, run_until_signal

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Slow(grpc.GenericRpcHandler):
    """One method that answers when `go` is set."""

    def __init__(self) -> None:
        self.started, self.go = asyncio.Event(), asyncio.Event()

    def service(self, handler_call_details):
        if handler_call_details.method != "/test.Service/Slow":
            return None

        async def slow(request, context):
            self.started.set()
            await self.go.wait()
            return b"done"

        return grpc.unary_unary_rpc_method_handler(slow)


class Running:
    """A server that waits for a signal, and a channel to it. told: what runs at the end ends when it is told to."""

    def __init__(self, before_stop=None, grace_s: float = 30, told=False, **ends) -> None:
        self.before_stop, self.grace_s = before_stop, grace_s
        self.slow, self.health = Slow(), Health(["test.Service"])
        self.ends = {"last_words": self.slow.go.set, **ends} if told else ends
        self.ended, self.cleaned = asyncio.Event(), []

    async def __aenter__(self) -> "Running":
        server = create_server()
        server.add_generic_rpc_handlers((self.slow,))
        self.health.register(server)
        port = bind(server, "127.0.0.1:0")
        await server.start()
        self.health.set_ready(True)
        self.channel = open_channel(f"127.0.0.1:{port}")
        self.checks = health_pb2_grpc.HealthStub(self.channel)
        self.waiting = asyncio.create_task(
            run_until_signal(
                server,
                self.health,
                grace_s=self.grace_s,
                before_stop=self.before_stop,
                cleanups=[self._clean],
                ended=self.ended,
                **self.ends,
            )
        )
        assert await self.status("") == SERVING  # by then the signal handlers are up as well
        return self

    async def __aexit__(self, *exception) -> None:
        self.slow.go.set()
        self.ended.set()
        await self.waiting
        await self.channel.close()

    async def call(self) -> bytes:
        return await self.channel.unary_unary("/test.Service/Slow")(b"", timeout=20)

    async def status(self, service: str):
        return (await self.checks.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)).status

    async def _clean(self) -> None:
        self.cleaned.append(self.slow.go.is_set())


async def test_a_signal_lets_running_calls_end_and_then_cleans_up():
    async with Running() as running:
        call = asyncio.create_task(running.call())
        await running.slow.started.wait()
        watch = running.checks.Watch(health_pb2.HealthCheckRequest(service=READINESS), timeout=20)
        assert (await watch.read()).status == SERVING
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        assert running.cleaned == []
        running.slow.go.set()
        assert await call == b"done"
        await running.waiting
        assert running.cleaned == [True]


async def test_a_second_signal_does_not_wait_for_running_calls():
    async with Running() as running:
        call = asyncio.create_task(running.call())
        await running.slow.started.wait()
        watch = running.checks.Watch(health_pb2.HealthCheckRequest(service=""), timeout=20)
        assert (await watch.read()).status == SERVING
        os.kill(os.getpid(), signal.SIGINT)
        assert (await watch.read()).status == NOT_SERVING
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        await running.waiting
        assert running.cleaned == [False]


async def test_the_drain_comes_before_new_calls_are_refused():
    async def drain():
        assert await running.status("") == NOT_SERVING
        running.slow.go.set()
        assert await running.call() == b"done"
        drained.set()

    drained = asyncio.Event()
    async with Running(before_stop=drain) as running:
        running.ended.set()
        await running.waiting
    assert drained.is_set()


async def test_a_drain_that_takes_too_long_is_cut():
    async def drain():
        try:
            await asyncio.Event().wait()
        finally:
            cut.set()

    cut = asyncio.Event()
    async with Running(before_stop=drain, grace_s=0.01) as running:
        running.ended.set()
        await running.waiting
    assert cut.is_set()
    assert running.cleaned == [False]


@pytest.mark.parametrize("signals", [1, 2])
async def test_what_runs_when_the_time_is_over_is_told_before_it_is_cut(signals):
    async with Running(grace_s=0.1 if signals == 1 else 3600, told=True) as running:
        call = asyncio.create_task(running.call())
        await running.slow.started.wait()
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)
        assert await call == b"done"
        await running.waiting
        assert running.cleaned == [True]


async def test_what_runs_on_another_server_has_as_long_and_the_same_last_words():
    told = asyncio.Event()
    async with Running(grace_s=0.1, beside=told.wait, last_words=told.set) as running:
        running.ended.set()
        await running.waiting
    assert told.is_set()


async def test_nothing_is_waited_for_once_nothing_runs_anywhere():
    finish = asyncio.Event()
    async with Running(grace_s=3600, beside=finish.wait) as running:
        running.ended.set()
        assert running.cleaned == []
        finish.set()
        await running.waiting
        assert running.cleaned == [False]


async def test_a_process_can_end_itself():
    async with Running() as running:
        running.ended.set()
        await running.waiting
        assert running.cleaned == [False]


async def test_a_process_is_alive_before_it_is_ready():
    async with Running() as running:
        running.health.set_ready(False)
        assert await running.status("") == SERVING
        assert await running.status(READINESS) == NOT_SERVING
        assert await running.status("test.Service") == NOT_SERVING
        running.health.set_ready(True)
        assert await running.status("test.Service") == SERVING


async def test_a_port_in_use_is_refused_in_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BindError) as raised:
            bind(create_server(), f"127.0.0.1:{taken.getsockname()[1]}")
    assert "taken" in str(raised.value)
    assert "\n" not in str(raised.value)


async def test_two_servers_never_share_a_port():
    first, second = create_server(), create_server()
    port = bind(first, "127.0.0.1:0")
    await first.start()
    with pytest.raises(BindError):
        bind(second, f"127.0.0.1:{port}")
    await first.stop(None)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "*:0", ":0", "0:0", "0x0:0"])
async def test_every_interface_is_listened_on_only_when_asked(address):
    assert is_wildcard(address)
    with pytest.raises(BindError, match="allow-wildcard-bind"):
        bind(create_server(), address)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/tmp/x", "10.0.0.1:1"])
def test_a_named_interface_is_no_wildcard(address):
    assert not is_wildcard(address)


async def test_a_wildcard_is_listened_on_when_asked():
    rules = BindRules(allow_wildcard=True, allow_insecure=True)
    assert bind(create_server(), "0.0.0.0:0", rules) > 0


async def test_a_unix_socket_is_an_address(tmp_path):
    server, slow = create_server(), Slow()
    server.add_generic_rpc_handlers((slow,))
    assert bind(server, f"unix:{tmp_path}/x.grpc") == 0
    await server.start()
    slow.go.set()
    async with open_channel(f"unix:{tmp_path}/x.grpc") as channel:
        assert await channel.unary_unary("/test.Service/Slow")(b"", timeout=10) == b"done"
    await server.stop(None)


async def test_a_unix_socket_that_somebody_has_is_refused_and_stays_his(tmp_path):
    address = f"unix:{tmp_path}/of%20a.grpc"
    server, slow = create_server(), Slow()
    server.add_generic_rpc_handlers((slow,))
    bind(server, address)
    await server.start()
    slow.go.set()
    second = create_server()
    with pytest.raises(BindError, match="cannot listen there") as raised:
        bind(second, address)
    assert "\n" not in str(raised.value)
    await second.stop(None)
    async with open_channel(address) as channel:
        assert await channel.unary_unary("/test.Service/Slow")(b"", timeout=10) == b"done"
    await server.stop(None)


async def test_a_unix_socket_that_nobody_answers_for_is_taken_over(tmp_path):
    path = f"{tmp_path}/left.grpc"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
        dead.listen()
    server, slow = create_server(), Slow()
    server.add_generic_rpc_handlers((slow,))
    bind(server, f"unix:{path}")
    await server.start()
    slow.go.set()
    async with open_channel(f"unix:{path}") as channel:
        assert await channel.unary_unary("/test.Service/Slow")(b"", timeout=10) == b"done"
    await server.stop(None)


@pytest.mark.parametrize("place", ["file", "no/folder/x", "file/x", "x" * 200])
async def test_a_path_that_is_no_place_for_a_socket_is_refused_in_one_line(tmp_path, place):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(BindError, match="cannot listen there") as raised:
        bind(create_server(), f"unix:{tmp_path}/{place}")
    assert "\n" not in str(raised.value)
    assert (tmp_path / "file").read_text() == "precious"


async def test_a_compressed_message_is_refused_and_never_unpacked():
    server, slow = create_server(message_bytes_max=1000), Slow()
    server.add_generic_rpc_handlers((slow,))
    port = bind(server, "127.0.0.1:0")
    await server.start()
    slow.go.set()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary("/test.Service/Slow")(
                bytes(1_000_000), timeout=10, compression=grpc.Compression.Gzip
            )
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(None)


async def test_a_message_over_the_limit_is_refused():
    server, slow = create_server(message_bytes_max=1000), Slow()
    server.add_generic_rpc_handlers((slow,))
    port = bind(server, "127.0.0.1:0")
    await server.start()
    slow.go.set()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/test.Service/Slow")
        assert await call(bytes(900), timeout=10) == b"done"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(bytes(1100), timeout=10)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.stop(None)


class Named(grpc.GenericRpcHandler):
    """Says who answers."""

    def __init__(self, name):
        self._name = name

    def service(self, handler_call_details):
        async def say(request, context):
            return self._name

        return grpc.unary_unary_rpc_method_handler(say)


class Peers(grpc.GenericRpcHandler):
    """Says over which connection it was asked."""

    def service(self, handler_call_details):
        async def say(request, context):
            return context.peer().encode()

        return grpc.unary_unary_rpc_method_handler(say) if "Slow" not in handler_call_details.method else None


@pytest.mark.timeout(30)
async def test_a_connection_of_some_age_takes_no_new_calls_and_those_that_run_go_on():
    server, slow = create_server(connection_age_ms=200), Slow()
    server.add_generic_rpc_handlers((slow, Peers()))
    port = bind(server, "127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        running = asyncio.ensure_future(channel.unary_unary("/test.Service/Slow")(b"", timeout=20))
        await slow.started.wait()
        ask = channel.unary_unary("/test.Service/Say")
        first = await ask(b"", timeout=10)
        while await ask(b"", timeout=10) == first:
            pass
        slow.go.set()
        assert await running == b"done"
    await server.stop(None)


@pytest.mark.timeout(30)
async def test_servers_that_agree_to_share_a_port_all_get_calls_and_nobody_else_gets_in():
    first, second, stranger = create_server(share_port=True), create_server(share_port=True), create_server()
    first.add_generic_rpc_handlers((Named(b"first"),))
    second.add_generic_rpc_handlers((Named(b"second"),))
    port = bind(first, "127.0.0.1:0")
    assert bind(second, f"127.0.0.1:{port}") == port
    with pytest.raises(BindError):
        bind(stranger, f"127.0.0.1:{port}")
    await first.start()
    await second.start()
    answers = set()
    while answers != {b"first", b"second"}:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            answers.add(await channel.unary_unary("/test.Service/Say")(b"", timeout=10))
    await asyncio.gather(first.stop(None), second.stop(None))
