"""The whole way of a request: admit, journal, route, follow an attempt, go on with another one if it is lost.

Owns the order of things; every step of it is somebody else's. Shows a token only after it is in the journal.
"""

import asyncio
import hmac
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from itertools import count

import structlog

from engine.cache.prefix_chain import prefix_scope
from gateway.admission import Admission
from gateway.attempt import TOO_LATE, Attempt, AttemptLost, HandOffLost, Target
from gateway.broken_pairs import BrokenPairs
from gateway.journal import Journal
from gateway.mailbox import DeadlinePassed, Mailbox
from gateway.request import Request, TokenBatch
from gateway.router import NoRoute, Route, pick
from gateway.worker_pool import WorkerPool, WorkerRecord
from kvtransfer.identity import Identity
from kvtransfer.ticket import Ticket, mint
from service.errors import DeadlineExpired, Unavailable
from service.orders import SequenceOrder

ATTEMPTS_MAX = 4
"""The first one and three more."""
LEASE_MS = 3_000
REROUTE_WAIT_S = 10.0


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
        self._broken = BrokenPairs()
        self._numbers = count(1)
        self._changed = asyncio.Event()

    def workers_changed(self) -> None:
        """A worker came, went or changed its state: those who wait for a route look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def asked_for(self, wire_id: str) -> bool:
        """Whether a request of this name is this gateway's, and no other's."""
        return wire_id.startswith(self._wire_prefix)

    def next_change(self) -> asyncio.Event:
        """Set by the next `workers_changed`. Take it before looking at the workers, so that no change is missed."""
        return self._changed

    async def run(self, request: Request) -> AsyncGenerator[TokenBatch, None]:
        """Tokens in order, each position once; the last batch has an end. Raises ServiceError.

        Closing the generator stops the work on both workers.
        """
        with self._admission.enter():
            wire_id = f"{self._wire_prefix}{next(self._numbers)}"
            journal = Journal(request, wire_id, self._cache_scope(request))
            tried: list[Route] = []
            for number in range(1, ATTEMPTS_MAX + 1):
                try:
                    async with aclosing(self._follow(journal, number, tried)) as batches:
                        async for batch in batches:
                            yield batch
                    return
                except AttemptLost as lost:
                    structlog.get_logger().warning(
                        "attempt lost", request_id=request.id, attempt=number, why=str(lost)
                    )
                    if number == ATTEMPTS_MAX:
                        raise Unavailable("every attempt was lost", reason="ATTEMPTS_LOST") from lost

    async def _follow(
        self, journal: Journal, number: int, tried: list[Route]
    ) -> AsyncGenerator[TokenBatch, None]:
        """One attempt, from where the journal stands. Raises AttemptLost when another one should go on."""
        route = await self._route(journal, number, tried)
        tried.append(route)
        attempt = self._attempt(journal, number, route)
        alarm = self._set_alarm(journal.request, attempt.mailbox)
        try:
            attempt.begin()
            while attempt.live():
                batch = attempt.hear(await attempt.mailbox.take())
                if batch.tokens:
                    yield batch
            if attempt.failure is not None:
                raise attempt.failure
        finally:
            if alarm is not None:
                alarm.cancel()
            attempt.close()
            self._learn(route, attempt)

    async def _route(self, journal: Journal, number: int, tried: list[Route]) -> Route:
        """The best pair. A first attempt finds one at once or is refused; a later one waits a little: what it lost may
        be coming back."""
        journal.begin()
        give_up = self._clock() + (0 if number == 1 else REROUTE_WAIT_S)
        while True:
            changed = self.next_change()
            route = pick(
                self._prefills.views(journal.prefix),
                self._decodes.views(journal.prefix) if journal.remaining() > 1 else None,
                tokens=journal.length_limit(),
                tried=tried,
                broken=self._broken.avoided(self._clock()),
            )
            if isinstance(route, Route):
                return route
            await self._wait(changed, give_up, journal.request, route)

    async def _wait(self, changed: asyncio.Event, give_up: float, request: Request, missing: NoRoute) -> None:
        """Wait for the workers to change. Raises Unavailable or DeadlineExpired when there is no time left for it."""
        until = give_up if request.deadline is None else min(give_up, request.deadline)
        try:
            async with asyncio.timeout(max(0.0, until - self._clock())):
                await changed.wait()
        except TimeoutError:
            if changed.is_set():  # in the last moment
                return
            if until < give_up:
                raise DeadlineExpired(TOO_LATE) from None
            reason = f"NO_{missing.pool.upper()}_WORKER"
            raise Unavailable(f"no {missing.pool} worker can serve this now", reason=reason) from None

    def _cache_scope(self, request: Request) -> bytes:
        return prefix_scope(
            self._scope_key, model=request.model, tenant=request.tenant, salt=request.cache_salt
        )

    def _attempt(self, journal: Journal, number: int, route: Route) -> Attempt:
        order = journal.order(number, self._time_left_ms(journal.request))
        prefill = self._prefills.take(route.prefill)
        self._broken.begin(route, self._clock())
        target = None
        if route.decode is not None:
            decode = self._decodes.take(route.decode)
            ticket = self._mint(order, prefill, decode)
            target = Target(worker=decode, ticket=ticket, ticket_key=self._ticket_key)
        return Attempt(
            journal=journal,
            order=order,
            prefill=prefill,
            target=target,
            cached_tokens=prefill.cached_tokens(journal.prefix),
        )

    def _learn(self, route: Route, attempt: Attempt) -> None:
        """What the end of an attempt says of its pair."""
        if attempt.handed_over:
            self._broken.worked(route)
        elif isinstance(attempt.failure, HandOffLost):
            self._broken.failed(route, self._clock())

    def _mint(self, order: SequenceOrder, prefill: WorkerRecord, decode: WorkerRecord) -> Ticket:
        source, target = prefill.welcome, decode.welcome
        assert source is not None and target is not None, "a worker that can be picked has introduced itself"
        num_tokens = len(order.token_ids)
        return mint(
            self._randomness,
            request_id=order.key.request_id,
            attempt=order.key.attempt,
            choice=order.choice,
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

    def _time_left_ms(self, request: Request) -> int | None:
        if request.deadline is None:
            return None
        return max(1, int((request.deadline - self._clock()) * 1000))
