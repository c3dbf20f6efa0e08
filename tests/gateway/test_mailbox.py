"""Who reads next, and what joins what waits."""

import asyncio

from gateway.mailbox import Delivery, Mailbox, Turnstile, WorkerLost

LETTERS = [WorkerLost() for _ in range(4)]


def deliveries(*numbers):
    return [Delivery(sender=str(number), letter=LETTERS[number]) for number in numbers]


async def test_what_has_arrived_is_taken_together_in_order():
    mailbox = Mailbox(Turnstile())
    mailbox.put("0", LETTERS[0])
    mailbox.put("1", LETTERS[1])
    assert await mailbox.take() == deliveries(0, 1)
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.put("2", LETTERS[2])
    mailbox.put("3", LETTERS[3])
    assert await taking == deliveries(2, 3)


async def test_readers_go_on_a_few_at_a_time_in_order_and_get_what_came_while_they_stood():
    turnstile = Turnstile(at_once=2)
    mailboxes, order, taken = [Mailbox(turnstile) for _ in range(6)], [], {}

    async def read(number):
        taken[number] = await mailboxes[number].take()
        order.append(number)
        if number == 0:
            mailboxes[5].put("1", LETTERS[1])

    readers = [asyncio.create_task(read(number)) for number in range(6)]
    await asyncio.sleep(0)
    for mailbox in mailboxes:
        mailbox.put("0", LETTERS[0])
    await asyncio.gather(*readers)
    assert order == list(range(6))
    assert [taken[number] for number in range(6)] == [deliveries(0)] * 5 + [deliveries(0, 1)]


async def test_a_reader_that_went_away_holds_nobody_up():
    turnstile = Turnstile(at_once=1)
    gone, left = Mailbox(turnstile), Mailbox(turnstile)
    waiting = asyncio.create_task(gone.take())
    taking = asyncio.create_task(left.take())
    await asyncio.sleep(0)
    gone.put("0", LETTERS[0])
    waiting.cancel()
    left.put("1", LETTERS[1])
    assert await taking == deliveries(1)
    gone.put("2", LETTERS[2])
    assert await gone.take() == deliveries(0, 2)
