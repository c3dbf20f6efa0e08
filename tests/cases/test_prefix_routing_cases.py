"""Requests find the workers that have their prompt, through whichever gateway they come and whatever it missed.

Row 89 of the cases: a subscriber that is gone for two seconds knows the truth when it is back.
"""

import asyncio

import grpc

from crossdock.v1 import control_pb2, control_pb2_grpc
from tests.cases.conftest import BLOCK, SOURCES, TARGETS, same, wish
from tests.e2e.conftest import OPERATOR, stream

LENGTH = 512
CACHED = (LENGTH - 1) // BLOCK * BLOCK
LONGER = 1056
"""What is behind LENGTH is too much for a decode worker by itself, so that a pair serves it."""
AWAY_S = 2.0


async def computed_by(rig):
    """Tokens since the start, by worker, of an idle rig."""
    return {name: ledger.tokens.computed for name, ledger in (await rig.until_idle()).items()}


async def asked(rig, channel, request):
    """(answer, who computed for it). Not before the gateway has heard that all its workers are idle."""
    await serving_idle(channel)
    before = await computed_by(rig)
    answer = await stream(channel, request)
    after = await computed_by(rig)
    return answer, {name for name in after if after[name] > before[name]}


def went_back(workers, pair):
    """Whether these are the ones that have it: the decode worker, which can do without the other."""
    return pair & {*TARGETS} <= workers <= pair


async def serving_idle(channel):
    """Once this gateway serves with all workers, and none of them has anything to do."""
    stub = control_pb2_grpc.ControlServiceStub(channel)
    ready = control_pb2.WORKER_STATE_READY
    while True:
        seen = await stub.GetStatus(control_pb2.GetStatusRequest(), timeout=15, metadata=OPERATOR)
        if all(
            worker.state == ready and not worker.running_sequences and not worker.waiting_sequences
            for worker in seen.workers
        ):
            return
        await asyncio.sleep(0.05)


async def test_a_prompt_that_comes_again_goes_to_workers_that_have_it(rig):
    for words in (8901, 8902, 8903):
        request = wish(words, LENGTH, 4)
        first, pair = await asked(rig, rig.channel, request)
        assert first.usage.cached_tokens == 0
        assert len(pair & {*SOURCES}) == len(pair & {*TARGETS}) == 1
        again, workers = await asked(rig, rig.channel, request)
        assert again.usage.cached_tokens == CACHED and went_back(workers, pair)
        assert same(again, first)
        longer, same_pair = await asked(rig, rig.channel, wish(words, LONGER, 4))
        assert (longer.usage.cached_tokens, same_pair) == (LENGTH, pair)


async def test_a_gateway_that_starts_later_knows_what_is_cached_where(rig):
    request = wish(8911, LENGTH, 4)
    first, pair = await asked(rig, rig.channel, request)
    async with grpc.aio.insecure_channel(rig.start_gateway("late")) as channel:
        try:
            again, workers = await asked(rig, channel, request)
            longer, same_pair = await asked(rig, channel, wish(8911, LONGER, 4))
        finally:
            rig.end("late")
    assert again.usage.cached_tokens == CACHED and went_back(workers, pair)
    assert same(again, first)
    assert (longer.usage.cached_tokens, same_pair) == (LENGTH, pair)


async def test_row_89_a_gateway_that_was_gone_for_two_seconds_knows_what_was_cached_meanwhile(rig):
    async with grpc.aio.insecure_channel(rig.start_gateway("absent")) as channel:
        try:
            with rig.frozen("absent"):
                asked_meanwhile = [await asked(rig, rig.channel, wish(8920 + n, LENGTH, 4)) for n in range(3)]
                await asyncio.sleep(AWAY_S)
            for n, (first, pair) in enumerate(asked_meanwhile):
                again, workers = await asked(rig, channel, wish(8920 + n, LENGTH, 4))
                assert again.usage.cached_tokens == CACHED and went_back(workers, pair)
                assert same(again, first)
            longer, same_pair = await asked(rig, channel, wish(8920 + n, LONGER, 4))
            assert (longer.usage.cached_tokens, same_pair) == (LENGTH, pair)
        finally:
            rig.end("absent")
