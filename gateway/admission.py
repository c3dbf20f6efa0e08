"""Which requests are taken at all, and when each may go to the workers.

Refuses at once what does not fit its bounds, or what would come too late: before anything is done for it, and with the
time after which it would have done better. Of those it takes, it lets so many go that the workers are busy, each tenant
in its share; the others wait here, where an order can still be kept. How much the workers take is told, and so is the
time; in what order is `gateway.fair_queue`'s, how long it takes `gateway.pace`'s.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gateway.cost import NOTHING, Cost, cost_of
from gateway.fair_queue import FairQueue, Ticketed
from gateway.pace import NO_WORK, Pace, Work
from gateway.request import Request
from service.errors import DeadlineExpired, Exhausted
from service.orders import PRIORITY_S

CUT_S = 0.05
"""Whatever ends so shortly before its deadline was ended by it."""
RETRY_AFTER_MS = 1000
"""When nothing is known of how long anything takes."""
RETRY_AFTER_MIN_MS, RETRY_AFTER_MAX_MS = 50, 60_000
CROWD_SHARE = 2.0
"""A tenant may hold so many times what is still free, so that whoever comes later finds room."""
MARGIN = 1.15
"""Whoever is told to wait should not be told later that it was in vain: what is predicted may take so much longer."""
STRAIN_S, STRAIN_BRANCHES = 10.0, 4
"""How long there counts as being too much to do after somebody was refused, or not served in time, beside so many that
run: where fewer do, it was not their number."""
UNREACHABLE = "the deadline would pass before the answer is there"
TOO_LATE = "the deadline passed while the request waited"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of all requests here, those that wait and those that run: how many, the tokens that they may cost, and the bytes
    that they keep. shared: whether there are several tenants, each of which leaves room for others."""

    requests: int
    tokens: int = 1 << 62
    bytes: int = 1 << 62
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """How much the workers take at once: sequences; and requests and tokens in prompts that are not computed yet,
    whichever is more. What is larger than any of it goes alone."""

    branches: int
    prompts: int
    prompt_tokens: int


@dataclass(slots=True, eq=False)
class _Waiter:
    """waited: whether it could not go at once."""

    cost: Cost
    deadline: float | None
    turn: asyncio.Future[None]
    waited: bool = False


class Place:
    """A request's, from when it may go to its end. left: the workers have nothing more to do with it; its client may
    still have to read."""

    def __init__(self, admission: "Admission", waiter: _Waiter, tenant: str, began: float) -> None:
        self._admission = admission
        self.cost = waiter.cost
        self.tenant = tenant
        self.deadline = waiter.deadline
        self.began = began
        self.used = 0
        self.left = False

    def computed(self) -> None:
        """The workers have computed its prompt."""
        if self.used == 0:
            self._admission.computed(self)

    def took(self, tokens: int) -> None:
        """The workers have made so many tokens of its answers; before the first ones they computed its prompt."""
        if tokens:
            self.computed()
            self.used += tokens
            self._admission.did(Work(0, tokens))

    def pause_s(self) -> float:
        """After which the workers will probably have done as much as it is."""
        return self._admission.pause_s(self)

    def leave_workers(self) -> None:
        """What it had of them is there for the next one."""
        if not self.left:
            self.left = True
            self._admission.end(self)


class Admission:
    """clock: seconds, the one that Request.deadline is on. window: what the workers take now; None when they take
    nothing, and whoever asks them hears why. weight: a tenant's share."""

    def __init__(
        self,
        bounds: Bounds,
        *,
        clock: Callable[[], float],
        window: Callable[[], Window | None] = lambda: None,
        weight: Callable[[str], float] = lambda tenant: 1.0,
    ) -> None:
        self._bounds = bounds
        self._clock = clock
        self._window = window
        self._queue: FairQueue[_Waiter] = FairQueue(weight)
        self._pace = Pace(clock())
        self._held: dict[str, Cost] = {}
        self._all = self._running = self._uncomputed = self._left = NOTHING
        self._strained_until = -math.inf

    @property
    def live(self) -> int:
        """Requests accepted and not yet ended."""
        return self._all.requests

    @property
    def waiting(self) -> int:
        """Of these, those that may not go yet."""
        return self._waiting().requests

    def require_room(self, tenant: str) -> None:
        """Raises Exhausted when not even the least request would be taken; to be asked before one is read closely."""
        self._require_bounds(tenant, Cost(requests=1))

    @asynccontextmanager
    async def enter(self, request: Request) -> AsyncIterator[Place]:
        """Be live for the length of an `async with`, which begins when the workers may be asked.

        Raises Exhausted at once when there is no room or no time, and DeadlineExpired when the time passes while it
        waits.
        """
        cost, now = cost_of(request), self._clock()
        self._require_bounds(request.tenant, cost)
        self._require_time(request, cost, now)
        waiter = _Waiter(cost, request.deadline, asyncio.get_running_loop().create_future())
        rank = now + request.priority * PRIORITY_S
        self._tick()
        entry = self._queue.push(request.tenant, cost.tokens, rank, waiter)
        self._hold(request.tenant, cost)
        try:
            self.look()
            waiter.waited = not waiter.turn.done()
            await self._wait(waiter, request.tenant, now)
            place = Place(self, waiter, request.tenant, self._clock())
            try:
                yield place
            finally:
                place.leave_workers()
                self._left -= cost
        finally:
            self._queue.leave(entry)
            self._hold(request.tenant, NOTHING - cost)
            self.look()

    def look(self) -> None:
        """Let go whoever may go now: somebody came or went, or the workers changed."""
        self._tick()
        window = self._window() if self._queue.first() is not None else None
        while (entry := self._queue.first()) is not None:
            waiter = entry.item
            if waiter.turn.done():  # cancelled, and about to leave
                self._queue.leave(entry)
            elif self._hopeless(waiter):
                self._queue.leave(entry)
                waiter.turn.set_exception(self._too_late(0.0))
            elif self._room(waiter.cost, window):
                self._go(entry)
            else:
                return

    def computed(self, place: Place) -> None:
        """A prompt is computed. For its place to call."""
        prompt = place.cost.prompt_tokens
        self._uncomputed -= Cost(requests=1, prompt_tokens=prompt)
        place.used = prompt
        self.did(Work(prompt, 0))
        self.look()

    def did(self, work: Work) -> None:
        """So much is done. For places to call."""
        self._tick()
        self._pace.did(work, full=self._full_up())

    def pause_s(self, place: Place) -> float:
        """How long so much takes as a request is. For its place to ask."""
        return _retry_after_ms(self._pace.wait_s(_work(place.cost))) / 1000

    def end(self, place: Place) -> None:
        """The workers have done all they will for a request. For its place to call."""
        cost, now = place.cost, self._clock()
        self._tick()
        self._running -= cost
        self._left += cost
        if place.used == 0:
            self._uncomputed -= Cost(requests=1, prompt_tokens=cost.prompt_tokens)
        if place.deadline is not None and now > place.deadline - CUT_S:
            if place.deadline - place.began > self._pace.service_s(_work(cost)):
                self._strain()
        elif place.used:
            used = Work(cost.prompt_tokens, place.used - cost.prompt_tokens)
            self._pace.ended(_work(cost), used, now - place.began)
        self._queue.give_back(place.tenant, cost.tokens - place.used)
        self.look()

    def _go(self, entry: Ticketed[_Waiter]) -> None:
        cost = entry.item.cost
        self._queue.go(entry)
        self._running += cost
        self._uncomputed += Cost(requests=1, prompt_tokens=cost.prompt_tokens)
        entry.item.turn.set_result(None)

    async def _wait(self, waiter: _Waiter, tenant: str, now: float) -> None:
        """For its turn. A turn that comes with a cancellation is given back."""
        try:
            async with asyncio.timeout(None if waiter.deadline is None else max(0.0, waiter.deadline - now)):
                await asyncio.shield(waiter.turn)
        except TimeoutError:
            self._abandon(waiter, tenant)
            raise DeadlineExpired(TOO_LATE) from None
        except asyncio.CancelledError:
            self._abandon(waiter, tenant)
            raise

    def _abandon(self, waiter: _Waiter, tenant: str) -> None:
        if not waiter.turn.done():
            waiter.turn.cancel()
        elif not waiter.turn.cancelled() and waiter.turn.exception() is None:
            self._running -= waiter.cost
            self._uncomputed -= Cost(requests=1, prompt_tokens=waiter.cost.prompt_tokens)
            self._queue.give_back(tenant, waiter.cost.tokens)

    def _tick(self) -> None:
        self._pace.tick(self._clock(), full=self._full_up())

    def _full_up(self) -> bool:
        """Whether there is too much to do: somebody waits, or was refused or late a moment ago."""
        return self._queue.waiting_tokens > 0 or self._clock() < self._strained_until

    def _strain(self) -> None:
        if self._running.branches >= STRAIN_BRANCHES:
            self._strained_until = self._clock() + STRAIN_S

    def _hold(self, tenant: str, cost: Cost) -> None:
        self._all += cost
        self._held[tenant] = self._held.get(tenant, NOTHING) + cost
        if self._held[tenant] == NOTHING:
            del self._held[tenant]

    def _room(self, cost: Cost, window: Window | None) -> bool:
        if window is None or self._running == NOTHING:
            return True
        if self._running.branches + cost.branches > window.branches:
            return False
        return (
            self._uncomputed.requests < window.prompts
            or self._uncomputed.prompt_tokens + cost.prompt_tokens <= window.prompt_tokens
        )

    def _require_bounds(self, tenant: str, cost: Cost) -> None:
        """A request that is more than all there can be is taken when nobody else is here."""
        bounds, held = self._bounds, self._held.get(tenant, NOTHING)
        for name, limit in (
            ("requests", bounds.requests),
            ("tokens", bounds.tokens),
            ("bytes", bounds.bytes),
        ):
            more, taken, mine = getattr(cost, name), getattr(self._all, name), getattr(held, name)
            if taken and taken + more > limit:
                raise self._full(f"{name}: at most {limit} may be live", taken + more - limit, taken)
            if bounds.shared and mine and mine + more > CROWD_SHARE * (limit - taken):
                over = mine + more - CROWD_SHARE * (limit - taken)
                raise self._full(f"{name}: too many of one tenant are live", over, taken)

    def _require_time(self, request: Request, cost: Cost, now: float) -> None:
        """Where there is too much to do: it takes its turn, and then its time."""
        if request.deadline is None or self._running == NOTHING or not self._full_up():
            return
        wait, service = self._pace.wait_s(self._ahead(request.tenant, cost)), self._service_s(cost)
        late = now + MARGIN * (wait + service) - request.deadline
        if late > 0:
            if self._pace.service_s(_work(cost)) < request.deadline - now:
                self._strain()
            raise self._too_late(min(late, wait or service))

    def _waiting(self) -> Cost:
        return self._all - self._running - self._left

    def _service_s(self, cost: Cost) -> float:
        """How long it runs: as long as others of its kind, and no less than its share of what is made takes, beside all
        that run."""
        own, beside = _work(cost), self._running.branches / cost.branches
        return max(self._pace.service_s(own), self._pace.wait_s(Work(0, own.answers * (1 + beside))))

    def _ahead(self, tenant: str, cost: Cost) -> Work:
        """What goes before a request that comes now; as much of it in prompts as of all that waits."""
        waiting = self._waiting()
        if not waiting.tokens:
            return NO_WORK
        return _work(waiting).scaled(self._queue.ahead(tenant, cost.tokens) / waiting.tokens)

    def _hopeless(self, waiter: _Waiter) -> bool:
        """Whether its deadline would pass while it runs, in place of another one. Where there is room it may try."""
        if waiter.deadline is None or not waiter.waited:
            return False
        return self._clock() + self._service_s(waiter.cost) > waiter.deadline

    def _full(self, message: str, over: float, taken: int) -> Exhausted:
        """over: how much too much it is, of what is taken."""
        wait = self._pace.wait_s(_work(self._all).scaled(over / taken)) if taken else 0.0
        return Exhausted(message, retry_after_ms=_retry_after_ms(wait))

    def _too_late(self, wait_s: float) -> Exhausted:
        return Exhausted(UNREACHABLE, reason="DEADLINE_UNREACHABLE", retry_after_ms=_retry_after_ms(wait_s))


def _work(cost: Cost) -> Work:
    return Work(cost.prompt_tokens, cost.tokens - cost.prompt_tokens)


def _retry_after_ms(wait_s: float) -> int:
    if wait_s <= 0:
        return RETRY_AFTER_MS
    return min(RETRY_AFTER_MAX_MS, max(RETRY_AFTER_MIN_MS, round(wait_s * 1000)))
