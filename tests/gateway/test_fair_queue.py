"""The order of waiting requests, as a policy alone."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.fair_queue import FairQueue

TENANTS = st.sampled_from("abc")


def drain(queue, count=10**6):
    """Who goes, in order."""
    gone = []
    while len(gone) < count and (first := queue.first()) is not None:
        queue.go(first)
        gone.append(first)
    return gone


@given(st.lists(st.tuples(TENANTS, st.integers(1, 50)), max_size=40))
def test_everybody_goes_once_and_in_the_order_of_its_tenant(asked):
    queue = FairQueue()
    entries = [queue.push(tenant, tokens, rank, rank) for rank, (tenant, tokens) in enumerate(asked)]
    gone = drain(queue)
    assert sorted(map(id, gone)) == sorted(map(id, entries)) and queue.waiting_tokens == 0
    for tenant in "abc":
        ranks = [entry.rank for entry in gone if entry.tenant == tenant]
        assert ranks == sorted(ranks)


@given(st.lists(st.integers(1, 50), min_size=20, max_size=40), st.sampled_from([0.5, 1.0, 3.0]))
def test_two_that_always_wait_are_never_further_apart_than_one_request(sizes, weight):
    """In tokens by weight."""
    queue = FairQueue(lambda tenant: weight if tenant == "a" else 1.0)
    for rank, tokens in enumerate(sizes):
        queue.push("a", tokens, rank, None)
        queue.push("b", tokens, rank, None)
    had, waiting = Counter(), Counter(a=len(sizes), b=len(sizes))
    while all(waiting.values()):
        (entry,) = drain(queue, 1)
        had[entry.tenant] += entry.tokens / (weight if entry.tenant == "a" else 1.0)
        waiting[entry.tenant] -= 1
        assert abs(had["a"] - had["b"]) <= 50 / min(weight, 1.0)


@given(st.lists(st.tuples(TENANTS, st.integers(1, 50)), max_size=30), TENANTS, st.integers(1, 50))
def test_what_is_ahead_is_no_more_than_all_that_waits_and_no_less_than_what_waits_of_the_same_tenant(
    asked, tenant, tokens
):
    queue = FairQueue()
    for rank, (other, size) in enumerate(asked):
        queue.push(other, size, rank, None)
    own = sum(size for other, size in asked if other == tenant)
    assert own <= queue.ahead(tenant, tokens) <= queue.waiting_tokens == sum(size for _, size in asked)


def test_whoever_left_is_passed_over_and_counts_no_more():
    queue = FairQueue()
    first, second = queue.push("a", 5, 0, "first"), queue.push("a", 7, 1, "second")
    queue.leave(first)
    queue.leave(first)
    assert queue.waiting_tokens == 7
    assert drain(queue) == [second]
