"""A worker's side of the Attach streams: the sessions of its gateways, and what the step thread has to tell them.

Lives on the event loop, except `tell` and `flush`, which the step thread calls. Serves what both roles have in
common (hello, cancel, audit, drain, load); what a role has of its own is its servicer's. Knows no engine.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol, TypeAlias

import grpc
import structlog

from crossdock.worker.v1 import worker_pb2 as pb
from service import status
from service.audit import LedgerFields, to_audit_report
from service.cache_feed import UNCHANGED, WAITING_MESSAGES_MAX, CacheChanges, CacheFeed
from service.errors import (
    Exhausted,
    FieldViolation,
    Incompatible,
    InternalFault,
    InvalidRequest,
    Unavailable,
)
from service.load import WorkerLoad
from service.orders import REQUEST_ID_BYTES_MAX, AttemptKey
from service.outbox import Outbox
from service.preparations import Action, Later, Preparations, TooManyPreparations
from service.reports import EndCause, EndedReport, Response, Told, encode, to_load_report
from service.token_books import TokenCounts

PROTOCOL_VERSION = 4
OUTBOX_MESSAGES_MAX = 4096
LOAD_INTERVAL_S = 0.05
LOAD_INTERVALS_MAX = 4
SESSIONS_MAX = 256
GATEWAY_ID_BYTES_MAX = 128

Request: TypeAlias = pb.PrefillServiceAttachRequest | pb.DecodeServiceAttachRequest


Submission: TypeAlias = Callable[[str, Any], Action | Later]


class Worker(Protocol):
    """What both roles can do, on the step thread."""

    def cancel(self, gateway: str, key: AttemptKey) -> None: ...
    def drop(self, gateway: str) -> None: ...
    def ledger(self) -> LedgerFields: ...
    def tokens(self) -> TokenCounts: ...
    def load(self, step: int) -> WorkerLoad: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The worker behind the rim. post: runs an action on the step thread between two steps; insist: as post, and never
    refuses. refusals: which of the errors that a submission can raise, `post` included, mean what to the gateway."""

    worker: Worker
    welcome: pb.Welcome
    post: Callable[[Action], None]
    insist: Callable[[Action], None]
    refusals: Mapping[type[Exception], EndCause]


class WorkerRim:
    """response: the message class of this role's stream. loop: where the rim lives. cache_messages_max: that may wait
    on a stream which is still told what is cached. draining, frozen, counts: what the process says of itself,
    to be reported; counts may be asked on any thread."""

    def __init__(
        self,
        response: Callable[..., Response],
        loop: asyncio.AbstractEventLoop,
        cache_messages_max: int = WAITING_MESSAGES_MAX,
    ) -> None:
        self._response = response
        self._cache: CacheFeed[Response] = CacheFeed(
            lambda events: response(cache=events), cache_messages_max
        )
        self._loop = loop
        self._sessions: dict[str, Outbox[Response]] = {}
        self._pending: dict[str, list[Told]] = defaultdict(list)
        self._preparations = Preparations()
        self._moved = asyncio.Event()
        self._posted = self._begun = self._known = 0
        self._drained = False
        self.load = WorkerLoad()
        self.draining = False
        self.frozen = False
        self.counts: Callable[[], Mapping[str, int]] = dict

    def tell(self, gateway: str, report: Told) -> None:
        """Note a report for a gateway. Step thread."""
        self._pending[gateway].append(report)

    def flush(self, load: WorkerLoad, changes: CacheChanges = UNCHANGED) -> None:
        """Send what was noted since the last flush; the tokens for a gateway in one message. changes: of what is
        cached, since the last flush. Step thread."""
        pending, self._pending = self._pending, defaultdict(list)
        with suppress(RuntimeError):  # the loop is closed: the process is ending, nobody listens
            self._loop.call_soon_threadsafe(self._deliver, pending, load, changes, self._begun)

    async def attach(
        self,
        requests: AsyncIterator[Any],
        context: grpc.aio.ServicerContext[Any, Any],
        host: Host,
        submission: Submission,
    ) -> None:
        """Run one Attach stream. submission: turns what only this role understands into an action, or into work that
        makes one."""
        gateway = await _greet(requests, context)
        # A stream that is cut during its first write, with the metadata still to be sent, would never end.
        await context.send_initial_metadata(())
        if self._drained:
            await status.abort(context, Unavailable("this worker is ending", reason="DRAINING"))
        if len(self._sessions) >= SESSIONS_MAX:
            full = f"at most {SESSIONS_MAX} gateways"
            await status.abort(context, Exhausted(full, reason="TOO_MANY_GATEWAYS"))
        outbox = self._open(gateway, host)
        reading = asyncio.create_task(self._read(gateway, requests, outbox, host, submission))
        writing = asyncio.create_task(_write(outbox, context))
        try:
            await outbox.wait_closed()
        finally:  # nothing is awaited in here: gRPC cancels more than once
            reading.cancel()
            writing.cancel()
            if self._sessions.get(gateway) is outbox:
                self._close(gateway, host)
        failure, _ = await asyncio.gather(reading, writing, return_exceptions=True)
        if isinstance(failure, Exception):
            await _cut(context, gateway, failure)

    async def report_load(self, interval_s: float = LOAD_INTERVAL_S) -> None:
        """Send the load to everybody when it has changed, and every LOAD_INTERVALS_MAX intervals anyway. Runs until
        cancelled."""
        sent, quiet = None, 0
        while True:
            await asyncio.sleep(interval_s)
            quiet += 1
            self._cache.catch_up()
            if (state := (self.load, self.draining, self.frozen)) != sent or quiet >= LOAD_INTERVALS_MAX:
                sent, quiet = state, 0
                for gateway in tuple(self._sessions):
                    self._send(gateway, self._load_message())

    async def drain(self) -> None:
        """Take nothing new, wait until what is here is finished, then end every session. Event loop."""
        self.draining = True
        while self._busy():
            self._moved.clear()
            await self._moved.wait()
        self._drained = True
        for outbox in self._sessions.values():
            outbox.finish()

    def _busy(self) -> bool:
        """Whether anything is to be finished here, be it on its way to the step thread and in no load yet."""
        here = self.load.running_sequences or self.load.waiting_sequences or self._preparations
        return bool(here) or self._known != self._posted

    def _open(self, gateway: str, host: Host) -> Outbox[Response]:
        """Begin a gateway's session. An older one of the same gateway was cut, and ends here at the latest: the gateway
        has given up all that it asked for on it."""
        if gateway in self._sessions:
            self._close(gateway, host)
        outbox: Outbox[Response] = Outbox(OUTBOX_MESSAGES_MAX)
        outbox.put(self._response(welcome=host.welcome))
        outbox.put(self._load_message())
        self._cache.open(gateway, outbox)
        self._sessions[gateway] = outbox
        return outbox

    def _close(self, gateway: str, host: Host) -> None:
        self._sessions.pop(gateway).close()
        self._cache.close(gateway)
        self._preparations.drop(gateway)
        host.insist(partial(host.worker.drop, gateway))

    async def _read(
        self,
        gateway: str,
        requests: AsyncIterator[Any],
        outbox: Outbox[Response],
        host: Host,
        submission: Submission,
    ) -> None:
        """Take what a gateway asks until its session ends, and end it with the stream."""
        try:
            async for request in requests:
                if outbox.closed:
                    return
                self._take(gateway, request, host, submission)
        finally:
            outbox.close()

    def _take(self, gateway: str, request: Request, host: Host, submission: Submission) -> None:
        match request.WhichOneof("message"):
            case "cancel":
                key = _key(request.cancel)
                self._in_turn(gateway, key, host, partial(host.worker.cancel, gateway, key))
            case "audit":
                host.post(partial(self._audit, gateway, request.audit.query_id, host.worker))
            case "drain":
                self.draining = True
            case "end_choice" if isinstance(request, pb.DecodeServiceAttachRequest):
                ending = submission(gateway, request)
                assert not isinstance(ending, Later), "a choice needs no preparation to end"
                self._in_turn(gateway, _key(request.end_choice), host, ending)
            case "submit" | "reserve":
                self._submit(gateway, request, host, submission)

    def _in_turn(self, gateway: str, key: AttemptKey, host: Host, action: Action) -> None:
        """Pass on what is about an attempt, after the attempt itself."""
        if not self._preparations.follow(gateway, key, partial(host.insist, action)):
            host.post(action)

    def _submit(self, gateway: str, request: Request, host: Host, submission: Submission) -> None:
        """Pass a submission on to the step thread, or refuse it here."""
        if isinstance(request, pb.PrefillServiceAttachRequest):
            key = _key(request.submit.sequence)
        else:
            key = _key(request.reserve.sequence)
        if self.draining:
            return self._refuse(gateway, key, EndCause.DRAINING, "this worker takes no new work")
        try:
            wanted = submission(gateway, request)
            if not isinstance(wanted, Later):
                return self._begin(host, wanted)
            return self._preparations.begin(gateway, key, wanted, partial(self._prepared, gateway, key, host))
        except TooManyPreparations as error:
            return self._refuse(gateway, key, EndCause.EXHAUSTED, str(error))
        except tuple(host.refusals) as error:
            return self._refuse(gateway, key, host.refusals[type(error)], str(error))

    def _prepared(self, gateway: str, key: AttemptKey, host: Host, made: Callable[[], Action]) -> None:
        """The work for a submission is done. made: yields the action, or raises what came of it."""
        self._moved.set()
        try:
            self._begin(host, made())
        except tuple(host.refusals) as error:
            self._refuse(gateway, key, host.refusals[type(error)], str(error))
        except Exception as mistake:
            structlog.get_logger().error("a submission could not be prepared", exc_info=mistake)
            self._refuse(gateway, key, EndCause.INTERNAL, "could not be prepared")

    def _begin(self, host: Host, action: Action) -> None:
        """Post a submission; it counts as something to finish until a load can tell of it."""
        host.post(partial(self._take_up, action))
        self._posted += 1

    def _take_up(self, action: Action) -> None:
        """Step thread."""
        self._begun += 1
        action()

    def _refuse(self, gateway: str, key: AttemptKey, cause: EndCause, detail: str) -> None:
        refusal = EndedReport(key=key, cause=cause, detail=detail)
        self._send(gateway, *encode([refusal], self.load.step, self._response))

    def _audit(self, gateway: str, query_id: int, worker: Worker) -> None:
        """Recount the ledger; the load of the same moment goes before it. Step thread."""
        load = self._load_report(worker.load(self.load.step))
        audit = to_audit_report(query_id, worker.ledger(), worker.tokens())
        messages = (self._response(load=load), self._response(audit=audit))
        with suppress(RuntimeError):  # as in flush
            self._loop.call_soon_threadsafe(self._send, gateway, *messages)

    def _deliver(
        self, pending: Mapping[str, list[Told]], load: WorkerLoad, changes: CacheChanges, begun: int
    ) -> None:
        """What is cached goes first, and how busy we are where that has changed: whoever hears of a result knows what
        it left behind. begun: submissions that the load knows of."""
        moved = load.queue() != self.load.queue()
        self.load, self._known = load, begun
        self._moved.set()
        self._cache.change(changes)
        self._cache.catch_up()
        for gateway, reports in pending.items():
            if moved:
                self._send(gateway, self._load_message())
            self._send(gateway, *encode(reports, load.step, self._response))

    def _send(self, gateway: str, *messages: Response) -> None:
        outbox = self._sessions.get(gateway)
        if outbox is not None:
            for message in messages:
                outbox.put(message)

    def _load_message(self) -> Response:
        return self._response(load=self._load_report(self.load))

    def _load_report(self, load: WorkerLoad) -> pb.LoadReport:
        return to_load_report(load, draining=self.draining, frozen=self.frozen, counts=self.counts())


async def _greet(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Read the first message; the name of the gateway's process: other starts of it have other ones."""
    first: Request | None = await anext(requests, None)
    if first is None or first.WhichOneof("message") != "hello":
        await status.abort(context, _wrong("message", "the first one must be hello"))
    hello = first.hello
    if hello.protocol_version != PROTOCOL_VERSION:
        await status.abort(context, Incompatible(f"hello.protocol_version: must be {PROTOCOL_VERSION}"))
    if not 1 <= len(hello.gateway_id.encode()) <= GATEWAY_ID_BYTES_MAX:
        await status.abort(context, _wrong("hello.gateway_id", f"1 to {GATEWAY_ID_BYTES_MAX} bytes"))
    return f"{hello.gateway_id}/{hello.gateway_epoch}"


async def _write(outbox: Outbox[Response], context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Send what a gateway is told; a peer that is gone ends its session."""
    try:
        async for message in outbox.drain():
            await context.write(message)
    finally:
        outbox.close()


async def _cut(context: grpc.aio.ServicerContext[Any, Any], gateway: str, failure: Exception) -> NoReturn:
    """End a stream that cannot be followed any more. All that the gateway had here is dropped already."""
    structlog.get_logger().error("a gateway's stream was cut", gateway=gateway, exc_info=failure)
    if not isinstance(failure, InvalidRequest):
        failure = InternalFault("what was sent cannot be taken")
    await status.abort(context, failure)


def _wrong(field: str, rule: str) -> InvalidRequest:
    """Of a message that no gateway of ours sends."""
    return InvalidRequest(FieldViolation(field=field, description=rule))


def _key(message: pb.Cancel | pb.SequenceSpec | pb.EndChoice) -> AttemptKey:
    """Raises InvalidRequest for a name that no answer should repeat."""
    if len(message.request_id.encode()) > REQUEST_ID_BYTES_MAX:
        raise _wrong("request_id", f"at most {REQUEST_ID_BYTES_MAX} bytes")
    return AttemptKey(request_id=message.request_id, attempt=message.attempt)
