"""Children start together, come back when they die, and never outlive their parent."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from commands.supervisor import ChildFailure, ChildSpec, Supervisor


class Lines(asyncio.Queue):
    """What the supervisor says."""

    def say(self, line: str) -> None:
        self.put_nowait(line)

    async def first(self, pattern: str) -> str:
        async with asyncio.timeout(20):
            while True:
                line = await self.get()
                if re.search(pattern, line):
                    return line


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
async def supervise(lines):
    """Makes supervisors, and stops them after the test."""
    made = []

    def make(**argv: tuple[str, ...]) -> Supervisor:
        environ = dict(os.environ)
        specs = [ChildSpec(name=name, argv=line, environ=environ) for name, line in argv.items()]
        made.append(Supervisor(specs, say=lines.say, shutdown_timeout_s=10, backoff_s=0.001))
        return made[-1]

    yield make
    for supervisor in made:
        await supervisor.stop()


async def test_start_returns_what_each_child_said(supervise, programs):
    said = await supervise(
        a=programs.ready_until_sigterm(grpc="x"), b=programs.ready_until_sigterm(blocks=3)
    ).start()
    assert said["a"]["grpc"] == "x"
    assert said["b"]["blocks"] == 3


async def test_logs_of_a_child_are_passed_on_with_its_name(supervise, programs, lines):
    chatty = programs.argv(
        "print('to stdout'); print('to stderr', file=sys.stderr)\n"
        "readiness.announce({})\nsignal.sigwait({signal.SIGTERM})\n"
    )
    await supervise(worker=chatty).start()
    said = {await lines.first(r"^\[worker\]"), await lines.first(r"^\[worker\]")}
    assert said == {"[worker] to stdout", "[worker] to stderr"}


async def test_what_a_child_loads_is_shown_with_its_name(supervise, programs, lines):
    slow = programs.argv(
        "readiness.loading('layer 7 of 30')\nreadiness.announce({})\nsignal.sigwait({signal.SIGTERM})\n"
    )
    assert set(await supervise(worker=slow).start()) == {"worker"}
    assert await lines.first("layer") == "worker: layer 7 of 30"


async def test_a_child_that_dies_is_reported_and_comes_back(supervise, programs, lines):
    said = await supervise(worker=programs.ready_until_sigterm()).start()
    os.kill(said["worker"]["pid"], signal.SIGKILL)
    assert "SIGKILL" in await lines.first(r"^worker: ")
    await lines.first(r"^worker: ready again")


async def test_every_end_of_a_child_is_told_before_its_next_life(programs, lines):
    ended = []
    spec = ChildSpec(name="worker", argv=programs.ready_until_sigterm(), environ=dict(os.environ))
    supervisor = Supervisor(
        [spec], say=lines.say, shutdown_timeout_s=10, backoff_s=0.001, on_end=ended.append
    )
    said = await supervisor.start()
    assert ended == []
    os.kill(said["worker"]["pid"], signal.SIGKILL)
    await lines.first(r"^worker: ready again")
    assert ended == ["worker"]
    await supervisor.stop()
    assert ended == ["worker", "worker"]


async def test_a_child_that_cannot_start_ends_the_whole_with_its_one_line(supervise, programs, lines):
    refusing = programs.argv("readiness.refuse('--model: x: no such file'); sys.exit(2)")
    with pytest.raises(ChildFailure, match=r"^bad: --model: x: no such file$"):
        await supervise(good=programs.ready_until_sigterm(), bad=refusing).start()
    assert lines.empty()


async def test_a_child_that_crashes_before_it_is_ready_is_tried_again(supervise, programs, tmp_path, lines):
    marker = tmp_path / "been-here"
    second_time = programs.argv(
        f"if not os.path.exists({str(marker)!r}):\n"
        f"    open({str(marker)!r}, 'w').close(); os.kill(os.getpid(), signal.SIGSEGV)\n"
        "readiness.announce({})\nsignal.sigwait({signal.SIGTERM})\n"
    )
    await supervise(worker=second_time).start()
    assert "SIGSEGV" in await lines.first(r"^worker: ")


@pytest.mark.parametrize("program", ["false", "/no/such/program"])
async def test_a_child_that_never_lives_is_given_up(supervise, program):
    with pytest.raises(ChildFailure, match="died 5 times"):
        await supervise(worker=(program,)).start()


async def test_stopping_ends_the_front_before_the_workers(programs, lines, tmp_path):
    log = tmp_path / "order"
    slow = programs.argv(
        "readiness.announce({})\nsignal.sigwait({signal.SIGTERM})\n"
        f"os.write(os.open({str(log)!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT), sys.argv[1].encode())\n"
    )
    specs = [
        ChildSpec(name=name, argv=(*slow, name), environ=dict(os.environ), stage=stage)
        for name, stage in (("worker", 0), ("front", 1))
    ]
    supervisor = Supervisor(specs, say=lines.say, shutdown_timeout_s=10)
    await supervisor.start()
    await supervisor.stop()
    assert log.read_text() == "frontworker"


async def test_a_child_that_does_not_end_is_killed(programs, lines, wait_for_exit):
    deaf = programs.argv("readiness.announce({'pid': os.getpid()})\nwhile True: signal.pause()\n")
    spec = ChildSpec(name="deaf", argv=deaf, environ=dict(os.environ))
    supervisor = Supervisor([spec], say=lines.say, shutdown_timeout_s=0, kill_margin_s=0)
    pid = (await supervisor.start())["deaf"]["pid"]
    await supervisor.stop()
    wait_for_exit(pid, 0)
    assert "killed" in await lines.first("^deaf")


SERVE = """
import os, sys, json
from pathlib import Path
from commands import serve
from commands.supervisor import ChildSpec
from service import config, server
argvs = json.loads(sys.argv[1])
specs = [ChildSpec(name=name, argv=tuple(argv), environ=dict(os.environ)) for name, argv in argvs.items()]
options = config.load(config.ServeOptions, ["--shutdown-timeout=10"], {})
sys.exit(server.run(serve.supervise(specs, options, 0.0, lambda name: None)))
"""


@pytest.fixture
def serving(programs):
    """`serve` over fake children: its process, and the children's process ids."""
    argvs = {name: programs.ready_until_sigterm(grpc="127.0.0.1:1") for name in ("worker", "gateway")}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, json.dumps(argvs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def children_of(process: subprocess.Popen) -> list[int]:
    with open(f"/proc/{process.pid}/task/{process.pid}/children", encoding="ascii") as file:
        return [int(pid) for pid in file.read().split()]


def test_serve_says_once_that_it_is_ready_and_where(serving):
    line = serving.stdout.readline()
    assert re.fullmatch(r"ready pid=\d+ grpc=127\.0\.0\.1:1 prefill=1 decode=1 seconds=\d+\.\d\n", line)
    serving.send_signal(signal.SIGTERM)
    assert serving.communicate(timeout=20)[0] == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_ends_cleanly_on_a_signal(serving, wait_for_exit, number):
    serving.stdout.readline()
    pids = children_of(serving)
    assert len(pids) == 2
    serving.send_signal(number)
    assert serving.wait(timeout=20) == 0
    for pid in pids:
        wait_for_exit(pid, 0)
    assert "Traceback" not in serving.stderr.read()


def test_children_are_of_the_session_of_serve_and_no_ctrl_c_of_its_terminal_reaches_them(serving):
    serving.stdout.readline()
    pids = children_of(serving)
    assert {os.getsid(pid) for pid in pids} == {os.getsid(serving.pid)}
    assert [os.getpgid(pid) for pid in pids] == pids


def test_no_child_outlives_a_serve_that_is_killed(serving, wait_for_exit):
    serving.stdout.readline()
    pids = children_of(serving)
    assert len(pids) == 2
    serving.kill()
    for pid in pids:
        wait_for_exit(pid, 2)


def test_the_end_of_the_pipe_alone_ends_a_child(programs, wait_for_exit):
    child = subprocess.Popen(programs.ready_until_sigterm(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    child.stdin.close()
    assert child.wait(timeout=10) == -signal.SIGKILL
    child.stdout.close()
