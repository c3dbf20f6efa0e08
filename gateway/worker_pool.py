"""The gateway's record of the workers of one role: who is there, how busy, and which attempts they serve.

Lives on the event loop. Passes reports to the mailboxes of the attempts they are about, and tells those mailboxes
when a worker is lost. Picks nobody: that is the router's.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count

import structlog

from crossdock.worker.v1 import worker_pb2 as pb
from gateway.attach import Attachment, Dialect
from gateway.mailbox import Mailbox, WorkerLost
from gateway.prefix_map import PrefixMap
from gateway.request_prefix import RequestPrefix
from gateway.router import WorkerView
from service.cache_events import from_wire
from service.load import WorkerLoad
from service.orders import AttemptKey
from service.pulse import Stillness
from service.reports import EndCause, EndedReport, Report, Response, decode, from_load_report


class WorkerState(Enum):
    CONNECTING = auto()
    READY = auto()
    DRAINING = auto()
    REFUSED = auto()
    """It answers, but cannot serve here; the reason names in what it differs."""


@dataclass(slots=True, kw_only=True)
class Booking:
    """An attempt that this worker serves. tokens: of its prompt that it still has to compute, as far as known."""

    mailbox: Mailbox
    tokens: int


NO_PREFIX = RequestPrefix()
LOOK_INTERVAL_S = 0.1
SILENT_LOOKS_MAX = 7
"""A worker that lives says something every 200 ms. One that is silent is lost when its stream breaks; until then it is
frozen."""


class WorkerRecord:
    """The worker at one address, across restarts: each start is another epoch. The listener of its attachment."""

    def __init__(
        self,
        address: str,
        dialect: Dialect,
        hello: pb.Hello,
        pool: "WorkerPool",
    ) -> None:
        self.address = address
        self.state = WorkerState.CONNECTING
        self.welcome: pb.Welcome | None = None
        self.load = WorkerLoad()
        self.counts: Mapping[str, int] = {}
        self.prefixes = PrefixMap()
        self.reason = "not connected yet"
        self.picked = 0
        self.frozen = False
        self.request = dialect.request
        self.attachment = Attachment(address, dialect, hello, self)
        self._pool = pool
        self._bookings: dict[AttemptKey, Booking] = {}
        self._audits: dict[int, asyncio.Future[pb.AuditReport | None]] = {}
        self._query_ids = count(1)
        self._spoke = False
        self._silence = Stillness(SILENT_LOOKS_MAX)

    @property
    def worker_id(self) -> str:
        """As it calls itself, for people: nothing keeps two workers from taking the same name."""
        return self.welcome.worker_id if self.welcome is not None else self.address

    def book(self, key: AttemptKey, mailbox: Mailbox, *, tokens: int) -> None:
        """From now on reports about this attempt go to the mailbox."""
        self._bookings[key] = Booking(mailbox=mailbox, tokens=tokens)

    def computed(self, key: AttemptKey) -> None:
        """The attempt's prompt is computed: it weighs no more in this worker's queue."""
        if key in self._bookings:
            self._bookings[key].tokens = 0

    def release(self, key: AttemptKey) -> None:
        self._bookings.pop(key, None)

    def cached_tokens(self, prefix: RequestPrefix) -> int:
        """Of a request, as far as this worker has told."""
        return prefix.cached_tokens(self.prefixes, self.welcome.block_size) if self.welcome else 0

    def view(self, prefix: RequestPrefix = NO_PREFIX) -> WorkerView:
        """Its own reports and our bookings, whichever says more: a report is always a little old. prefix: of the
        request that looks for a worker."""
        welcome = self.welcome or pb.Welcome()
        return WorkerView(
            address=self.address,
            ready=self.state is WorkerState.READY,
            fingerprint=welcome.layout_fingerprint,
            tokens_max=tokens_max(welcome),
            queued_tokens=max(self.load.waiting_tokens, sum(each.tokens for each in self._bookings.values())),
            sequences=max(self.load.running_sequences + self.load.waiting_sequences, len(self._bookings)),
            seats=welcome.max_num_seqs,
            free_blocks=self.load.free_blocks,
            total_blocks=welcome.total_blocks,
            picked=self.picked,
            cached_tokens=self.cached_tokens(prefix),
            block_size=max(1, welcome.block_size),
            frozen=self.frozen,
            step_ms=self.load.step_ms,
            prompt_token_ms=self.load.prompt_token_ms,
            hand_off_token_ms=self.load.hand_off_token_ms,
        )

    def look(self) -> None:
        """Whether it has been silent for too long. To be called every LOOK_INTERVAL_S."""
        silent = self._silence.look(moved=self._spoke)
        self._spoke = False
        if silent and self.state is not WorkerState.CONNECTING:
            self._freezes(True)

    def drain(self) -> None:
        """Give it nothing new. It finishes what it has, and says so to every gateway."""
        self.attachment.send(self.request(drain=pb.Drain()))
        self._drains()

    async def audit(self, timeout_s: float) -> pb.AuditReport | None:
        """Ask for a recount of its ledger; None when nobody is there, or there is no answer in time."""
        if self.state is WorkerState.CONNECTING:
            return None
        query_id = next(self._query_ids)
        answer: asyncio.Future[pb.AuditReport | None] = asyncio.get_running_loop().create_future()
        self._audits[query_id] = answer
        self.attachment.send(self.request(audit=pb.AuditQuery(query_id=query_id)))
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            return None
        finally:
            del self._audits[query_id]

    def on_message(self, message: Response) -> None:
        """Raises BadReport."""
        self._spoke = True
        match message.WhichOneof("message"):
            case "welcome":
                self._welcomed(message.welcome)
            case "load":
                self._loaded(message.load)
            case "cache":
                self.prefixes.take(from_wire(message.cache))
            case "audit":
                answer = self._audits.get(message.audit.query_id)
                if answer is not None and not answer.done():
                    answer.set_result(message.audit)
            case _:
                for report in decode(message):
                    self._pass_on(report)

    def on_broken(self, detail: str) -> None:
        """The stream is gone, and with it all that this worker knew of our attempts."""
        for booking in self._bookings.values():
            booking.mailbox.put(self.address, WorkerLost())
        self._bookings.clear()
        for answer in self._audits.values():
            if not answer.done():
                answer.set_result(None)
        self.load = WorkerLoad()
        self.prefixes = PrefixMap()
        self.state, self.reason, self.frozen = WorkerState.CONNECTING, detail, False
        self._pool.changed()

    def _pass_on(self, report: Report) -> None:
        if isinstance(report, EndedReport) and report.cause is EndCause.DRAINING:
            self._drains()  # before its load report says so, the next attempt would come here as well
        booking = self._bookings.get(report.key)
        if booking is not None:
            booking.mailbox.put(self.address, report)

    def _welcomed(self, welcome: pb.Welcome) -> None:
        refusal = self._pool.refusal(welcome)
        self.welcome = welcome
        self.prefixes = PrefixMap(welcome.total_blocks)
        self.state = WorkerState.REFUSED if refusal else WorkerState.READY
        self.reason = refusal or ""
        if refusal:
            structlog.get_logger().error("worker refused", worker=self.worker_id, why=refusal)
        self._pool.changed()

    def _loaded(self, report: pb.LoadReport) -> None:
        self.load = from_load_report(report)
        self.counts = dict(report.counts)
        self._freezes(report.frozen)
        if report.draining:
            self._drains()

    def _freezes(self, frozen: bool) -> None:
        if frozen != self.frozen:
            self.frozen = frozen
            structlog.get_logger().warning(
                "worker frozen" if frozen else "worker moves", worker=self.worker_id
            )
            self._pool.changed()

    def _drains(self) -> None:
        if self.state is WorkerState.READY:
            self.state, self.reason = WorkerState.DRAINING, "draining"
            self._pool.changed()


def tokens_max(welcome: pb.Welcome) -> int:
    """Of the longest sequence that a worker can hold, prompt and answer together."""
    return min(welcome.max_model_len, welcome.total_blocks * welcome.block_size)


class WorkerPool:
    """addresses: an address given twice is one worker. refusal: why a worker that introduced itself cannot serve here,
    or None. on_change: called when a worker came, went or changed its state."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        dialect: Dialect,
        hello: pb.Hello,
        *,
        refusal: Callable[[pb.Welcome], str | None],
        on_change: Callable[[], None],
    ) -> None:
        self.refusal = refusal
        self.changed = on_change
        self._workers = [WorkerRecord(address, dialect, hello, self) for address in dict.fromkeys(addresses)]
        self._picks = count(1)

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(self._workers)

    def views(self, prefix: RequestPrefix = NO_PREFIX) -> list[WorkerView]:
        return [worker.view(prefix) for worker in self._workers]

    def take(self, address: str) -> WorkerRecord:
        """The worker that the router picked, noted as picked last."""
        worker = next(worker for worker in self._workers if worker.address == address)
        worker.picked = next(self._picks)
        return worker

    def serves(self) -> bool:
        """Whether any of them is ready and moves."""
        return any(worker.state is WorkerState.READY and not worker.frozen for worker in self._workers)

    def all_ready(self) -> bool:
        return all(worker.state is WorkerState.READY for worker in self._workers)

    async def watch(self) -> None:
        """Notice workers that fall silent, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            for worker in self._workers:
                worker.look()

    async def run(self) -> None:
        """Keep streams to all workers open until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers:
                tasks.create_task(worker.attachment.run())
