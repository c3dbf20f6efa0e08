"""Keys to free computed blocks: every order of them, and the ledger after each."""

import itertools

import pytest

from engine.cache.block_pool import BlockPool
from engine.cache.block_table import Owner, OwnerKind
from engine.errors import IllegalTransition
from prefill_worker.holds import HOLD_TRANSITIONS, Hold, HoldEvent, Holds, HoldState

LEGAL = {
    (HoldState.READ, HoldEvent.LET_GO): HoldState.LET_GO,
    (HoldState.READ, HoldEvent.CLOSED): HoldState.UNREAD,
    (HoldState.UNREAD, HoldEvent.LET_GO): HoldState.FREE,
    (HoldState.LET_GO, HoldEvent.CLOSED): HoldState.FREE,
}
TICKET = b"t"


@pytest.mark.parametrize(("state", "event"), list(itertools.product(HoldState, HoldEvent)))
def test_every_event_has_one_outcome_or_changes_nothing(state, event):
    hold = Hold(request_id="r", state=state)
    if (state, event) in LEGAL:
        hold.advance(event)
        assert hold.state is LEGAL[state, event]
    else:
        with pytest.raises(IllegalTransition, match=f"{event.name} in state {state.name}"):
            hold.advance(event)
        assert hold.state is state
    assert HOLD_TRANSITIONS.get((state, event)) is LEGAL.get((state, event))


class Scene:
    """A pool of ten blocks, of which a sequence has computed three."""

    def __init__(self):
        self.pool = BlockPool(10)
        self.holds = Holds(self.pool)
        owner = Owner(OwnerKind.SEQUENCE, "r")
        credit = self.pool.grant(owner, 3)
        self.table = self.pool.allocate(owner, 3, credit)
        self.pool.waive(credit)
        self.holds.open(TICKET, "r")

    def owned(self):
        ledger = self.pool.ledger()
        assert ledger.violations == ()
        return {str(each.owner.kind): each.blocks for each in ledger.owners}


@pytest.mark.parametrize("order", [("let_go", "closed"), ("closed", "let_go")])
@pytest.mark.parametrize("kept", [True, False])
def test_blocks_are_free_with_the_second_key_and_not_before(order, kept):
    scene = Scene()
    if kept:
        scene.holds.keep(TICKET, scene.table)
    held = {"hold": 3} if kept else {"sequence": 3}
    assert scene.owned() == held
    getattr(scene.holds, order[0])(TICKET)
    kept_by = {"quarantine": 3} if kept and order[0] == "let_go" else held
    assert scene.owned() == kept_by and TICKET in scene.holds
    getattr(scene.holds, order[1])(TICKET)
    assert scene.owned() == ({} if kept else held)
    assert TICKET not in scene.holds and len(scene.holds) == 0


@pytest.mark.parametrize("event", ["let_go", "closed"])
def test_the_same_key_twice_opens_nothing(event):
    scene = Scene()
    scene.holds.keep(TICKET, scene.table)
    getattr(scene.holds, event)(TICKET)
    with pytest.raises(IllegalTransition):
        getattr(scene.holds, event)(TICKET)
    assert sum(scene.owned().values()) == 3


def test_the_table_is_spent_by_keeping_it_and_kept_once():
    scene = Scene()
    scene.holds.keep(TICKET, scene.table)
    assert scene.table.spent()
    with pytest.raises(AssertionError):
        scene.holds.keep(TICKET, scene.table)
    with pytest.raises(AssertionError):
        scene.holds.open(TICKET, "r")


@pytest.mark.parametrize("order", list(itertools.permutations(["let_go", "closed", "copied", "copied"])))
@pytest.mark.parametrize("kept", [True, False])
def test_blocks_that_are_being_copied_are_free_with_the_last_key_in_whatever_order(order, kept):
    scene = Scene()
    for _ in range(2):
        scene.holds.copying(TICKET)
    if kept:
        scene.holds.keep(TICKET, scene.table)
    held = {"hold": 3} if kept else {"sequence": 3}
    for turn, key in enumerate(order):
        assert scene.owned() == ({"quarantine": 3} if kept and "let_go" in order[:turn] else held)
        assert TICKET in scene.holds
        getattr(scene.holds, key)(TICKET)
    assert scene.owned() == ({} if kept else held) and TICKET not in scene.holds


def test_a_copy_ends_once():
    scene = Scene()
    scene.holds.copying(TICKET)
    scene.holds.copied(TICKET)
    with pytest.raises(AssertionError, match="never began"):
        scene.holds.copied(TICKET)
