"""Whether a guide can be followed: asked once, when a request is accepted, of a process that may be killed.

The frontend awaits `require`. Remembers what it was told, and keeps its process, which it starts with the first
question, for the next one. Compiles nothing itself; bounds how long is waited for an answer and how many wait, of each
tenant too: tenants take turns. Says nothing against a guide because a process was starved or killed.
"""

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter, OrderedDict
from pathlib import Path

import orjson

from gateway.guide_process import OWN_ENDS, TOO_COMPLEX
from service.errors import Exhausted, FieldViolation, InvalidRequest
from service.guide_compiler import NOT_INSTALLED, installed
from service.guides import Guide

CHECK_S = 30.0
"""For one answer, on a busy machine: several times what the process may use of the processor."""
CHECKS_MAX = 2
"""So many processes are asked until one answers or ends by its own limits."""
START_S = 30.0
WAITING_MAX = 32
WAITING_OF_TENANT_MAX = 8
KNOWN_MAX = 128
LINE_BYTES_MAX = 1 << 20
RETRY_AFTER_MS = 1000


async def refuse_guides(guide: Guide, tenant: str = "") -> None:
    """For a gateway that checks none. Raises InvalidRequest."""
    raise _refused(guide, NOT_INSTALLED)


class GuideCheck:
    """model: where the vocabulary is. check_s: seconds that one answer is waited for."""

    def __init__(self, model: Path, check_s: float = CHECK_S) -> None:
        self._model = model
        self._check_s = check_s
        self._turn = asyncio.Lock()
        self._process: Process | None = None
        self._turns_of: dict[str, asyncio.Lock] = {}
        self._asking: dict[Guide, asyncio.Task[str | None]] = {}
        self._asked_by: Counter[str] = Counter()
        self._known: OrderedDict[Guide, str | None] = OrderedDict()

    async def require(self, guide: Guide, tenant: str = "") -> None:
        """tenant: who asks. Raises InvalidRequest for a guide that cannot be followed, Exhausted where too many wait to
        be checked."""
        if not installed():
            raise _refused(guide, NOT_INSTALLED)
        if guide in self._known:
            self._known.move_to_end(guide)
            refusal = self._known[guide]
        else:
            refusal = await self._learn(guide, tenant)
        if refusal is not None:
            raise _refused(guide, refusal)

    async def close(self) -> None:
        """End the process."""
        for task in self._asking.values():
            task.cancel()
        await self._end()

    async def _learn(self, guide: Guide, tenant: str) -> str | None:
        """Several that ask the same share one answer; it is waited for even when all of them have gone."""
        if guide not in self._asking:
            if tenant and self._asked_by[tenant] >= WAITING_OF_TENANT_MAX:
                full = f"{WAITING_OF_TENANT_MAX} guides of this tenant are being checked"
                raise Exhausted(full, retry_after_ms=RETRY_AFTER_MS)
            if len(self._asking) >= WAITING_MAX:
                raise Exhausted(f"{WAITING_MAX} guides are being checked", retry_after_ms=RETRY_AFTER_MS)
            self._asked_by[tenant] += 1
            task = self._asking[guide] = asyncio.create_task(self._ask(guide, tenant))
            task.add_done_callback(lambda done: self._asked(guide, tenant, done))
        return await asyncio.shield(self._asking[guide])

    def _asked(self, guide: Guide, tenant: str, task: asyncio.Task[str | None]) -> None:
        del self._asking[guide]
        self._asked_by[tenant] -= 1
        if not self._asked_by[tenant]:
            del self._asked_by[tenant]
            self._turns_of.pop(tenant, None)
        if not task.cancelled():
            task.exception()  # whoever still waits hears of it

    async def _ask(self, guide: Guide, tenant: str) -> str | None:
        """One question of each tenant waits for the process at a time."""
        async with self._turns_of.setdefault(tenant, asyncio.Lock()), self._turn:
            refusal = await self._verdict(guide)
        self._known[guide] = refusal
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        return refusal

    async def _verdict(self, guide: Guide) -> str | None:
        """What a process says, or that it was too much for it. Raises Exhausted when none could tell."""
        question = orjson.dumps({"kind": guide.kind.name, "text": guide.text}) + b"\n"
        for _ in range(CHECKS_MAX):
            process = await self._started()
            try:
                async with asyncio.timeout(self._check_s):
                    return await _answer(process, question)
            except (TimeoutError, EOFError, OSError):
                await self._end()
            if process.returncode in OWN_ENDS:
                return TOO_COMPLEX
        raise _cannot_tell()

    async def _started(self) -> Process:
        if self._process is not None and self._process.returncode is not None:
            await self._end()
        if self._process is None:
            argv = (sys.executable, "-m", "gateway.guide_process", str(self._model))
            self._process = await asyncio.create_subprocess_exec(
                *argv, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=LINE_BYTES_MAX
            )
            try:
                async with asyncio.timeout(START_S):
                    await _answer(self._process)
            except (TimeoutError, EOFError, OSError):
                await self._end()
                raise _cannot_tell() from None
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _answer(process: Process, question: bytes = b"") -> str | None:
    """What it says next. Raises EOFError or OSError when it has ended."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(question)
    await process.stdin.drain()
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    answer = orjson.loads(line)
    return None if answer is None else str(answer)


def _cannot_tell() -> Exhausted:
    return Exhausted("guides cannot be checked now", retry_after_ms=RETRY_AFTER_MS)


def _refused(guide: Guide, why: str) -> InvalidRequest:
    return InvalidRequest(FieldViolation(field=f"guide.{guide.field()}", description=why))
