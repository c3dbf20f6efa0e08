"""Ten times more is asked for than can be served. On a virtual clock, with arithmetic for workers."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest

from gateway.admission import Admission, Bounds
from gateway.window import Window
from service.errors import DeadlineExpired, Exhausted
from tests.fakes import virtual_time
from tests.fakes.places import entered
from tests.fakes.scripted_workers import make_request

PREFILL_TOKENS_S = 2000.0
TOKEN_S = 0.02
SEATS = 16
PROMPT, ANSWER = 100, 50
PATIENCE_S = 4.0
SECONDS = 60.0
SHARED_BASE_S, SHARED_EACH_S = 0.01, 0.005
SHARED_RATE = 1 / (SHARED_EACH_S * ANSWER)
"""Requests a second that no number of seats exceeds."""
CAPACITY = min(PREFILL_TOKENS_S / PROMPT, SEATS / (ANSWER * TOKEN_S))
"""Requests a second."""


class Service:
    """One prefill worker that computes prompts one by one, and seats in which answers take their time."""

    def __init__(self, seed, **bounds):
        self.dice = random.Random(seed)
        self.clock = asyncio.get_running_loop().time
        window = Window(branches=SEATS + 4, prompts=2, prompt_tokens=400)
        self.admission = Admission(
            Bounds(**{"requests": 1000, **bounds}), clock=self.clock, window=lambda: window
        )
        self.prefill, self.seats = asyncio.Lock(), asyncio.Semaphore(SEATS)
        self.ends, self.refused_after, self.prefilled, self.good = Counter(), [], 0, Counter()

    async def ask(self, tenant, patience_s=PATIENCE_S, answer=ANSWER):
        came = self.clock()
        asked = make_request(
            prompt=[5] * PROMPT, max_tokens=answer, deadline=None if patience_s is None else came + patience_s
        )
        try:
            async with asyncio.timeout(patience_s):
                await self._serve(replace(asked, tenant=tenant))
        except (DeadlineExpired, TimeoutError):
            self.ends["late"] += 1
        except Exhausted as refusal:
            self.ends[refusal.reason] += 1
            self.refused_after.append(self.clock() - came)
            assert refusal.retry_after_ms > 0
        else:
            self.ends["good"] += 1
            self.good[tenant] += 1

    async def _serve(self, request):
        async with entered(self.admission, request) as place, self.seats:
            async with self.prefill:
                await asyncio.sleep(PROMPT / PREFILL_TOKENS_S)
                self.prefilled += PROMPT
            place.took(1)
            for _ in range(request.stop.max_tokens - 1):
                await asyncio.sleep(TOKEN_S * self.dice.uniform(0.8, 1.2))
                place.took(1)

    async def load(self, rates, seconds=SECONDS, **how):
        """rates: requests a second by tenant."""
        asked = [
            asyncio.create_task(self._arrivals(each, rate, seconds, how)) for each, rate in rates.items()
        ]
        for arrivals in asked:
            await asyncio.gather(*await arrivals)
        return self

    async def _arrivals(self, tenant, rate, seconds, how):
        tasks = []
        while self.clock() < seconds:
            await asyncio.sleep(self.dice.expovariate(rate))
            tasks.append(asyncio.create_task(self.ask(tenant, **how)))
        return tasks


class Shared(Service):
    """Workers with more seats than are good for anybody's deadline: each token takes longer for each that runs."""

    def __init__(self, seed, **bounds):
        super().__init__(seed, **bounds)
        window = Window(branches=80, prompts=16, prompt_tokens=8192)
        self.admission = Admission(
            Bounds(**{"requests": 1000, **bounds}), clock=self.clock, window=lambda: window
        )
        self.running = 0

    async def _serve(self, request):
        async with entered(self.admission, request) as place:
            async with self.prefill:
                await asyncio.sleep(PROMPT / PREFILL_TOKENS_S)
                self.prefilled += PROMPT
            place.took(1)
            self.running += 1
            try:
                for _ in range(request.stop.max_tokens - 1):
                    await asyncio.sleep(SHARED_BASE_S + SHARED_EACH_S * self.running)
                    place.took(1)
            finally:
                self.running -= 1


def service_under(*, kind=Service, seed=1, seconds=SECONDS, bounds=None, how=None, **rates):
    async def main():
        return await kind(seed, **(bounds or {})).load(rates, seconds, **(how or {}))

    return virtual_time.run(main())


@pytest.fixture(scope="module")
def peak():
    """The most that are served in time, at whatever load."""
    return max(service_under(a=CAPACITY * share).ends["good"] for share in (0.6, 0.8, 0.9, 1.0, 1.2, 1.5, 2))


@pytest.mark.parametrize("times", [2, 5, 10])
def test_under_overload_nearly_as_much_is_served_in_time_as_ever(peak, times):
    assert service_under(a=CAPACITY * times).ends["good"] >= 0.9 * peak


@pytest.fixture(scope="module")
def shared_peak():
    return max(good_later(SHARED_RATE * share) for share in (0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 2))


@pytest.mark.parametrize("times", [5, 10])
def test_seats_that_are_too_many_for_the_deadlines_do_not_make_everybody_late(shared_peak, times):
    """The first ones are late, until it is known how long anything takes; that is not counted."""
    assert shared_peak >= 0.75 * SHARED_RATE * SECONDS * 2 / 3
    assert good_later(SHARED_RATE * times) >= 0.9 * shared_peak


def good_later(rate):
    """Served in time, but for what came in the first third."""

    async def main():
        service = Shared(1)
        for seconds in (SECONDS / 3, SECONDS):
            service.ends.clear()
            await service.load({"a": rate}, seconds)
        return service.ends["good"]

    return virtual_time.run(main())


def test_the_peak_is_what_the_workers_can_do(peak):
    assert peak >= 0.75 * CAPACITY * SECONDS


def test_nearly_all_refusals_come_at_once_and_cost_no_token_of_a_prompt():
    service = service_under(a=CAPACITY * 10)
    """Those that do not are of the first seconds, when nobody knows yet how long anything takes."""
    refused = len(service.refused_after)
    assert refused > 8 * service.ends["good"]
    assert sum(after > 0.020 for after in service.refused_after) <= refused // 100
    served = service.ends["good"] + service.ends["late"]
    assert service.prefilled <= served * PROMPT
    assert service.ends["late"] <= 0.1 * service.ends["good"]


def test_without_deadlines_the_bound_keeps_the_workers_busy_and_the_wait_short():
    service = service_under(a=CAPACITY * 10, bounds={"requests": 60}, how={"patience_s": None})
    assert service.ends["good"] >= 0.95 * CAPACITY * SECONDS * 0.75
    assert service.ends["late"] == 0
    assert max(service.refused_after) == 0


def test_a_tenant_that_asks_for_a_tenth_of_what_there_is_gets_it_beside_one_that_asks_for_tenfold():
    alone = service_under(modest=CAPACITY / 10)
    service = service_under(modest=CAPACITY / 10, greedy=CAPACITY * 10, bounds={"shared": True})
    assert service.good["modest"] >= 0.9 * alone.good["modest"]
    assert service.good["greedy"] >= 0.7 * CAPACITY * SECONDS * 0.75


def test_without_an_early_no_most_work_is_for_nothing(peak, monkeypatch):
    """What the other tests would find if nobody was refused for its deadline."""
    monkeypatch.setattr(Admission, "require_time", lambda *_: None)
    monkeypatch.setattr(Admission, "_hopeless", lambda *_: False)
    assert service_under(a=CAPACITY * 10).ends["good"] < 0.5 * peak
