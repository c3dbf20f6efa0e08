"""Keeps a set of child processes running: starts them together, restarts what dies, stops them in order.

Knows nothing of gateways or workers; `commands.serve` says what to run. Children are spawned, never forked, all in our
session, so that their niceness counts among them; each holds a pipe whose end is our death.
"""

import asyncio
import signal
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from service import readiness
from service.readiness import Field
from service.startup import EXIT_CODE, StartupError

_LINE_BYTES_MAX = 1 << 20
_BACKOFF_MAX_S = 10.0
_STARTS_MAX = 5
KILL_MARGIN_S = 10.0
"""For a child to clean up after its time is over, on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """argv: command line. stage: children of a higher stage are stopped first; all start together."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    stage: int = 0


class ChildFailure(StartupError):
    """A child refused to start, or died again and again before it was ever ready."""


class Supervisor:
    """say: takes one line for the operator. shutdown_timeout_s: in which all children should end; kill_margin_s: more,
    and one that has not is killed. backoff_s: before the first restart; doubled after each life in which the child was
    not ready. on_end: called with the name of a child that is gone, before it may live again."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        say: Callable[[str], None],
        shutdown_timeout_s: float,
        kill_margin_s: float = KILL_MARGIN_S,
        backoff_s: float = 0.2,
        on_end: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._children = [_Child(spec, say, backoff_s, on_end) for spec in specs]
        self._shutdown_timeout_s = shutdown_timeout_s
        self._kill_margin_s = kill_margin_s

    async def start(self) -> dict[str, Mapping[str, Field]]:
        """Starts every child; returns what each said of itself once all are ready. Raises ChildFailure when
        one cannot start."""
        for child in self._children:
            child.keep()
        await asyncio.gather(*(child.first_ready for child in self._children))
        return {child.spec.name: child.first_ready.result() for child in self._children}

    async def stop(self) -> None:
        """SIGTERM, stage by stage, then SIGKILL for what is left. Returns when every child is gone."""
        deadline = asyncio.get_running_loop().time() + self._shutdown_timeout_s
        for stage in sorted({child.spec.stage for child in self._children}, reverse=True):
            members = [child for child in self._children if child.spec.stage == stage]
            await asyncio.gather(*(child.end(deadline, self._kill_margin_s) for child in members))

    def kill(self) -> None:
        """SIGKILL for every child, at once."""
        for child in self._children:
            child.kill()


class _Child:
    """One child through all its lives."""

    def __init__(
        self,
        spec: ChildSpec,
        say: Callable[[str], None],
        backoff_s: float,
        on_end: Callable[[str], None],
    ) -> None:
        self.spec = spec
        self._backoff_s = backoff_s
        self._on_end = on_end
        self.first_ready: asyncio.Future[Mapping[str, Field]] = asyncio.get_running_loop().create_future()
        self._say = say
        self._ending = asyncio.Event()
        self._gave_up = False
        self._process: Process | None = None
        self._keeper: asyncio.Task[None] | None = None

    def keep(self) -> None:
        self._keeper = asyncio.create_task(self._live_again())

    async def end(self, deadline: float, margin_s: float) -> None:
        """deadline: on the loop's clock; a child that lives so much longer is killed."""
        self._ending.set()
        if self._keeper is None:
            return
        self._signal(signal.SIGTERM)
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        done, _ = await asyncio.wait({self._keeper}, timeout=left + margin_s)
        if not done:
            self._say(f"{self.spec.name}: does not end, killed")
            self.kill()
        await self._keeper

    def kill(self) -> None:
        self._ending.set()
        self._signal(signal.SIGKILL)

    async def _live_again(self) -> None:
        failures = 0
        while not self._ending.is_set():
            was_ready = await self._live_once()
            failures = 0 if was_ready else failures + 1
            if self._ending.is_set():
                return
            if not self.first_ready.done() and failures >= _STARTS_MAX:
                self._give_up(f"{self.spec.name}: died {failures} times before it was ready")
            if self._gave_up:
                return
            await self._pause(min(self._backoff_s * 2**failures, _BACKOFF_MAX_S))

    async def _live_once(self) -> bool:
        """One life, from spawn to exit. Returns whether the child became ready in it."""
        try:
            process = await self._spawn()
        except OSError as error:  # no such program, or no memory or descriptors left
            self._say(f"{self.spec.name}: cannot be started: {error.strerror}")
            return False
        self._process = process
        if self._ending.is_set():
            self._signal(signal.SIGTERM)
        assert process.stdout is not None and process.stderr is not None
        said, _ = await asyncio.gather(self._listen(process.stdout), self._pass_on(process.stderr))
        code = await process.wait()
        self._on_end(self.spec.name)
        if isinstance(said, readiness.Refused):
            self._refused(said.error, code)
        elif not self._ending.is_set():
            self._say(f"{self.spec.name}: {_described(code)}")
        return isinstance(said, readiness.Ready)

    async def _spawn(self) -> Process:
        return await create_subprocess_exec(
            *self.spec.argv,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=self.spec.environ,
            limit=_LINE_BYTES_MAX,
        )

    async def _listen(self, stream: asyncio.StreamReader) -> readiness.Ready | readiness.Refused | None:
        """Reads standard output to its end. Returns the last thing said about readiness."""
        last: readiness.Ready | readiness.Refused | None = None
        while line := await _line(stream):
            said = readiness.parse(line)
            if said is None:
                self._say(f"[{self.spec.name}] {line.rstrip()}")
                continue
            if isinstance(said, readiness.Loading):
                self._say(f"{self.spec.name}: {said.what}")
                continue
            last = said
            if isinstance(said, readiness.Ready):
                self._ready(said)
        return last

    def _ready(self, said: readiness.Ready) -> None:
        if not self.first_ready.done():
            self.first_ready.set_result(said.fields)
        else:
            self._say(f"{self.spec.name}: ready again")

    async def _pass_on(self, stream: asyncio.StreamReader) -> None:
        while line := await _line(stream):
            self._say(f"[{self.spec.name}] {line.rstrip()}")

    def _refused(self, error: str, code: int) -> None:
        if code == EXIT_CODE and not self.first_ready.done():
            self._give_up(f"{self.spec.name}: {error}")
        else:
            self._say(f"{self.spec.name}: {error}")

    def _give_up(self, reason: str) -> None:
        self._gave_up = True
        self.first_ready.set_exception(ChildFailure(reason))

    async def _pause(self, seconds: float) -> None:
        await asyncio.wait({ending := asyncio.create_task(self._ending.wait())}, timeout=seconds)
        ending.cancel()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)


async def _line(stream: asyncio.StreamReader) -> str:
    """The next line, "" at the end. A line over the limit is shown as such, and the stream goes on."""
    try:
        return (await stream.readline()).decode("utf-8", "replace")
    except ValueError:
        return f"(a line of more than {_LINE_BYTES_MAX} bytes)\n"


def _described(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}, restarting"
    return f"exited with {code}, restarting"
