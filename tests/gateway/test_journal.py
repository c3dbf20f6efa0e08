"""Whatever order reports come in, each position is shown once and in order; what contradicts is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.journal import Divergence, Journal
from gateway.request import EndReason
from service.orders import AttemptKey, Choice
from service.reports import TokenEnd, TokenReport
from tests.fakes.scripted_workers import make_request


def report(position, token_id, end=None, attempt=1):
    key = AttemptKey(request_id="w", attempt=attempt)
    return TokenReport(
        key=key, position=position, token_id=token_id, logprob=-0.5, top=((token_id, -0.5),), end=end
    )


def journal_of(max_tokens, stop=()):
    return Journal(make_request(max_tokens=max_tokens, stop=stop), "w")


@st.composite
def scrambled_answers(draw):
    """Tokens of a whole answer, and an order in which its positions are reported, each at least once."""
    tokens = draw(st.lists(st.integers(0, 9), min_size=1, max_size=10))
    repeated = draw(st.lists(st.integers(0, len(tokens) - 1), max_size=8))
    return tokens, draw(st.permutations([*range(len(tokens)), *repeated]))


@given(scrambled_answers())
def test_each_position_is_shown_once_in_order_and_the_end_with_the_last(scrambled):
    tokens, order = scrambled
    journal, shown, ends = journal_of(len(tokens)), [], []
    for position in order:
        last = position == len(tokens) - 1
        batch = journal.take(report(position, tokens[position], TokenEnd.LENGTH if last else None))
        shown += batch.tokens
        ends += [batch.end] if batch.end else []
    assert [token.position for token in shown] == list(range(len(tokens)))
    assert [token.token_id for token in shown] == tokens
    assert ends == [EndReason.LENGTH]
    assert len(journal) == len(tokens) and journal.remaining() == 0


@given(scrambled_answers(), st.data())
def test_a_new_attempt_goes_on_from_what_was_shown_and_forgets_what_was_ahead(scrambled, data):
    tokens, order = scrambled
    journal = journal_of(len(tokens) + 1)
    for position in order[: data.draw(st.integers(0, len(order)))]:
        journal.take(report(position, tokens[position]))
    begun = len(journal)
    journal.begin()
    if begun < len(tokens):
        journal.take(report(begun, 99, attempt=2))  # another token than what had been ahead
    resumed = journal.order(2).token_ids[3:]
    assert resumed == (*tokens[:begun], *([99] if begun < len(tokens) else []))


def test_a_stop_token_ends_the_answer_and_nothing_is_shown_after_it():
    journal = journal_of(9, stop=(2,))
    journal.take(report(2, 4))
    journal.take(report(1, 2, TokenEnd.STOP))
    batch = journal.take(report(0, 8))
    assert [token.token_id for token in batch.tokens] == [8, 2]
    assert batch.end is EndReason.STOP
    assert batch.tokens[0].logprob == -0.5 and batch.tokens[0].top == ((8, -0.5),)


@pytest.mark.parametrize(
    "wrong",
    [
        report(0, 9),
        report(2, 9),
        report(4, 1, TokenEnd.LENGTH),
        report(9999, 1),
        report(3, 1),
        report(1, 1, TokenEnd.LENGTH),
        report(1, 1, TokenEnd.STOP),
    ],
    ids=[
        "another token than was shown",
        "another token than was ahead",
        "one past the end",
        "far past the end",
        "the last one, not said to be",
        "the end before the end",
        "a stop that is no stop token",
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(wrong):
    journal = journal_of(4, stop=(2,))
    journal.take(report(0, 5))
    journal.take(report(2, 7))
    with pytest.raises(Divergence):
        journal.take(wrong)
    assert [token.token_id for token in journal.take(report(1, 6)).tokens] == [6, 7]
    assert journal.take(report(3, 1, TokenEnd.LENGTH)).end is EndReason.LENGTH


def test_every_attempt_has_the_penalties_and_knows_where_the_answer_begins():
    asked = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": ((5, -1.0),),
    }
    journal = Journal(make_request((5, 6), 7, **asked), "wire-1")
    for attempt in range(1, 4):
        journal.begin()
        order = journal.order(attempt)
        assert {name: getattr(order, name) for name in asked} == asked
        assert (len(order.token_ids), order.prompt_tokens) == (1 + attempt, 2)
        journal.take(report(attempt - 1, 8, attempt=attempt))


def test_an_order_holds_all_that_a_worker_needs_and_the_name_between_our_processes():
    request = make_request(
        (5, 6), 7, stop=(2, 3), temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, seed=-3, logprobs=2
    )
    journal = Journal(request, "wire-1")
    journal.take(report(0, 8))
    order = journal.order(3)
    assert (order.key.request_id, order.key.attempt) == ("wire-1", 3)
    assert (order.token_ids, order.prompt_tokens) == ((5, 6, 8), 2)
    assert (order.max_tokens, order.min_tokens, order.stop_token_ids) == (7, 0, frozenset({2, 3}))
    assert (order.temperature, order.top_p, order.top_k, order.min_p) == (0.5, 0.9, 4, 0.1)
    assert (order.choices, order.logprobs) == ((Choice(index=0, seed=-3),), 2)
    assert order.length_limit() == journal.length_limit() == 9
    assert order.remaining() == journal.remaining() == 6
