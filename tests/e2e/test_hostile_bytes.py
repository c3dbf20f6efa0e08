"""Bytes of any kind at every listening socket: no process dies, no stream notices, nothing is run or kept."""

import asyncio
import gzip
import ipaddress
import os
import re
import secrets
import signal
import stat
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import grpc
import httpx
import pytest

from crossdock.v1 import control_pb2
from tests.e2e import attacks
from tests.e2e.conftest import (
    CONTROL_TOKEN,
    NEIGHBOUR,
    OPERATOR,
    ROOT,
    Stack,
    crossdock,
    resident_bytes,
    said_when_ready,
    spec,
    stream,
    tokens_of,
    undisturbed,
)
from tests.e2e.listening import listeners, process_tree
from tests.security.test_intrusion import MEMORY_BYTES_EACH, SILENT

HALF_OPEN = 60
LONG, SHORT = 600, {"sampling": {"max_tokens": 4}}
"""Tokens of a prompt that no decode worker computes by itself, and how short the answer is."""
OVERSIZED = bytes(4 << 20)
GZIP = b"\x1f\x8b"


class Apart(Stack):
    """Processes that were started one by one, by their own commands."""

    def __init__(self, processes, grpc, http):
        super().__init__(process=processes["gateway"], grpc=grpc, http=http)
        self.processes = processes

    def operator(self):
        return OPERATOR

    def children(self):
        return {name: each.pid for name, each in self.processes.items() if each.poll() is None}


@pytest.fixture(scope="module")
def apart_stack(shallow_model):
    environ = os.environ | {
        "CROSSDOCK_TICKET_KEY": secrets.token_hex(32),
        "CROSSDOCK_CONTROL_TOKEN": CONTROL_TOKEN,
    }
    engine = (
        *shallow_model,
        "--dtype",
        "float32",
        "--kv-cache-memory-bytes",
        "64MiB",
        "--listen",
        "127.0.0.1:0",
    )
    processes = {}

    def start(name, verb, *flags):
        argv = [sys.executable, "-m", "commands.main", verb, *flags]
        processes[name] = subprocess.Popen(argv, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)

    def ready(name):
        return said_when_ready(processes[name])

    try:
        start("p", "prefill-worker", "--worker-id", "p", *engine)
        start("d", "decode-worker", "--worker-id", "d", *engine, "--kv-listen", "tcp://127.0.0.1:0")
        workers = ("--prefill-workers", ready("p")["grpc"], "--decode-workers", ready("d")["grpc"])
        start("gateway", "gateway", *workers, "--grpc-port", "0", "--http-port", "0")
        said = ready("gateway")
        yield Apart(processes, said["grpc"], said["http"])
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(timeout=30)
            process.stdout.close()


def sockets_of(stack):
    """Every listening socket of the whole process tree, and what it speaks: it takes a connection."""
    roots = stack.children().values() if isinstance(stack, Apart) else [stack.process.pid]
    found = listeners(pid for root in roots for pid in process_tree(root))
    return {listener: listener.speaks() for listener in found}


def attack(listener, spoken, command):
    speak = {"grpc": attacks.call, "http": attacks.post, "zmq": attacks.send, "shm": attacks.pack}[spoken]
    with attacks.half_open(listener, HALF_OPEN):
        for data in attacks.noise():
            attacks.throw(listener, data)
        for data in attacks.pickles(command):
            attacks.throw(listener, data)
            speak(listener, data)
        for data in (b"", b"\xc1", b"\x91" * 3000, OVERSIZED):
            speak(listener, data)


REFUSALS = (
    r'crossdock_requests_total\{outcome="invalid_request"\} (\S+)',
    r'crossdock_kv_transfer_events_total\{event="malformed",pool="decode",worker="[^"]+"\} (\S+)',
)


def refused(stack):
    """What gateway and decode worker have counted as nothing that they understand."""
    shown = httpx.get(f"{stack.http}/metrics", headers=dict(stack.operator())).text
    return [float(found[1]) if (found := re.search(each, shown)) else 0.0 for each in REFUSALS]


async def stands(stack, canary):
    """The stack under attack at all its sockets, one after the other, and afterwards."""
    sockets, pids, before = sockets_of(stack), stack.children(), refused(stack)
    async with undisturbed(stack) as answers:
        for listener, spoken in sockets.items():
            await asyncio.to_thread(attack, listener, spoken, f"touch {canary}")
    assert not canary.exists()
    assert stack.children() == pids
    assert sockets_of(stack) == sockets
    stack.idle_ledgers()
    while not all(now > then for now, then in zip(refused(stack), before, strict=True)):
        await asyncio.sleep(0.05)  # workers report a little later
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        assert (await stream(channel, NEIGHBOUR)).token_ids == answers[0].token_ids


@pytest.mark.parametrize("number", range(12))
def test_the_pickles_of_the_attack_would_run_their_command(tmp_path, number):
    canary = tmp_path / "canary"
    data = attacks.pickles(f"touch {canary}")[number]
    path = tmp_path / "message"
    path.write_bytes(gzip.decompress(data) if data[:2] == GZIP else data)
    subprocess.run([sys.executable, "-m", "pickle", str(path)], check=True, capture_output=True, timeout=60)
    assert canary.exists()


async def test_serve_listens_where_it_says_and_in_a_folder_of_its_own(exact_stack):
    addresses = {listener.address for listener in sockets_of(exact_stack)}
    public = (exact_stack.grpc.split(":"), exact_stack.http.removeprefix("http://").split(":"))
    assert {each for each in addresses if isinstance(each, tuple)} == {
        (host, int(port)) for host, port in public
    }
    assert all(ipaddress.ip_address(host).is_loopback for host, _ in public)
    (nameless,) = {each for each in addresses if each[0] == "@"}
    assert re.fullmatch("@crossdock-decode-0-[0-9a-f]{16}", nameless)
    paths = [Path(each) for each in addresses if isinstance(each, str) and each != nameless]
    assert sorted(path.name for path in paths) == ["decode-0.grpc", "decode-0.kv", "prefill-0.grpc"]
    (folder,) = {path.parent for path in paths}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.getuid()


async def test_processes_started_one_by_one_listen_on_their_addresses_only(apart_stack):
    sockets = sockets_of(apart_stack)
    hosts = {each.address[0] for each in sockets if isinstance(each.address, tuple)}
    assert hosts == {"127.0.0.1"}
    names = {pid: name for name, pid in apart_stack.children().items()}
    assert Counter((names[each.pid], spoken) for each, spoken in sockets.items()) == Counter(
        [("gateway", "grpc"), ("gateway", "http"), ("p", "grpc"), ("d", "grpc"), ("d", "zmq"), ("d", "shm")]
    )


async def test_hostile_bytes_at_every_socket_of_serve_are_noticed_by_nobody(exact_stack, tmp_path):
    await stands(exact_stack, tmp_path / "canary")


async def test_hostile_bytes_at_every_port_of_separate_processes_are_noticed_by_nobody(apart_stack, tmp_path):
    await stands(apart_stack, tmp_path / "canary")


async def test_peers_of_workers_that_never_read_cost_little_and_disturb_nobody(apart_stack):
    """SEC-06, at every port of every worker, that for blocks included; and prompts are handed over meanwhile."""
    gateway, crossed = apart_stack.children()["gateway"], computed_by(apart_stack, "p")
    places = {each: spoken for each, spoken in sockets_of(apart_stack).items() if each.pid != gateway}
    allowed = {each.pid: resident_bytes(each.pid) for each in places}
    async with undisturbed(apart_stack):
        with ExitStack() as silent:
            for listener, spoken in places.items():
                silent.enter_context(attacks.unread(listener, spoken, SILENT))
                allowed[listener.pid] += SILENT * MEMORY_BYTES_EACH
            async with grpc.aio.insecure_channel(apart_stack.grpc) as channel:
                await stream(channel, spec(tokens_of(31, LONG), cache_salt=secrets.token_hex(8), **SHORT))
            assert all(resident_bytes(pid) < most for pid, most in allowed.items())
    assert computed_by(apart_stack, "p") >= crossed + LONG
    apart_stack.idle_ledgers()


def computed_by(stack, worker):
    return next(each.tokens.computed for each in stack.audit().ledgers if each.worker_id == worker)


async def test_a_lost_worker_shows_in_status_and_audit_and_the_others_end_cleanly(apart_stack):
    """The last of this file: it ends the processes that were started one by one."""
    target = ("--target", apart_stack.grpc, "--control-token", CONTROL_TOKEN)
    assert crossdock("status", *target).returncode == crossdock("audit", *target).returncode == 0
    apart_stack.processes["d"].kill()
    while all(worker.state == control_pb2.WORKER_STATE_READY for worker in apart_stack.status().workers):
        await asyncio.sleep(0.05)
    shown, books = crossdock("status", *target), crossdock("audit", *target)
    assert shown.returncode == 1 and "connecting" in shown.stdout
    assert books.returncode == 2 and "NOT checked: d; the others are balanced" in books.stdout
    for name in ("gateway", "p"):
        apart_stack.processes[name].send_signal(signal.SIGTERM)
        assert apart_stack.processes[name].wait(timeout=30) == 0
