"""Real processes, and links between them that are slow, silent or cut."""

import asyncio
import random

import grpc
import pytest

from crossdock.v1 import inference_pb2
from tests.cases.conftest import (
    BLOCK,
    SOURCE_BLOCKS,
    SOURCES,
    TARGET_BLOCKS,
    TARGETS,
    TOKENS_MAX,
    cold,
    computed,
    held,
    same,
    wasted,
    wish,
)
from tests.e2e.conftest import stream

LONG = wish(1, 1024, 8)
MIDDLE = wish(2, 320, 8)
SHORT = wish(3, 20, 12, temperature=0.9, seed=3)
PAIR_TOKENS = 600
"""Too many for a decode worker to compute them by itself while somebody else may."""
CHUNK_TOKENS = 256
"""What a prefill worker computes in one step."""


async def first_token(call):
    """Read a stream up to the first message with a token."""
    while not any(delta.token_ids for delta in (await call.read()).deltas):
        pass


async def rest(call):
    """The tokens that are still to come."""
    tokens = []
    while message := await call.read():
        tokens += [token for delta in message.deltas for token in delta.token_ids]
    return tokens


async def bound(rig):
    """Wait until blocks of a decode worker are being filled; its name."""
    ledgers = await rig.until(lambda ledgers: held(ledgers, "reservation"))
    return next(iter(held(ledgers, "reservation")))


async def test_case_01_a_prompt_cancelled_while_its_blocks_are_under_way_leaves_none_behind(rig):
    await rig.require_exact(SHORT)
    start = computed(await rig.until_idle(), *SOURCES)
    call = rig.call(cold(LONG))
    link = rig.links[await bound(rig)]
    link.forth.delay_s = link.back.delay_s = 5.0
    await rig.until(lambda ledgers: computed(ledgers, *SOURCES) >= start + 2 * CHUNK_TOKENS)
    call.cancel()
    await rig.until_idle()
    rig.clear_up()
    await rig.require_exact(SHORT)


async def test_case_02_what_only_the_decode_workers_refuse_is_refused_before_anything_is_computed(rig):
    before = await rig.until_idle()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stream(rig.channel, wish(4, TOKENS_MAX - 40, 41))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert TOKENS_MAX < SOURCE_BLOCKS * BLOCK
    after = await rig.until_idle()
    assert computed(after, *SOURCES) == computed(before, *SOURCES)


async def test_case_03_a_link_silent_for_longer_than_the_lease_changes_no_answer(rig):
    others = [wish(words, 150, 6) for words in range(10, 18)]
    golden = [await rig.golden(each) for each in (MIDDLE, *others)]
    rig.slow(tokens_per_s=170)
    victim = asyncio.create_task(stream(rig.channel, cold(MIDDLE)))
    link = rig.links[await bound(rig)]
    rig.clear_up()
    link.hold()
    rest = [asyncio.create_task(stream(rig.channel, cold(each))) for each in others]
    answers = [await victim, *[await each for each in rest]]
    link.clear_up()
    assert all(same(answer, right) for answer, right in zip(answers, golden, strict=True))


async def test_a_dead_link_to_one_of_two_decode_workers_delays_requests_and_fails_none(rig):
    """The gateway reaches both, and the one that nothing gets to has the most room."""
    wishes = [wish(words, PAIR_TOKENS, 12) for words in (50, 51)]
    for each in wishes:
        await rig.golden(each)
    await rig.until_idle()
    busy = rig.call(wish(52, 20, 700))
    ledgers = await rig.until(lambda ledgers: held(ledgers, "sequence").keys() & {*TARGETS})
    (roomy,) = {*TARGETS} - held(ledgers, "sequence").keys()
    rig.links[roomy].hold()
    await rig.require_exact(*map(cold, wishes))
    busy.cancel()


async def test_case_04_500_requests_cancelled_around_their_first_token_leave_nothing(rig):
    async def worry(number):
        dice = random.Random(number)
        for _ in range(125):
            call = rig.call(wish(dice.randrange(5), 3, 4))
            if dice.random() < 0.5:
                await first_token(call)
                await asyncio.sleep(dice.uniform(0, 0.005))
            else:
                await asyncio.sleep(dice.uniform(0.01, 0.06))
            call.cancel()

    await asyncio.gather(*(worry(number) for number in range(4)))
    await rig.until_idle()
    await rig.require_exact(SHORT)


async def test_case_06_frames_that_come_after_a_cancel_are_dropped(rig):
    rig.slow(tokens_per_s=170)
    call = rig.call(cold(MIDDLE))
    link = rig.links[await bound(rig)]
    link.forth.hold()
    await first_token(call)
    assert await asyncio.to_thread(link.forth.stuck.wait, 10)
    call.cancel()
    await rig.until(lambda ledgers: not held(ledgers, "reservation"))
    link.clear_up()
    await rig.until_idle()
    await rig.require_exact(MIDDLE, SHORT)


async def test_case_07_2000_submissions_and_cancels_of_8_clients_crash_nobody(rig):
    async def fuzz(number):
        dice = random.Random(100 + number)
        for _ in range(250):
            call = rig.call(wish(dice.randrange(5), dice.choice((1, 2, 17)), dice.choice((1, 2, 30))))
            await asyncio.sleep(dice.choice((0, 0.002, 0.01, 0.04)))
            call.cancel()

    pids = rig.pids()
    await asyncio.gather(*(fuzz(number) for number in range(8)))
    assert rig.pids() == pids
    await rig.require_exact(SHORT)


async def test_case_09_a_cut_link_costs_a_transfer_and_no_answer(rig):
    golden = await rig.golden(MIDDLE)
    before = await rig.until_idle()
    rig.slow(tokens_per_s=170)
    answer = asyncio.create_task(stream(rig.channel, cold(MIDDLE)))
    rig.links[await bound(rig)].cut()
    rig.clear_up()
    assert same(await answer, golden)
    assert wasted(await rig.until_idle(), *SOURCES) > wasted(before, *SOURCES)


async def test_case_11_names_of_any_kind_and_the_same_name_at_once_are_served(rig):
    names = ["'; --", "%s%n{}\\", "../../etc", '"', "0" * 128, " ", *["twice"] * 4]
    golden = await rig.golden(SHORT)
    named = [wish(3, 20, 12, temperature=0.9, seed=3, request_id=name) for name in names]
    for answer in await asyncio.gather(*(stream(rig.channel, each) for each in named)):
        assert same(answer, golden)
    for name in ("x" * 129, "x" * 100_000, "\0", "naïve"):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream(rig.channel, wish(3, 20, 12, request_id=name))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "request_id" in refused.value.details()


async def test_case_14_300_cancels_in_mid_transfer_change_nobody_elses_answer(rig):
    others = [SHORT, wish(5, 60, 24)]
    for each in others:
        await rig.golden(each)
    over = asyncio.Event()

    async def go_on(request):
        while not over.is_set():
            await rig.require_exact(request)

    async def cancel(number):
        for _ in range(75):
            call = rig.call(cold(wish(number, 24, 30)))
            await first_token(call)
            call.cancel()

    rig.slow(tokens_per_s=870)
    beside = [asyncio.create_task(go_on(each)) for each in others]
    await asyncio.gather(*(cancel(number) for number in range(4)))
    over.set()
    await asyncio.gather(*beside)


async def test_case_15_64_prompts_at_once_are_not_mixed_up(rig):
    await rig.require_exact(*(wish(1000 + words, 18, 2) for words in range(64)))


@pytest.mark.parametrize("max_tokens", [1, 8])
async def test_case_19_a_prompt_cancelled_before_its_first_token_stops_within_a_chunk(rig, max_tokens):
    """Besides the one that is computed while the cancel is on its way. With one token no decode worker is involved."""
    before = await rig.until_idle()
    call = rig.call(cold(wish(1, 1024, max_tokens)))
    start = computed(before, *SOURCES)
    seen = await rig.until(lambda ledgers: computed(ledgers, *SOURCES) > start)
    call.cancel()
    after = await rig.until_idle()
    assert computed(after, *SOURCES) - computed(seen, *SOURCES) <= 2 * CHUNK_TOKENS
    assert wasted(after, *SOURCES) - wasted(before, *SOURCES) == computed(after, *SOURCES) - start


async def test_case_20_blocks_that_a_slow_link_still_reads_are_not_reused_and_all_finish(rig):
    """More prompts than the prefill workers have blocks for, and nothing to make them wait at the other side."""
    wishes = [wish(words, 200, 2) for words in range(20, 34)]
    blocks = len(wishes) * (200 // BLOCK + 1)
    assert len(SOURCES) * SOURCE_BLOCKS < blocks <= len(TARGETS) * TARGET_BLOCKS
    for each in wishes:
        await rig.golden(each)
    rig.slow(tokens_per_s=650)
    await rig.require_exact(*map(cold, wishes))


async def test_case_21_three_times_the_blocks_of_the_decode_workers_are_served_in_the_end(rig):
    answer = await rig.golden(wish(6, 30, 9))
    last = next(n for n, token in enumerate(answer.token_ids) if n > 3 and token not in answer.token_ids[:n])
    stop = inference_pb2.StopConditions(token_ids=[answer.token_ids[last]])
    greedy = wish(6, 30, 700, stop=stop)
    count = 3 * len(TARGETS) * TARGET_BLOCKS // (730 // BLOCK) + 1
    await rig.require_exact(*[greedy] * count)
    assert (await rig.golden(greedy)).token_ids == answer.token_ids[: last + 1]


async def test_case_22_a_decode_worker_waits_for_the_last_block_and_the_client_has_its_first_token(rig):
    """And case 79: the first token is seen before the commit."""
    golden = await rig.golden(MIDDLE)
    before = await rig.until_idle()
    rig.slow(tokens_per_s=110)
    call = rig.call(cold(MIDDLE))
    link = rig.links[await bound(rig)]
    await first_token(call)
    link.forth.hold()
    assert await asyncio.to_thread(link.forth.stuck.wait, 10)
    waiting = await rig.until(lambda ledgers: held(ledgers, "reservation"))
    assert computed(waiting, *TARGETS) == computed(before, *TARGETS)
    link.clear_up()
    assert await rest(call) == golden.token_ids[1:]
