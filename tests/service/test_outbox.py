"""What waits for one peer: in order, bounded, and ended in two ways."""

import asyncio

import pytest

from service.outbox import Outbox


async def read(outbox):
    return [message async for message in outbox.drain()]


async def test_messages_come_in_order_also_those_put_while_the_reader_waits():
    outbox = Outbox(10)
    outbox.put(1)
    messages = outbox.drain()
    assert await anext(messages) == 1
    waiting = asyncio.create_task(anext(messages))
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put(2)
    outbox.put(3)
    assert len(outbox) == 2
    assert [await waiting, await anext(messages)] == [2, 3]


async def test_finishing_sends_what_waits_and_takes_nothing_more():
    outbox = Outbox(10)
    outbox.put(1)
    outbox.put(2)
    outbox.finish()
    outbox.put(3)
    assert not outbox.closed
    assert await read(outbox) == [1, 2]
    assert outbox.closed
    await outbox.wait_closed()


async def test_closing_sends_nothing_more():
    outbox = Outbox(10)
    outbox.put(1)
    outbox.close()
    outbox.put(2)
    assert await read(outbox) == []
    await outbox.wait_closed()


@pytest.mark.parametrize("end", [Outbox.close, Outbox.finish])
async def test_a_waiting_reader_hears_of_the_end(end):
    outbox = Outbox(10)
    reading = asyncio.create_task(read(outbox))
    await asyncio.sleep(0)
    end(outbox)
    assert await reading == []


async def test_one_too_many_closes_and_lets_go_of_what_waited():
    outbox = Outbox(3)
    closed = asyncio.create_task(outbox.wait_closed())
    for number in range(3):
        outbox.put(number)
    assert not outbox.closed
    outbox.put(3)
    assert outbox.closed
    await closed
    assert await read(outbox) == []


async def test_what_was_taken_makes_room():
    outbox = Outbox(2)
    messages = outbox.drain()
    for number in range(20):
        outbox.put(number)
        assert await anext(messages) == number
    assert not outbox.closed
