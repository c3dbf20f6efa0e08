"""The order of messages between both ends of a hand-off: nothing sleeps, and every order can be repeated."""

import random
from dataclasses import replace

import pytest

from kvtransfer import wire
from kvtransfer.digest import split
from service.reports import ReservedReport
from tests.fakes.hash_model import golden
from tests.workers.conftest import Bench, make_order

LEASE_S = 1.0
PROMPT = tuple(range(1, 14))
"""Four blocks, the last one with a single position; five chunks."""
ANSWER = golden(list(PROMPT), 6)


def order_of(request_id="r", prompt=PROMPT, max_tokens=6, **changes):
    return make_order(request_id, prompt=prompt, max_tokens=max_tokens, **changes)


def hand_off(bench, order):
    """Ask both ends for the same attempt; its ticket."""
    ticket = bench.ticket(order)
    bench.d.worker.reserve("g", order, ticket)
    bench.p.worker.submit("g", order, bench.hand_off(ticket))
    return ticket


def give_up(bench, order):
    """What a gateway does when one end has failed."""
    cancel(bench, order)
    bench.settle()


def cancel(bench, order):
    for side in (bench.p, bench.d):
        side.worker.cancel("g", order.key)
        side.assert_balanced()


def answer(bench, request_id="r", attempt=None):
    return bench.p.tokens(request_id, attempt) + bench.d.tokens(request_id, attempt)


def serves(bench, request_id="next"):
    """Whether the next request is answered as ever."""
    hand_off(bench, order_of(request_id))
    bench.settle()
    return answer(bench, request_id) == ANSWER


class Gate:
    """A network that keeps some messages to the target until it opens; then they go before the next one.

    keeps: which messages. What is kept is sent as it lies in memory when it leaves."""

    def __init__(self, keeps):
        self._keeps = keeps
        self._kept = []
        self.open = False

    def __len__(self):
        return len(self._kept)

    def __call__(self, packet):
        if not packet.to_target:
            return (packet,)
        if self.open:
            kept, self._kept = self._kept, []
            return (*kept, packet)
        if self._keeps(wire.decode(packet.header).message):
            self._kept.append(packet)
            return ()
        return (packet,)


OPENING = (wire.Hello, wire.Open)


def is_block(message):
    return isinstance(message, wire.BlockRun)


def test_case_06_frames_that_come_after_a_cancel_are_dropped_and_counted():
    bench = Bench(script=(gate := Gate(is_block)))
    hand_off(bench, order := order_of())
    bench.turn(12)
    cancel(bench, order)
    bench.settle()
    kept, before = len(gate), bench.d.endpoint.counters()["late"]
    gate.open = True
    assert serves(bench)
    assert bench.d.endpoint.counters()["late"] - before == kept >= 4
    assert bench.d.tokens("r") == []


def reserved(bench, order):
    return any(isinstance(report, ReservedReport) and report.key == order.key for _, report in bench.d.heard)


def test_case_08_a_request_that_queues_for_three_leases_at_the_target_is_served_by_its_first_attempt():
    bench = Bench(blocks=11)
    hand_off(bench, order_of("other", max_tokens=32))
    bench.turn()
    order = order_of()
    ticket = bench.ticket(order)
    bench.d.worker.reserve("g", order, ticket)
    while not reserved(bench, order):
        bench.turn(step_s=0.1)
    assert bench.now > 3 * LEASE_S
    bench.p.worker.submit("g", order, bench.hand_off(ticket))
    bench.settle()
    assert answer(bench) == ANSWER
    assert bench.p.ends() == bench.d.ends() == []


def test_case_08_a_request_that_queues_for_three_leases_at_the_source_is_served_by_its_first_attempt():
    """The target has bound its blocks long before the first of them is computed."""
    bench = Bench(blocks=14)
    bench.p.worker.submit("g", order_of("other", PROMPT * 4, 1), None)
    bench.turn()
    hand_off(bench, order_of())
    while not bench.p.tokens():
        assert bench.p.ends() == bench.d.ends() == []
        bench.turn(step_s=0.25)
    assert bench.now > 3 * LEASE_S
    bench.settle()
    assert answer(bench) == ANSWER


def test_case_09_any_message_of_a_transfer_that_is_lost_is_made_good_within_the_lease():
    numbers = range(2, 24)
    for number in numbers:
        bench = Bench(script=(loss := Loss(number)))
        hand_off(bench, order_of())
        while len(answer(bench)) < len(ANSWER):
            assert bench.now < LEASE_S, f"message {number}"
            bench.turn()
        bench.settle()
        assert answer(bench) == ANSWER, f"message {number}"
        assert loss.lost or number > 10


def test_case_09_a_greeting_that_is_lost_ends_the_transfer_within_the_lease():
    for number in range(2):
        bench = Bench(script=Loss(number))
        hand_off(bench, order := order_of())
        while not bench.p.ends():
            assert bench.now < LEASE_S + 0.1
            bench.turn()
        give_up(bench, order)
        assert serves(bench)


class Loss:
    """A network that loses the message of one number."""

    def __init__(self, number):
        self._number = number
        self.lost = 0

    def __call__(self, packet):
        if packet.number == self._number:
            self.lost += 1
            return ()
        return (packet,)


# What follows hands hostile references straight to a target, which never saw their right prompt.


def test_case_10_a_reference_that_the_target_does_not_know_is_refused():
    bench = Bench()
    order = order_of()
    bench.p.worker.submit("g", order, bench.hand_off(bench.ticket(order)))
    bench.settle()
    assert (bench.p.ends(), bench.d.heard) == ([("r", 1, "TRANSFER_FAILED")], [])
    assert serves(bench)


@pytest.mark.parametrize("range_", [{"num_blocks": 5}, {"first_block": 1}, {"num_tokens": 17}])
def test_case_10_a_reference_to_other_blocks_than_the_prompts_is_refused(range_):
    bench = Bench()
    order = order_of()
    ticket = bench.ticket(order, **range_)
    bench.d.worker.reserve("g", order, ticket)
    bench.p.worker.submit("g", order, bench.hand_off(ticket))
    bench.settle()
    assert bench.d.ends() == [("r", 1, "TICKET_REFUSED")]
    assert bench.d.tokens() == []
    assert serves(bench)


def test_case_10_a_reference_that_was_consumed_brings_no_other_prompt_in_its_place():
    bench = Bench()
    ticket = hand_off(bench, order_of())
    bench.settle()
    stolen = order_of("thief", tuple(reversed(PROMPT)))
    bench.p.worker.submit("g", stolen, bench.hand_off(ticket))
    bench.settle()
    assert bench.p.ends() == [("thief", 1, "TRANSFER_FAILED")]
    assert (bench.d.tokens("thief"), answer(bench)) == ([], ANSWER)
    assert serves(bench)


def test_case_10_a_reference_whose_blocks_the_source_has_used_again_brings_nothing():
    bench = Bench(blocks=9, script=(gate := Gate(lambda message: not isinstance(message, OPENING))))
    hand_off(bench, order := order_of())
    bench.turn(12)
    bench.p.worker.cancel("g", order.key)
    bench.turn(2)
    assert bench.p.owns_nothing() and not bench.d.owns_nothing()
    bench.p.worker.submit("g", order_of("other", (7,) * 30, 1), None)
    bench.turn(10)
    gate.open = True
    hand_off(bench, order_of("next", PROMPT[:4]))
    bench.settle()
    assert bench.d.ends() == [], "who cancelled at the source needs not be told by the target"
    assert bench.d.endpoint.counters()["damaged_block"] >= 1
    assert answer(bench, "next") == golden(list(PROMPT[:4]), 6)
    assert bench.d.tokens() == []


def test_case_10_a_reference_whose_lease_is_over_brings_nothing():
    bench = Bench(script=(gate := Gate(lambda message: not isinstance(message, wire.Hello))))
    hand_off(bench, order := order_of())
    while not bench.p.ends():
        assert bench.now < LEASE_S + 0.1
        bench.turn()
    give_up(bench, order)
    gate.open = True
    assert serves(bench)
    assert bench.d.tokens() == []


def test_case_10_blocks_of_another_prompt_with_their_own_digests_are_refused():
    """Each frame is sound in itself; that they belong to another prompt shows in the digest of the whole."""
    bench = Bench(script=(thief := Thief()))
    hand_off(bench, order_of("victim", tuple(reversed(PROMPT))))
    bench.settle()
    thief.steals = True
    hand_off(bench, order_of())
    bench.settle()
    assert bench.p.ends() == bench.d.ends() == [("r", 1, "TRANSFER_FAILED")]
    assert bench.d.tokens() == []
    thief.steals = False
    hand_off(bench, order_of(attempt=2))
    bench.settle()
    assert answer(bench, attempt=2) == ANSWER


class Thief:
    """A network that brings blocks of the first prompt, digests and all, in place of those that are sent."""

    def __init__(self):
        self.steals = False
        self._loot = {}

    def __call__(self, packet):
        envelope = wire.decode(packet.header)
        if not is_block(envelope.message):
            return (packet,)
        first = envelope.message.first_index
        run = zip(split(envelope.message.digests), map(bytes, packet.payloads), strict=True)
        if not self.steals:
            for index, block in enumerate(run, first):
                self._loot.setdefault(index, block)
            return (packet,)
        digests, payloads = zip(*(self._loot[index] for index, _ in enumerate(run, first)), strict=True)
        message = replace(envelope.message, digests=b"".join(digests))
        header = wire.encode(replace(envelope, message=message))
        return (replace(packet, header=header, payloads=tuple(map(memoryview, payloads))),)


def test_case_18_1000_cancels_in_mid_transfer_are_followed_by_50_answers():
    dice, bench = random.Random(18), Bench(blocks=12)
    for number in range(1000):
        hand_off(bench, order := order_of(f"cancelled {number}", max_tokens=dice.randrange(2, 20)))
        bench.turn(dice.randrange(10))
        cancel(bench, order)
    bench.settle()
    for number in range(50):
        assert serves(bench, f"normal {number}")


@pytest.mark.parametrize("last", [0, 1, 2, 3, "manifest"])
def test_case_22_a_target_computes_nothing_before_the_last_message_is_there(last):
    def keeps(message):
        if is_block(message):
            return last in range(message.first_index, message.first_index + wire.payloads_of(message))
        return last == "manifest" and isinstance(message, wire.Manifest)

    bench = Bench(script=(gate := Gate(keeps)))
    hand_off(bench, order_of())
    bench.turn(60)
    assert len(gate) and bench.p.tokens() == ANSWER[:1]
    assert bench.d.worker.tokens().computed == 0 and bench.d.core.idle()
    gate.open = True
    bench.settle()
    assert answer(bench) == ANSWER
    assert bench.d.worker.tokens().computed == len(ANSWER) - 1


def test_case_23_the_books_balance_after_each_abort_of_any_of_three_at_any_moment():
    for moment in range(16):
        for victim in range(3):
            bench = Bench(blocks=16)
            orders = [order_of(f"r{number}", PROMPT[number:]) for number in range(3)]
            for order in orders:
                hand_off(bench, order)
            bench.turn(moment)
            cancel(bench, orders[victim])
            bench.settle()
            for number, order in enumerate(orders):
                if number != victim:
                    assert answer(bench, order.key.request_id) == golden(list(PROMPT[number:]), 6)
            assert bench.p.worker.ledger().free == bench.d.worker.ledger().free == 16
