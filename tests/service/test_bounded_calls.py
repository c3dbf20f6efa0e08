"""Whose call gives way where there are too many."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from service.bounded_calls import BoundedCalls
from service.errors import Exhausted

BOUND = 6


class Open:
    """Calls that stay open until they have to give way."""

    def __init__(self, stack):
        self._calls, self._stack = BoundedCalls(BOUND), stack

    async def of(self, *peers):
        """A call of each, one after the other."""
        calls = []
        for peer in peers:
            calls.append(asyncio.create_task(self._stay(peer)))
            self._stack.callback(calls[-1].cancel)
            for _ in range(5):
                await asyncio.sleep(0)
        return calls

    async def _stay(self, peer):
        async with self._calls.room(peer):
            await asyncio.Event().wait()


@pytest.fixture
async def calls():
    async with AsyncExitStack() as stack:
        yield Open(stack)


def ports(host, *numbers):
    return [f"ipv4:{host}:{number}" for number in numbers]


def gone(calls):
    """Places of those that gave way."""
    for call in calls:
        if call.done():
            assert isinstance(call.exception(), Exhausted) and call.exception().reason == "TOO_MANY_CALLS"
    return [place for place, call in enumerate(calls) if call.done()]


async def test_many_connections_of_a_host_take_no_call_away_from_another_host(calls):
    kept = await calls.of(*ports("10.0.0.1", 1, 2), "ipv6:%5B::1%5D:5")
    many = await calls.of(*ports("10.0.0.2", *range(20)))
    assert gone(kept) == []
    assert gone(many) == list(range(2, 19)), "the newest of them, but for the one that has just come"


async def test_of_a_host_the_connection_that_has_most_gives_way_and_of_its_calls_the_oldest(calls):
    first = await calls.of(*ports("10.0.0.1", 1))
    greedy = await calls.of(*ports("10.0.0.1", 2, 2, 2, 2, 2))
    later = await calls.of(*ports("10.0.0.1", 3, 4))
    assert (gone(first), gone(greedy), gone(later)) == ([], [0, 1], [])


async def test_a_call_that_ends_leaves_its_place_to_another(calls):
    (ends, *others) = await calls.of(*ports("10.0.0.1", *range(BOUND)))
    ends.cancel()
    await asyncio.wait({ends})
    others += await calls.of(*ports("10.0.0.2", 1))
    assert gone(others) == []
