"""What those who watch a process hear, whoever else watches and however badly."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service import patience
from service.guard import Guard
from service.health import READINESS, Health
from service.server import bind, create_server, run_until_signal
from service.worker_process import watch_pulse
from tests.fakes.raw_peer import raw_peer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
NAME = "test.Service"
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
WATCH = "/grpc.health.v1.Health/Watch"
pytestmark = pytest.mark.timeout(60)


def asked(name):
    return health_pb2.HealthCheckRequest(service=name)


@pytest.fixture
def eight(monkeypatch):
    """Watches are all that there may be."""
    monkeypatch.setattr("service.health.WATCHES_MAX", 8)


async def end_of(watch):
    """How it ends, whatever it hears before."""
    with pytest.raises(grpc.aio.AioRpcError):
        while await watch.read() is not grpc.aio.EOF:
            pass
    return await watch.code()


class Served:
    """A server whose health is all that it has."""

    def __init__(self):
        self.server = create_server([Guard(lambda call: None)])
        self.health = Health([NAME], standing=["standing.Service"])
        self.health.register(self.server)
        self.port = bind(self.server, "127.0.0.1:0")

    @asynccontextmanager
    async def client(self):
        """A connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=options) as channel:
            yield health_pb2_grpc.HealthStub(channel)

    async def check(self, name):
        async with self.client() as client:
            return (await client.Check(asked(name), timeout=20)).status


@pytest.fixture
async def served():
    served = Served()
    await served.server.start()
    yield served
    served.health.release()
    await served.server.stop(None)


@asynccontextmanager
async def unread(served, *names):
    """A peer that watches these and takes nothing of it. Its heads come, so its watches have begun."""
    async with raw_peer(served.port, window_bytes=0) as peer:
        for name in names:
            peer.open(WATCH, asked(name).SerializeToString())
        await peer.until(lambda: len(peer.begun) == len(names))
        yield peer


async def test_one_watcher_leaves_and_the_other_still_hears(served):
    async with served.client() as one, served.client() as other:
        staying, leaving = one.Watch(asked(NAME)), other.Watch(asked(NAME))
        assert (await staying.read()).status == (await leaving.read()).status == NOT_SERVING
        leaving.cancel()
        assert await served.check(NAME) == NOT_SERVING
        for ready in (True, False, True):
            served.health.set_ready(ready)
            assert (await staying.read()).status == (SERVING if ready else NOT_SERVING)


async def test_a_watcher_hears_what_is_last_and_names_are_apart(served):
    async with served.client() as client:
        watches = [client.Watch(asked(name)) for name in ("", READINESS, NAME, "standing.Service")]
        assert [(await each.read()).status for each in watches] == [
            SERVING,
            NOT_SERVING,
            NOT_SERVING,
            SERVING,
        ]
        served.health.set_ready(True)
        assert [(await each.read()).status for each in watches[1:3]] == [SERVING, SERVING]
        served.health.shut_down()
        assert [(await each.read()).status for each in watches] == [NOT_SERVING] * 4
        served.health.set_ready(True)
        assert await served.check(NAME) == await served.check("") == NOT_SERVING


async def test_a_name_that_nobody_has_is_unknown(served):
    async with served.client() as client:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await client.Check(asked("nobody's"))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        watch = client.Watch(asked("nobody's"))
        assert (await watch.read()).status == UNKNOWN
        served.health.set_ready(True)
        assert (await client.Check(asked(NAME))).status == SERVING
        watch.cancel()


async def test_those_who_take_nothing_keep_nobody_from_hearing(served):
    async with served.client() as client, unread(served, NAME, "", READINESS):
        watch = client.Watch(asked(NAME))
        assert (await watch.read()).status == NOT_SERVING
        for ready in (True, False, True):
            served.health.set_ready(ready)
            assert (await watch.read()).status == (SERVING if ready else NOT_SERVING)
        served.health.shut_down()
        assert (await watch.read()).status == NOT_SERVING


async def test_one_who_takes_nothing_is_given_up(served, monkeypatch):
    given_up = asyncio.Event()
    tell = patience.tell

    async def watched(context, message):
        try:
            await tell(context, message)
        except Exception:
            given_up.set()
            raise

    monkeypatch.setattr(patience, "STALL_S", 0.05)
    monkeypatch.setattr("service.health.tell", watched)
    async with unread(served, NAME):
        await given_up.wait()


async def test_of_watches_there_is_a_bound_and_who_has_few_keeps_them(eight, served):
    async with served.client() as modest, served.client() as greedy:
        kept = modest.Watch(asked(NAME))
        assert (await kept.read()).status == NOT_SERVING
        watches = []
        for _ in range(30):
            watches.append(greedy.Watch(asked("nobody's")))
            assert (await watches[-1].read()).status == UNKNOWN
        assert {await end_of(watch) for watch in watches[:-7]} == {EXHAUSTED}
        late = modest.Watch(asked(""))
        assert (await late.read()).status == SERVING
        assert await end_of(watches[-7]) is EXHAUSTED
        served.health.set_ready(True)
        assert (await kept.read()).status == SERVING
        assert not any(watch.done() for watch in (kept, late, *watches[-6:]))


async def test_an_engine_that_stands_still_is_told_to_all_who_read_and_so_is_that_it_moves_again(served):
    """Gateways too, which `rim.frozen` is for."""
    looks = [False, True, True]
    rim = SimpleNamespace(frozen=False)
    pulse = SimpleNamespace(frozen=lambda: looks.pop(0) if len(looks) > 1 else looks[0])
    served.health.set_ready(True)
    async with served.client() as client, unread(served, NAME):
        watch = client.Watch(asked(NAME))
        assert (await watch.read()).status == SERVING
        watching = asyncio.create_task(watch_pulse(pulse, rim, served.health))
        assert (await watch.read()).status == NOT_SERVING
        assert rim.frozen
        looks[:] = [False]
        assert (await watch.read()).status == SERVING
        assert not rim.frozen
        watching.cancel()


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_signal_ends_a_process_whoever_watches(served, signals):
    """Those who read are told that it ends, and then that there is no more; nobody is waited for to the end of the time
    that running calls have, but for one who takes nothing: a second signal is for that."""
    ending = asyncio.create_task(
        run_until_signal(served.server, served.health, grace_s=0.1 if signals == 1 else 3600)
    )
    async with served.client() as client, unread(served, NAME, ""):
        watch = client.Watch(asked(""))
        assert (await watch.read()).status == SERVING
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await watch.read()).status == NOT_SERVING
        if signals == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        assert await watch.read() is grpc.aio.EOF
        await ending


async def test_a_process_that_is_watched_ends_as_soon_as_nothing_runs(served):
    ended = asyncio.Event()
    ending = asyncio.create_task(run_until_signal(served.server, served.health, grace_s=3600, ended=ended))
    async with served.client() as client:
        watch = client.Watch(asked(READINESS))
        assert (await watch.read()).status == NOT_SERVING
        ended.set()
        await ending
