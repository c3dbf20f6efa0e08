"""The whole way of a request: admit, journal, route, follow an attempt, go on with another one if it is lost.

The choices of a request share attempts as long as they stand at the same tokens: their prompt is computed and handed
over once. After a loss each goes on by itself. Owns the order of things; every step of it is somebody else's. Shows a
token only after it is in the journal, and waits for no client to read: what a request has of the workers it gives back
when its last token has come.
"""

import asyncio
import hmac
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable
from dataclasses import replace
from itertools import count
from typing import Any

import structlog

from engine.cache.prefix_chain import prefix_scope
from gateway.admission import Admission, Place
from gateway.arrivals import Arrivals
from gateway.attempt import (
    TOO_LATE,
    Attempt,
    AttemptLost,
    AttemptPreempted,
    HandOffLost,
    Target,
    WorkerFailed,
    WorkerFull,
)
from gateway.breakers import Breakers
from gateway.company import Company, Parted
from gateway.journal import Journal
from gateway.lifecycle import Phase
from gateway.mailbox import DeadlinePassed, Mailbox, Turnstile
from gateway.prompt_scores import PromptScores
from gateway.request import Request, TokenBatch
from gateway.router import NoRoute, Route, holds, pick
from gateway.worker_pool import WorkerPool, WorkerRecord
from kvtransfer.identity import Identity
from kvtransfer.ticket import Ticket, mint
from service.errors import (
    AttemptsLost,
    DeadlineExpired,
    Ending,
    Exhausted,
    FieldViolation,
    InvalidRequest,
    Unavailable,
)
from service.orders import SequenceOrder

ATTEMPTS_MAX = 4
"""The first one and three more; those that a worker gave up for want of blocks are not counted."""
LEASE_MS = 3_000
ROUTE_WAIT_S = 10.0


class Orchestrator:
    """Serves requests as streams of token batches.

    gateway_epoch: of this process; makes wire ids unique. randomness(n): n unpredictable bytes. clock: seconds,
    monotonic, the one that Request.deadline is on.
    """

    def __init__(
        self,
        *,
        prefills: WorkerPool,
        decodes: WorkerPool,
        admission: Admission,
        ticket_key: bytes,
        gateway_epoch: int,
        randomness: Callable[[int], bytes],
        clock: Callable[[], float],
        lease_ms: int = LEASE_MS,
    ) -> None:
        self._prefills = prefills
        self._decodes = decodes
        self._admission = admission
        self._ticket_key = ticket_key
        self._scope_key = hmac.digest(ticket_key, b"crossdock cache scope", "sha256")
        self._wire_prefix = f"{gateway_epoch:x}-"
        self._randomness = randomness
        self._clock = clock
        self._lease_ms = lease_ms
        self._breakers = Breakers()
        self._numbers = count(1)
        self._turnstile = Turnstile()
        self._changed = asyncio.Event()
        self._open: set[Arrivals] = set()
        self._ended = False

    def workers_changed(self) -> None:
        """A worker came, went or changed its state: those who wait for a route look again."""
        self._changed.set()
        self._changed = asyncio.Event()
        self._admission.look()

    def asked_for(self, wire_id: str) -> bool:
        """Whether a request of this name is this gateway's, and no other's."""
        return wire_id.startswith(self._wire_prefix)

    def next_change(self) -> asyncio.Event:
        """Set by the next `workers_changed`. Take it before looking at the workers, so that no change is missed."""
        return self._changed

    async def run(
        self, request: Request, unread: Collection[int] = frozenset()
    ) -> AsyncGenerator[TokenBatch, None]:
        """Tokens of each choice in order, each position once; its last batch has an end. Raises ServiceError.

        unread: choices that the reader wants no more of; looked at after each batch. Closing the generator stops the
        work on both workers.
        """
        if self._ended:
            raise Ending
        arrivals = Arrivals(unread)
        work = asyncio.ensure_future(self._enter(request, arrivals))
        work.add_done_callback(arrivals.end)
        self._open.add(arrivals)
        try:
            while batches := await arrivals.take():
                for batch in batches:
                    yield batch
                    arrivals.look()
        finally:
            self._open.discard(arrivals)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    def end(self) -> None:
        """For good: every answer ends after what has come of it, and none begins."""
        self._ended = True
        for arrivals in self._open:
            arrivals.fail(Ending())

    async def _enter(self, request: Request, arrivals: Arrivals) -> None:
        async with self._admission.enter(request) as place:
            await self._serve(request, place, arrivals)

    async def _serve(self, request: Request, place: Place, arrivals: Arrivals) -> None:
        """Whatever the workers have to do with it."""
        wire_id = f"{self._wire_prefix}{next(self._numbers)}"
        journals = _journals(request, wire_id, self._cache_scope(request))
        together = Company(
            journals=journals,
            wire_id=wire_id,
            accepted=self._clock(),
            tried=[],
            full=set(),
            place=place,
            arrivals=arrivals,
        )
        try:
            await self._persist(together, attempts=0)
        except Parted as parted:
            left = [each for each in journals if not each.ended and arrivals.wanted(each.choice)]
            await _all(self._persist(together.alone(journal), parted.attempts) for journal in left)

    async def _persist(self, company: Company, attempts: int) -> None:
        """Attempt after attempt. attempts: how many there have been. Raises Parted when these choices can no longer
        share one."""
        for number in count(attempts + 1):
            try:
                await self._follow(company, number)
                return
            except AttemptLost as lost:
                if isinstance(lost, AttemptPreempted) and company.preempted(lost.times):
                    company.tried.pop()  # nothing is wrong with it, and much of the answer is cached there
                    continue
                name = company.journals[0].request.id
                structlog.get_logger().warning("attempt lost", request_id=name, attempt=number, why=str(lost))
                company.note_full(lost.address if isinstance(lost, WorkerFull) else None)
                if company.full and not company.begun():
                    company.tried.pop()  # nothing is lost, and each worker says so once
                elif len(company.tried) == ATTEMPTS_MAX:
                    raise (
                        _exhausted(company) if company.full else AttemptsLost("every attempt was lost")
                    ) from lost
                if company.parted():
                    raise Parted(number) from lost

    async def _follow(self, company: Company, number: int) -> None:
        """One attempt, from where the journals stand, whose route is the last of `tried` then. Raises AttemptLost when
        another one should go on."""
        request = company.journals[0].request
        order = company.order(number)
        route = await self._route(company, order)
        company.tried.append(route)
        now = self._clock()
        order = replace(order, age_ms=company.age_ms(now))
        attempt = self._attempt(company, order, route)
        alarm = self._set_alarm(request, attempt.mailbox)
        try:
            attempt.begin()
            with company.arrivals.followed(attempt.mailbox):
                while attempt.live():
                    company.take(attempt.hear(await attempt.mailbox.take()), attempt.computed)
            if attempt.failure is not None:
                raise attempt.failure
        finally:
            if alarm is not None:
                alarm.cancel()
            attempt.close()
            self._learn(route, attempt)

    def _require_room(self, order: SequenceOrder) -> None:
        """Several branches may be more than any worker that is here can hold at once. Then choices go by themselves,
        and a search is refused."""
        views = [view for view in self._decodes.views() if view.ready]
        if (
            order.branches() == 1
            or not order.goes_on()
            or not views
            or any(holds(each, order) for each in views)
        ):
            return
        if order.beam is None:
            raise Parted(order.key.attempt - 1)
        needed = max(order.blocks(each.block_size) for each in views)
        rule = (
            f"{order.branches()} sequences in {needed} blocks at most; the workers hold "
            f"{max(each.seats for each in views)} in {max(each.total_blocks for each in views)}"
        )
        raise InvalidRequest(FieldViolation(field="sampling.beam_width", description=rule))

    async def _route(self, company: Company, order: SequenceOrder) -> Route:
        """The best workers. Where those that could serve are away, or stand still, any attempt waits a little for one;
        where there are some and none is large enough, a first one is refused at once, and a later one waits: what it
        lost may be coming back. Where all are full, an answer that has begun waits for room."""
        request = company.journals[0].request
        began = self._clock()
        while True:
            changed = self.next_change()
            prefix = company.journals[0].prefix
            route = pick(
                self._prefills.views(prefix),
                self._decodes.views(prefix),
                order,
                tried=company.tried,
                broken=self._breakers.avoided(self._clock()),
                full=company.full,
            )
            if isinstance(route, NoRoute):
                self._require_room(order)
                patient = route.away or order.key.attempt > 1
                give_up = began + (ROUTE_WAIT_S if patient else 0)
                if not await self._change(changed, give_up, request):
                    reason = f"NO_{route.pool.upper()}_WORKER"
                    raise Unavailable(f"no {route.pool} worker can serve this now", reason=reason)
            elif not route.meets(company.full):
                return route
            elif not company.begun():
                raise _exhausted(company)
            else:
                await self._change(changed, self._clock() + company.place.pause_s(), request)
                company.full.clear()

    async def _change(self, changed: asyncio.Event, until: float, request: Request) -> bool:
        """Wait for the workers to change; False when there was no change until then. Raises DeadlineExpired."""
        end = until if request.deadline is None else min(until, request.deadline)
        try:
            async with asyncio.timeout(max(0.0, end - self._clock())):
                await changed.wait()
        except TimeoutError:
            if end < until and not changed.is_set():
                raise DeadlineExpired(TOO_LATE) from None
        return changed.is_set()

    def _cache_scope(self, request: Request) -> bytes:
        return prefix_scope(
            self._scope_key, model=request.model, tenant=request.tenant, salt=request.cache_salt
        )

    def _attempt(self, company: Company, order: SequenceOrder, route: Route) -> Attempt:
        self._breakers.begin(route, self._clock())
        prefill = self._prefills.take(route.prefill) if route.prefill is not None else None
        decode = self._decodes.take(route.decode) if route.decode is not None else None
        target = None
        if decode is not None:
            ticket = self._mint(order, prefill, decode) if prefill is not None else None
            target = Target(worker=decode, ticket=ticket, ticket_key=self._ticket_key)
        computer = prefill or decode
        assert computer is not None, "a route has a worker"
        return Attempt(
            journals=company.journals,
            order=order,
            prefill=prefill,
            target=target,
            mailbox=Mailbox(self._turnstile),
            cached_tokens=computer.cached_tokens(company.journals[0].prefix),
        )

    def _learn(self, route: Route, attempt: Attempt) -> None:
        """What the end of an attempt says of its workers. Who refused or gave up has not failed."""
        if attempt.failure is None and (attempt.handed_over or attempt.phase is Phase.DONE):
            self._breakers.worked(route.parts())
        elif attempt.handed_over and route.prefill is not None:
            self._breakers.worked([route])
        match attempt.failure:
            case HandOffLost():
                self._breakers.failed(route, self._clock())
            case WorkerFailed(address=address):
                self._breakers.failed(route.worker(address), self._clock())

    def _mint(self, order: SequenceOrder, prefill: WorkerRecord, decode: WorkerRecord) -> Ticket:
        source, target = prefill.welcome, decode.welcome
        assert source is not None and target is not None, "a worker that can be picked has introduced itself"
        num_tokens = len(order.token_ids)
        return mint(
            self._randomness,
            request_id=order.key.request_id,
            attempt=order.key.attempt,
            source=Identity(worker_id=source.worker_id, epoch=source.epoch),
            target=Identity(worker_id=target.worker_id, epoch=target.epoch),
            layout_fingerprint=target.layout_fingerprint,
            num_tokens=num_tokens,
            first_block=0,
            num_blocks=-(-num_tokens // target.block_size),
            lease_ms=self._lease_ms,
        )

    def _set_alarm(self, request: Request, mailbox: Mailbox) -> asyncio.TimerHandle | None:
        if request.deadline is None:
            return None
        left = max(0.0, request.deadline - self._clock())
        return asyncio.get_running_loop().call_later(left, mailbox.put, "", DeadlinePassed())


def _journals(request: Request, wire_id: str, scope: bytes) -> tuple[Journal, ...]:
    """One for each choice, with a name that it can go on under by itself."""
    if request.best_of == 1:
        return (Journal(request, wire_id, scope),)
    scores = PromptScores(request)
    return tuple(
        Journal(request, f"{wire_id}.{choice}", scope, choice, scores) for choice in range(request.best_of)
    )


def _exhausted(company: Company) -> Exhausted:
    return Exhausted("the workers' queues are full", retry_after_ms=round(company.place.pause_s() * 1000))


async def _all(ways: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of them at once; when one fails, the others are stopped."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
