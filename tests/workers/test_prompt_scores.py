"""How likely a prompt is, as workers tell it: whoever computes it tells all of it, before the first token, cached or
not.
"""

import itertools
from dataclasses import replace

import pytest

from engine.distribution import PlainSampling, logprobs_of
from service.orders import Choice
from service.reports import PromptReport, ReservedReport, TokenReport
from tests.fakes.hash_model import golden, logits_for

SCOPE = b"s" * 16
WIDE = 3
CHOICES = tuple(Choice(index=number, seed=seed) for number, seed in enumerate((11, 22, 33)))


def right(prompt):
    """(logprob, top) of each token but the first, computed without any engine of ours."""
    found = []
    for place in range(1, len(prompt)):
        logits = logits_for(golden(list(prompt[:place]), 1))
        found.append(logprobs_of(logits[0], prompt[place], *PlainSampling().describe(logits, [WIDE])))
    return found


def told(side, request_id="r", attempt=1):
    """What a worker said of a prompt, in order and without gap; and that it said so before the first token."""
    reports = [
        report
        for _, report in side.heard
        if isinstance(report, PromptReport | TokenReport) and report.key == (request_id, attempt)
    ]
    kinds = [kind for kind, _ in itertools.groupby(reports, type)]
    assert kinds in ([], [TokenReport], [PromptReport], [PromptReport, TokenReport]), kinds
    found = []
    for report in reports:
        if isinstance(report, PromptReport):
            assert report.first_position == len(found) + 1
            found += [report.scores[at] for at in range(len(report.scores))]
    return found


def handed_over(bench, order):
    """By a source that sends what the target does not hold. Returns the blocks that it does."""
    ticket = bench.ticket(order)
    bench.d.worker.reserve("g", order, ticket)
    (reserved,) = [
        report
        for _, report in bench.d.heard
        if isinstance(report, ReservedReport) and report.key == order.key
    ]
    hand_off = bench.hand_off(replace(ticket, first_block=reserved.blocks_held))
    bench.p.worker.submit("g", order, hand_off)
    return reserved.blocks_held


def values(scores):
    return [(each.logprob, each.top) for each in scores]


@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9, 17])
@pytest.mark.parametrize("wish", [{}, {"max_tokens": 1}, {"choices": CHOICES, "temperature": 1.0}], ids=str)
def test_both_ways_tell_the_same_and_answer_as_ever(bench_of, order_of, wish, length):
    prompt = tuple(range(1, length + 1))
    fields = {"prompt": prompt, "max_tokens": 5, "logprobs": 2, "cache_scope": SCOPE, **wish}
    order = order_of(**fields, prompt_logprobs=WIDE)
    apart, here, plain = bench_of(), bench_of(), bench_of()
    plain.alone(order_of(**fields))
    here.alone(order)
    if order.goes_on():
        apart.split(order)
    else:
        apart.p.worker.submit("g", order, None)
    for bench in (apart, here, plain):
        bench.settle()
    assert values(told(here.d)) == values(told(apart.p)) == right(prompt)
    assert told(apart.p) == told(here.d) and told(apart.d) == told(plain.d) == []
    answers = [
        sorted(
            (each.choice, each.position, each.token_id, each.logprob)
            for side in (bench.p, bench.d)
            for _, each in side.heard
            if isinstance(each, TokenReport)
        )
        for bench in (apart, here, plain)
    ]
    assert answers[0] == answers[1] == answers[2] != []


def test_row_73_cold_and_warm_tell_the_same_full_list(bench, order_of):
    prompt = tuple(range(1, 20))
    for number in range(2):
        wish = {"prompt": prompt, "max_tokens": 3, "cache_scope": SCOPE, "prompt_logprobs": WIDE}
        handed_over(bench, order_of(f"apart{number}", **wish))
        bench.settle()
        bench.alone(order_of(f"here{number}", **wish))
        bench.settle()
    lists = [told(bench.p, f"apart{number}") for number in range(2)]
    lists += [told(bench.d, f"here{number}") for number in range(2)]
    assert values(lists[0]) == right(prompt) and lists[1:] == [lists[0]] * 3
    firsts = [
        each.cached_tokens
        for side in (bench.p, bench.d)
        for _, each in side.heard
        if isinstance(each, TokenReport) and each.position == 0
    ]
    assert firsts == [0] * 4


def test_what_it_computes_others_find(bench, order_of):
    prompt = tuple(range(1, 20))
    bench.alone(order_of("first", prompt=prompt, cache_scope=SCOPE, prompt_logprobs=0))
    bench.settle()
    bench.alone(order_of("second", prompt=prompt, cache_scope=SCOPE))
    bench.settle()
    cached = {
        each.key.request_id: each.cached_tokens
        for _, each in bench.d.heard
        if isinstance(each, TokenReport) and each.position == 0
    }
    assert cached == {"first": 0, "second": 16}


def test_blocks_that_the_target_holds_are_not_sent_to_it_all_the_same(bench, order_of):
    prompt = tuple(range(1, 20))
    bench.alone(order_of("first", prompt=prompt, max_tokens=4, cache_scope=SCOPE))
    bench.settle()
    assert handed_over(bench, order_of(prompt=prompt, cache_scope=SCOPE, prompt_logprobs=WIDE)) == 4
    bench.settle()
    assert values(told(bench.p)) == right(prompt)
    assert bench.p.tokens() + bench.d.tokens("r") == golden(list(prompt), 6)


def test_a_second_attempt_tells_them_again(bench, order_of):
    prompt = tuple(range(1, 20))
    order = order_of(prompt=prompt, prompt_logprobs=WIDE)
    bench.split(order)
    bench.turn(2)
    assert 0 < len(told(bench.p)) < len(prompt) - 1
    again = replace(order, key=order.key._replace(attempt=2))
    bench.split(again)
    bench.settle()
    assert values(told(bench.p, attempt=2)) == right(prompt)


def test_nothing_is_told_after_an_attempt_was_cancelled(bench, order_of):
    order = order_of(prompt=tuple(range(1, 40)), prompt_logprobs=WIDE)
    bench.split(order)
    bench.alone(order_of("here", prompt=tuple(range(1, 40)), prompt_logprobs=WIDE))
    bench.turn(2)
    for side, key in ((bench.p, order.key), (bench.d, order.key._replace(request_id="here"))):
        side.worker.cancel("g", key)
    before = len(told(bench.p)), len(told(bench.d, "here"))
    bench.settle()
    assert (len(told(bench.p)), len(told(bench.d, "here"))) == before
