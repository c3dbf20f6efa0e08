"""Which calls are taken at all, and when each of their requests may go to the workers.

The only gate. A call holds a place from before its message is read until its answer is with the client, and what it may
cost counts as its tenant's all the while. Refuses at once what does not fit its bounds, or what would come too late:
before anything is done for it, and with the time after which it would have done better. Of the requests of those it
takes, it lets so many go that the workers are busy, each tenant in its share; the others wait here, where an order can
still be kept. How much the workers take is told, and so is the time; in what order is `gateway.fair_queue`'s, how long
it takes `gateway.pace`'s.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from gateway.cost import NOTHING, ONE, Cost, cost_of
from gateway.fair_queue import FairQueue, Ticketed
from gateway.pace import NO_WORK, REMEMBERED, Pace, Work
from gateway.request import Request
from gateway.window import Window
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
    """Of all requests here, those that are read, that wait, that run and whose answers are not read yet: how many, the
    tokens that they may cost, and the bytes that they keep. shared: whether there are several tenants, each of which
    leaves room for others."""

    requests: int
    tokens: int = 1 << 62
    bytes: int = 1 << 62
    shared: bool = False


@dataclass(slots=True, eq=False)
class _Waiter:
    """waited: whether it could not go at once. light: among the light ones, if it is one."""

    cost: Cost
    deadline: float | None
    turn: asyncio.Future[None]
    waited: bool = False
    light: "Ticketed[Ticketed[_Waiter]] | None" = None


class Held:
    """A call's place in the bounds. cost: at most, of all its requests, as far as is known. settled: these have been
    accepted, all of them."""

    def __init__(self, admission: "Admission", tenant: str) -> None:
        self._admission = admission
        self._message_bytes = 0
        self.tenant = tenant
        self.cost = NOTHING
        self.settled = False

    def claim(self, cost: Cost = ONE, *, message_bytes: int | None = None) -> None:
        """It may cost so much now, instead of what was thought before. message_bytes: what its message keeps on top, as
        before unless told. Raises Exhausted when it is more, and there is no room for that; the place stays as it was.
        """
        size = self._message_bytes if message_bytes is None else message_bytes
        self._admission.change(self, cost + Cost(bytes=size))
        self._message_bytes = size

    def require_time(self, least: Cost, left_s: float) -> None:
        """Raises Exhausted when that much would not be done in time."""
        self._admission.require_time(self.tenant, least, left_s)


class Place:
    """A request's at the workers, from when it may go until they have nothing more to do with it."""

    def __init__(self, admission: "Admission", waiter: _Waiter, tenant: str, began: float) -> None:
        self._admission = admission
        self.cost = waiter.cost
        self.tenant = tenant
        self.deadline = waiter.deadline
        self.began = began
        self.used = 0

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


class Admission:
    """clock: seconds, the one that Request.deadline is on. window: what the workers take now; None when they take
    nothing, and whoever asks them hears why. weight: a tenant's share. light_tokens: prompts of no more may pass."""

    def __init__(
        self,
        bounds: Bounds,
        *,
        clock: Callable[[], float],
        window: Callable[[], Window | None] = lambda: None,
        weight: Callable[[str], float] = lambda tenant: 1.0,
        light_tokens: int = 0,
    ) -> None:
        self._bounds = bounds
        self._light_tokens = light_tokens
        self._clock = clock
        self._window = window
        self._queue: FairQueue[_Waiter] = FairQueue(weight)
        self._light: FairQueue[Ticketed[_Waiter]] = FairQueue(weight)
        self._pace = Pace(clock())
        self._held: dict[str, Cost] = {}
        self._all = self._waiting = self._running = self._uncomputed = NOTHING
        self._stay_s = self._stays = 0.0
        self._strained_until = -math.inf

    @property
    def live(self) -> int:
        """Requests taken whose answers are not with their clients yet."""
        return self._all.requests

    @property
    def waiting(self) -> int:
        """Of these, those that have been read and may not go yet."""
        return self._waiting.requests

    @contextmanager
    def hold(self, tenant: str, *, message_bytes: int = 0) -> Iterator[Held]:
        """A place for a call, for the length of a `with`. Raises Exhausted at once when there is no room for the least
        that it can be."""
        held, came = Held(self, tenant), self._clock()
        held.claim(message_bytes=message_bytes)
        try:
            yield held
        finally:
            self._count(tenant, NOTHING - held.cost)
            if held.cost.tokens:  # of the others, most were refused at once
                self._stay_s = self._stay_s * REMEMBERED + self._clock() - came
                self._stays = self._stays * REMEMBERED + 1

    @asynccontextmanager
    async def enter(self, request: Request) -> AsyncIterator[Place]:
        """Be at the workers for the length of an `async with`, which begins when they may be asked. It is one of a call
        that holds a place.

        Raises Exhausted at once when there is no time, and DeadlineExpired when it passes while the request waits.
        """
        assert request.tenant in self._held, "what enters has a place"
        cost, now = cost_of(request), self._clock()
        if request.deadline is not None:
            self.require_time(request.tenant, cost, request.deadline - now)
        waiter = _Waiter(cost, request.deadline, asyncio.get_running_loop().create_future())
        rank = now + request.priority * PRIORITY_S
        self._tick()
        entry = self._queue.push(request.tenant, cost.tokens, rank, waiter)
        if cost.prompt_tokens <= self._light_tokens:
            waiter.light = self._light.push(request.tenant, cost.tokens, rank, entry)
        self._waiting += cost
        try:
            self.look()
            waiter.waited = not waiter.turn.done()
            await self._wait(waiter, request.tenant, now)
            place = Place(self, waiter, request.tenant, self._clock())
            try:
                yield place
            finally:
                self._end(place)
        finally:
            self._leave(entry)
            self.look()

    def look(self) -> None:
        """Let go whoever may go now: somebody came or went, or the workers changed."""
        self._tick()
        window = self._window() if self._queue.first() is not None else None
        while (entry := self._queue.first()) is not None:
            waiter = entry.item
            if waiter.turn.done():  # cancelled, and about to leave
                self._leave(entry)
            elif self._hopeless(waiter):
                self._leave(entry)
                waiter.turn.set_exception(self._too_late(0.0))
            elif self._room(waiter.cost, window):
                self._go(entry)
            else:
                self._let_pass(waiter.cost, window)
                return

    def change(self, held: Held, cost: Cost) -> None:
        """For held places to call. Raises Exhausted."""
        self._require_bounds(held, cost)
        self._count(held.tenant, cost - held.cost)
        held.cost = cost

    def require_time(self, tenant: str, cost: Cost, left_s: float) -> None:
        """Where there is too much to do: it takes its turn, and then its time. Raises Exhausted. For held places to
        call."""
        if self._running == NOTHING or not self._full_up():
            return
        wait, service = self._pace.wait_s(self._ahead(tenant, cost)), self._service_s(cost)
        late = MARGIN * (wait + service) - left_s
        if late > 0:
            if self._pace.service_s(_work(cost)) < left_s:
                self._strain()
            raise self._too_late(min(late, wait or service))

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

    def _let_pass(self, first: Cost, window: Window | None) -> None:
        """Light prompts go before the one whose turn it is, where they may."""
        while (light := self._light.first()) is not None and self._passes(
            light.item.item.cost, first, window
        ):
            self._go(light.item)

    def _passes(self, light: Cost, first: Cost, window: Window | None) -> bool:
        return window is not None and window.lets_pass(light, first, self._running.branches)

    def _go(self, entry: Ticketed[_Waiter]) -> None:
        cost = entry.item.cost
        self._waiting -= cost
        if entry.item.light is not None:
            self._light.go(entry.item.light)
        self._queue.go(entry)
        self._running += cost
        self._uncomputed += Cost(requests=1, prompt_tokens=cost.prompt_tokens)
        entry.item.turn.set_result(None)

    def _end(self, place: Place) -> None:
        """The workers have done all they will for a request."""
        cost, now = place.cost, self._clock()
        self._tick()
        self._running -= cost
        if place.used == 0:
            self._uncomputed -= Cost(requests=1, prompt_tokens=cost.prompt_tokens)
        if place.deadline is not None and now > place.deadline - CUT_S:
            if place.deadline - place.began > self._pace.service_s(_work(cost)):
                self._strain()
        elif place.used:
            used = Work(cost.prompt_tokens, place.used - cost.prompt_tokens)
            self._pace.ended(_work(cost), used, now - place.began)
        self._queue.give_back(place.tenant, cost.tokens - place.used)

    def _leave(self, entry: Ticketed[_Waiter]) -> None:
        """It waits no more; nothing happens the second time."""
        if not entry.gone:
            self._waiting -= entry.item.cost
            self._queue.leave(entry)
            if entry.item.light is not None:
                self._light.leave(entry.item.light)

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

    def _count(self, tenant: str, cost: Cost) -> None:
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

    def _require_bounds(self, held: Held, cost: Cost) -> None:
        """A call that is more than all there can be is taken when nobody else is here."""
        bounds, tenants = self._bounds, self._held.get(held.tenant, NOTHING)
        for name, limit in (
            ("requests", bounds.requests),
            ("tokens", bounds.tokens),
            ("bytes", bounds.bytes),
        ):
            wanted, own = getattr(cost, name), getattr(held.cost, name)
            if wanted <= own:
                continue
            others, mine = getattr(self._all, name) - own, getattr(tenants, name) - own
            if others and others + wanted > limit:
                raise self._full(f"{name}: at most {limit} may be live", others + wanted - limit, others)
            if bounds.shared and mine and mine + wanted > CROWD_SHARE * (limit - others):
                over = mine + wanted - CROWD_SHARE * (limit - others)
                raise self._full(f"{name}: too many of one tenant are live", over, others)

    def _service_s(self, cost: Cost) -> float:
        """How long it runs: as long as others of its kind, and no less than its share of what is made takes, beside all
        that run."""
        own, beside = _work(cost), self._running.branches / cost.branches
        return max(self._pace.service_s(own), self._pace.wait_s(Work(0, own.answers * (1 + beside))))

    def _ahead(self, tenant: str, cost: Cost) -> Work:
        """What goes before a request that comes now; as much of it in prompts as of all that waits. Nothing before one
        that would pass."""
        first = self._queue.first()
        light = cost.prompt_tokens <= self._light_tokens
        if first is None or (light and self._passes(cost, first.item.cost, self._window())):
            return NO_WORK
        return _work(self._waiting).scaled(self._queue.ahead(tenant, cost.tokens) / self._waiting.tokens)

    def _hopeless(self, waiter: _Waiter) -> bool:
        """Whether its deadline would pass while it runs, in place of another one. Where there is room it may try."""
        if waiter.deadline is None or not waiter.waited:
            return False
        return self._clock() + self._service_s(waiter.cost) > waiter.deadline

    def _full(self, message: str, over: float, others: int) -> Exhausted:
        """over: how much too much it is, beside so much of others. It comes free as fast as the workers do it or, where
        that is not known, as calls have ended."""
        share = min(1.0, over / others)
        stay_s = self._stay_s / self._stays if self._stays else 0.0
        wait = self._pace.wait_s(_work(self._all).scaled(share)) or stay_s * share
        return Exhausted(message, retry_after_ms=_retry_after_ms(wait))

    def _too_late(self, wait_s: float) -> Exhausted:
        return Exhausted(UNREACHABLE, reason="DEADLINE_UNREACHABLE", retry_after_ms=_retry_after_ms(wait_s))


def _work(cost: Cost) -> Work:
    return Work(cost.prompt_tokens, cost.tokens - cost.prompt_tokens)


def _retry_after_ms(wait_s: float) -> int:
    if wait_s <= 0:
        return RETRY_AFTER_MS
    return min(RETRY_AFTER_MAX_MS, max(RETRY_AFTER_MIN_MS, round(wait_s * 1000)))
