"""A right to blocks through all its states: every event, and the ledger after each."""

import itertools

import pytest

from decode_worker.reservations import (
    RESERVATION_TRANSITIONS,
    Reservation,
    ReservationEvent,
    Reservations,
    ReservationState,
)
from engine.cache.block_pool import BlockPool
from engine.cache.prefix_chain import PrefixChain
from engine.errors import IllegalTransition

S, E = ReservationState, ReservationEvent
LEGAL = {
    S.ASKING: {E.GRANT: S.GRANTED, E.COMPUTE: S.COMPUTING, E.WITHDRAW: S.GONE},
    S.GRANTED: {E.BIND: S.BOUND, E.WITHDRAW: S.WITHDRAWN},
    S.BOUND: {E.ADOPT: S.ADOPTED, E.WITHDRAW: S.WITHDRAWN},
    S.COMPUTING: {E.ADOPT: S.GONE, E.WITHDRAW: S.GONE},
    S.WITHDRAWN: {E.CLOSED: S.GONE},
    S.ADOPTED: {E.CLOSED: S.GONE},
    S.GONE: {},
}
WAYS = {
    S.ASKING: (),
    S.GRANTED: ("grant",),
    S.BOUND: ("grant", "bind"),
    S.WITHDRAWN: ("grant", "bind", "withdraw"),
    S.ADOPTED: ("grant", "bind", "adopt"),
    S.COMPUTING: ("compute",),
}
VERBS = {
    E.GRANT: "grant",
    E.BIND: "bind",
    E.COMPUTE: "compute",
    E.ADOPT: "adopt",
    E.WITHDRAW: "withdraw",
    E.CLOSED: "closed",
}


def reservation_of(order, ticket, *, blocks_max, scope=b""):
    chain = PrefixChain(scope, 4)
    return Reservation(
        gateway="g", order=order, ticket=ticket, blocks_max=blocks_max, chain=chain, arrived=0.0
    )


class Scene:
    """A pool of ten blocks and a reservation of four at most: two that the hand-off fills, and one to grow are
    promised. cached: whether the first of these is in the pool already."""

    def __init__(self, bench, order_of, state=S.ASKING, *, cached=False):
        order = order_of(prompt=range(7), max_tokens=8)
        self.ticket = bench.ticket(order)
        self.pool = BlockPool(10)
        self.reservations = Reservations(self.pool)
        self.reservation = reservation_of(
            order, self.ticket, blocks_max=4, scope=b"a scope" if cached else b""
        )
        if cached:
            self._cache(self.reservation)
        self.reservations.ask(self.reservation)
        self.results = [self.do(verb) for verb in WAYS[state]]

    def do(self, verb):
        if verb == "adopt" and self.reservation.state is S.COMPUTING:
            verb = "computed"
        return getattr(self.reservations, verb)(self.ticket.ticket_id)

    def _cache(self, reservation):
        owner = reservation.owner()
        table = self.pool.allocate(owner, 1, credit := self.pool.grant(owner, 1))
        self.pool.publish(table, 0, reservation.links())
        self.pool.release(table)
        self.pool.waive(credit)

    def books(self):
        """(promised, owned by reservations or quarantined, owned by sequences)."""
        ledger = self.pool.ledger()
        assert ledger.violations == ()
        owned = {str(each.owner.kind): each.blocks for each in ledger.owners}
        held = owned.get("reservation", 0) + owned.get("quarantine", 0)
        return ledger.promised, held, owned.get("sequence", 0)


BOOKS = {
    S.ASKING: (0, 0, 0),
    S.GRANTED: (3, 0, 0),
    S.BOUND: (1, 2, 0),
    S.WITHDRAWN: (0, 2, 0),
    S.ADOPTED: (1, 0, 2),
    S.COMPUTING: (3, 0, 0),
}
THE_SEQUENCES = {S.ADOPTED: (1, 0, 2), S.COMPUTING: (3, 0, 0)}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(WAYS, E)))
def test_every_event_has_one_outcome_or_changes_nothing(bench, order_of, state, event):
    scene = Scene(bench, order_of, state)
    assert scene.books() == BOOKS[state]
    target = LEGAL[state].get(event)
    assert RESERVATION_TRANSITIONS.get((state, event)) is target
    if target is None:
        with pytest.raises(IllegalTransition, match=f"{event.name} in state {state.name}"):
            scene.do(VERBS[event])
        assert scene.reservation.state is state
        assert scene.books() == BOOKS[state]
        return
    scene.do(VERBS[event])
    assert scene.reservation.state is target
    if (state, event) == (S.GRANTED, E.WITHDRAW):
        assert scene.books() == (0, 0, 0)
    elif target is S.GONE:
        assert scene.books() == THE_SEQUENCES.get(state, (0, 0, 0))
        assert scene.reservations.find(scene.ticket.ticket_id) is None and len(scene.reservations) == 0
    else:
        assert scene.books() == BOOKS[target]
        assert scene.reservations.find(scene.ticket.ticket_id) is scene.reservation


@pytest.mark.parametrize(
    ("state", "books"),
    [
        (S.ASKING, (0, 0, 0)),
        (S.GRANTED, (2, 1, 0)),
        (S.BOUND, (1, 2, 0)),
        (S.WITHDRAWN, (0, 2, 0)),
        (S.ADOPTED, (1, 0, 2)),
    ],
)
def test_what_is_cached_is_kept_from_the_grant_on_and_given_back_in_the_end(bench, order_of, state, books):
    scene = Scene(bench, order_of, state, cached=True)
    assert scene.books() == books
    assert scene.pool.ledger().cached == (1 if state is S.ASKING else 0)
    if state is S.ADOPTED:
        table, credit = scene.results[-1]
        scene.pool.release(table)
        scene.pool.waive(credit)
    elif state is not S.WITHDRAWN:
        scene.do("withdraw")
    if state is not S.ASKING:
        scene.do("closed")
    ledger = scene.pool.ledger()
    assert scene.books() == (0, 0, 0)
    assert (ledger.cached, ledger.free) == (1, 9), "what was never received is not kept"


def test_a_reservation_counts_only_what_it_would_take(bench, order_of):
    scene = Scene(bench, order_of, cached=True)
    assert scene.reservations.fitted(scene.ticket.ticket_id).first_block == 1
    assert scene.reservations.view(scene.reservation).blocks_to_start == 3, "idle blocks are taken too"
    sharer = scene.pool.share(scene.reservation.owner(), scene.reservation.links())
    assert scene.reservations.view(scene.reservation).blocks_to_start == 2
    assert scene.reservations.view(scene.reservation).uncomputed == 3
    scene.pool.release(sharer)


def test_a_reservation_that_is_gone_takes_nothing_more():
    assert not any(state is S.GONE for state, _ in RESERVATION_TRANSITIONS)


@pytest.mark.parametrize("state", WAYS)
def test_it_takes_a_seat_from_the_grant_to_the_adoption(bench, order_of, state):
    scene = Scene(bench, order_of, state)
    assert scene.reservations.seats() == (1 if state in (S.GRANTED, S.BOUND, S.COMPUTING) else 0)
    assert scene.reservations.asking() == ([scene.reservation] if state is S.ASKING else [])


def test_withdrawing_tells_where_it_was(bench, order_of):
    for state in (S.ASKING, S.GRANTED, S.BOUND):
        assert Scene(bench, order_of, state).do("withdraw") is state


def test_what_is_adopted_is_the_tables_blocks_and_the_rest_of_the_promise(bench, order_of):
    scene = Scene(bench, order_of, S.BOUND)
    own = scene.reservation.table
    assert scene.results[-1] == own.ids()
    table, credit = scene.do("adopt")
    assert (len(table), credit.blocks) == (2, 1)
    assert own.spent(), "the reservation's own handle is gone"
    scene.pool.release(table)
    scene.pool.waive(credit)
    scene.do("closed")
    assert scene.books() == (0, 0, 0)


def test_they_ask_in_order_and_a_ticket_asks_once(bench, order_of):
    scene = Scene(bench, order_of)
    later = order_of("later")
    other = reservation_of(later, bench.ticket(later), blocks_max=1)
    scene.reservations.ask(other)
    assert scene.reservations.asking() == [scene.reservation, other]
    with pytest.raises(AssertionError):
        scene.reservations.ask(other)


def test_a_prompt_that_is_computed_here_starts_with_what_is_cached_of_it_but_its_last_token(bench, order_of):
    scene = Scene(bench, order_of)
    order = order_of("here", prompt=range(8), max_tokens=8)
    here = reservation_of(order, None, blocks_max=4, scope=b"a scope")
    assert len(here.links()) == 1, "the second block holds the token that is sampled from"
    scene._cache(here)
    scene.reservations.ask(here)
    table, credit = scene.reservations.compute(order.key)
    assert (len(table), credit.blocks) == (1, 2)
    assert [str(each.owner.kind) for each in scene.pool.ledger().owners] == ["sequence"]


@pytest.mark.parametrize(
    "order",
    [("withdraw", "closed", "copied"), ("withdraw", "copied", "closed"), ("copied", "withdraw", "closed")],
)
def test_blocks_that_are_being_copied_are_free_when_that_is_done_too(bench, order_of, order):
    scene = Scene(bench, order_of, S.BOUND)
    assert scene.do("copying") == scene.reservation.table.ids()
    for key in order:
        assert scene.books()[1] == 2 and scene.reservations.find(scene.ticket.ticket_id) is scene.reservation
        scene.do(key)
    assert scene.books() == (0, 0, 0) and len(scene.reservations) == 0


def test_it_is_copied_once_when_all_is_there_and_adopted_afterwards(bench, order_of):
    for state in (S.ASKING, S.GRANTED, S.WITHDRAWN, S.ADOPTED, S.COMPUTING):
        with pytest.raises((AssertionError, KeyError)):
            Scene(bench, order_of, state).do("copying")
    scene = Scene(bench, order_of, S.BOUND)
    scene.do("copying")
    for early in ("copying", "adopt"):
        with pytest.raises(AssertionError):
            scene.do(early)
    scene.do("copied")
    with pytest.raises(AssertionError):
        scene.do("copied")
    table, credit = scene.do("adopt")
    assert scene.books() == (1, 0, 2) and (len(table), credit.blocks) == (2, 1)
