"""What the target holds is not sent: how many blocks travel, and what becomes of shared blocks when plans change."""

from dataclasses import replace

import pytest

from service.reports import AdoptedReport, HandedOverReport, ReservedReport
from tests.fakes.hash_model import VOCAB, golden

SCOPE = b"one tenant"
TURNS = range(14)


def tokens_of(first, count):
    return [(first * 31 + 7 * n * n + n) % VOCAB for n in range(count)]


class Desk:
    """Plays the gateway: asks for a reservation, and lets the source send what the target does not hold.
    pushed: blocks that the source gave to the transport."""

    def __init__(self, bench, order_of):
        self.bench, self._order_of, self.pushed = bench, order_of, 0
        self._tickets, self._submitted, self._seen = {}, set(), 0
        push = bench.p.endpoint.push
        bench.p.endpoint.push = lambda ticket_id, first, blocks: self._push(push, ticket_id, first, blocks)

    def _push(self, push, ticket_id, first, blocks):
        self.pushed += len(blocks)
        push(ticket_id, first, blocks)

    def reserve(self, name, prompt, max_tokens=6, scope=SCOPE):
        order = self._order_of(name, prompt=prompt, max_tokens=max_tokens, cache_scope=scope)
        ticket = self.bench.ticket(order)
        self._tickets[order.key] = (order, ticket)
        self.bench.d.worker.reserve("g", order, ticket)
        return order

    def held(self):
        """Blocks held, by request, of all reservations that were granted."""
        return {
            report.key.request_id: report.blocks_held
            for _, report in self.bench.d.heard
            if isinstance(report, ReservedReport)
        }

    def submit_what_was_granted(self):
        for _, report in self.bench.d.heard[self._seen :]:
            if isinstance(report, ReservedReport):
                order, ticket = self._tickets[report.key]
                hand_off = self.bench.hand_off(replace(ticket, first_block=report.blocks_held))
                self.bench.p.worker.submit("g", order, hand_off)
        self._seen = len(self.bench.d.heard)

    def turn(self, turns=1):
        for _ in range(turns):
            self.submit_what_was_granted()
            self.bench.turn()

    def settle(self):
        """Until nobody owns, asks or computes anything."""
        for _ in range(1000):
            self.turn()
            load = self.bench.d.worker.load(0)
            if load.waiting_sequences == load.running_sequences == 0 and self.bench.idle():
                break
        self.bench.settle()

    def cancel(self, order):
        for side in (self.bench.p, self.bench.d):
            side.worker.cancel("g", order.key)

    def answer(self, name, prompt, max_tokens=6, scope=SCOPE):
        """(the answer, blocks held, blocks pushed)."""
        before = self.pushed
        self.reserve(name, prompt, max_tokens, scope)
        self.settle()
        return self.tokens(name), self.held()[name], self.pushed - before

    def tokens(self, name):
        return self.bench.p.tokens(name) + self.bench.d.tokens(name)


@pytest.fixture
def desk(bench_of, order_of):
    return Desk(bench_of(blocks=64), order_of)


@pytest.mark.parametrize("length", [77, 79, 80])
def test_of_a_prompt_of_which_the_target_has_nine_tenths_an_eighth_is_sent_at_most(desk, length):
    first = tokens_of(1, 72)
    second = [*first, *tokens_of(2, length - 72)]
    assert desk.answer("first", first) == (golden(first, 6), 0, 18)
    answer, held, pushed = desk.answer("second", second)
    assert (answer, held, pushed) == (golden(second, 6), 18, 2)
    assert pushed <= 0.12 * 20


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_of_a_prompt_that_the_target_has_nothing_is_sent_and_it_is_committed(desk, blocks):
    prompt = tokens_of(3, 4 * blocks)
    assert desk.answer("first", prompt) == (golden(prompt, 6), 0, blocks)
    assert desk.answer("second", prompt) == (golden(prompt, 6), blocks, 0)
    reports = [type(report) for _, report in (*desk.bench.p.heard, *desk.bench.d.heard)]
    assert reports.count(HandedOverReport) == reports.count(AdoptedReport) == 2


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_the_same_prompt_again_sends_the_block_that_is_not_full(desk, length):
    prompt = tokens_of(4, length)
    right = golden(prompt, 6)
    assert desk.answer("first", prompt) == (right, 0, -(-length // 4))
    assert desk.answer("second", prompt) == (right, length // 4, int(length % 4 > 0))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 9])
def test_the_next_turn_of_a_conversation_finds_the_answer_at_the_target(desk, count):
    prompt = tokens_of(5, 10)
    answer, _, _ = desk.answer("first", prompt, count)
    longer = [*prompt, *answer, *tokens_of(6, 9)]
    held = (10 + count - 1) // 4
    assert desk.answer("second", longer) == (golden(longer, 6), held, -(-len(longer) // 4) - held)


def test_another_scope_and_no_scope_at_all_share_nothing(desk):
    prompt = tokens_of(7, 16)
    desk.answer("first", prompt)
    assert desk.answer("other", prompt, scope=b"other") == (golden(prompt, 6), 0, 4)
    assert desk.answer("none", prompt, scope=b"") == (golden(prompt, 6), 0, 4)
    assert desk.answer("again", prompt) == (golden(prompt, 6), 4, 0)


@pytest.mark.parametrize("turns", TURNS)
def test_whoever_is_cancelled_at_any_moment_gives_back_what_it_shared(desk, turns):
    opening = tokens_of(8, 16)
    prompt = [*opening, *tokens_of(9, 7)]
    desk.answer("first", opening)
    order = desk.reserve("cancelled", prompt, 40)
    desk.turn(turns)
    desk.cancel(order)
    for side in (desk.bench.p, desk.bench.d):
        side.assert_balanced()
    desk.settle()
    answer, held, _ = desk.answer("again", prompt)
    assert (answer, held >= 4) == (golden(prompt, 6), True)


@pytest.mark.parametrize("turns", TURNS)
def test_shared_blocks_outlive_each_of_those_who_share_them(desk, turns):
    opening = tokens_of(10, 16)
    prompts = [[*opening, *tokens_of(n, 5)] for n in (11, 12)]
    desk.answer("first", opening)
    gone = desk.reserve("gone", prompts[0], 30)
    desk.reserve("stays", prompts[1], 30)
    assert desk.held() == {"first": 0, "gone": 4, "stays": 4}
    assert desk.bench.d.worker.ledger().owned == 4
    desk.turn(turns)
    desk.cancel(gone)
    desk.settle()
    assert desk.tokens("stays") == golden(prompts[1], 30)


def test_a_reservation_waits_for_a_prefix_that_another_receives(desk):
    prompt = tokens_of(13, 20)
    desk.reserve("first", prompt)
    desk.reserve("second", prompt)
    assert desk.held() == {"first": 0}
    desk.settle()
    assert desk.held() == {"first": 0, "second": 5}
    assert desk.pushed == 5
    assert desk.tokens("first") == desk.tokens("second") == golden(prompt, 6)


@pytest.mark.parametrize("turns", range(10))
def test_a_reservation_that_waits_for_another_goes_on_when_that_one_is_cancelled(desk, turns):
    prompt = tokens_of(14, 24)
    first = desk.reserve("first", prompt, 30)
    desk.reserve("second", prompt)
    desk.turn(turns)
    desk.cancel(first)
    desk.settle()
    assert desk.tokens("second") == golden(prompt, 6)


def test_a_reservation_that_waits_for_another_goes_on_when_no_source_opens_that_one(desk):
    prompt = tokens_of(15, 24)
    desk.reserve("first", prompt)
    desk.reserve("second", prompt)
    desk._seen = len(desk.bench.d.heard)
    desk.settle()
    assert desk.bench.d.ends() == [("first", 1, "TRANSFER_FAILED")]
    assert desk.tokens("second") == golden(prompt, 6)


def test_reservations_that_are_granted_together_do_not_receive_one_prefix_twice(bench_of, order_of):
    desk = Desk(bench_of(blocks=12), order_of)
    prompt = tokens_of(16, 16)
    desk.reserve("large", tokens_of(17, 30), 18)
    for name in ("first", "second"):
        desk.reserve(name, prompt, 3)
    assert desk.held() == {"large": 0}
    desk.settle()
    assert desk.held() == {"large": 0, "first": 0, "second": 4}
    assert desk.tokens("first") == desk.tokens("second") == golden(prompt, 3)
