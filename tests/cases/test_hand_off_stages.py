"""Every stage of a request, and what ends it there. Nothing sleeps, and every order can be repeated."""

from dataclasses import replace
from itertools import chain

import pytest

from kvtransfer import wire
from kvtransfer.events import Received
from tests.fakes.hash_model import golden
from tests.simulation.scenario import STARTED_S, Wish, quiet
from tests.simulation.world import World
from tests.workers.conftest import Bench, make_order

CHUNK_TOKENS = 3
PROMPT = tuple(range(1, 14))
LONG = PROMPT * 4
COUNT = 12
"""Tokens that the watched request asks for."""


class Watched:
    """A request told to both workers directly, up to some stage of it.

    busy: tokens that another request asks for, so that all blocks of the decode worker are taken; or 1, so that
    those of the prefill worker are, which alone has to do with it; 0 for no other request."""

    def __init__(self, blocks=40, busy=0):
        self.bench = Bench(blocks)
        self.p, self.d = self.bench.p, self.bench.d
        self.order = make_order(prompt=PROMPT, max_tokens=COUNT)
        self._ticket = self.bench.ticket(self.order)
        if busy:
            other = make_order("other", prompt=LONG if busy == 1 else PROMPT, max_tokens=busy)
            ticket = self.bench.ticket(other)
            if busy > 1:
                self.d.worker.reserve("other", other, ticket)
            self.p.worker.submit("other", other, None if busy == 1 else self.bench.hand_off(ticket))
            self.bench.turn()
        self.d.worker.reserve("g", self.order, self._ticket)

    def submit(self):
        self.p.worker.submit("g", self.order, self.bench.hand_off(self._ticket))
        return self

    def until(self, holds):
        """Go on until something is so, and not one turn further."""
        for _ in range(100):
            for side in (self.p, self.d):
                if holds():
                    return self
                side.turn()
        raise AssertionError("this moment never comes")

    def verified(self):
        """The transport of the decode worker has everything, and its step thread has not heard of it."""
        for side in (self.p, self.d):
            side.endpoint.turn(0)
        return any(isinstance(event, Received) for event in self.d.events)

    def left(self):
        """What the watched request has, by worker: blocks, and sequences that live."""
        left = {}
        for name, side in (("p", self.p), ("d", self.d)):
            owners = side.worker.ledger().owners
            blocks = sum(each.blocks for each in owners if each.owner.request_id == "r")
            view = side.core.view()
            sequences = sum(each.id[0] == "r" for each in (*view.waiting, *view.running))
            left |= {name: (blocks, sequences)} if blocks or sequences else {}
        return left

    def computed(self):
        return self.p.worker.tokens().computed, self.d.worker.tokens().computed


def queued():
    it = Watched(blocks=11, busy=32)
    assert it.d.worker.load(0).waiting_sequences == 1
    return it


def reserved():
    it = Watched()
    assert it.d.worker.ledger().promised > 0
    return it


def queued_at_the_prefill_worker():
    it = Watched(blocks=14, busy=1).submit()
    assert it.p.worker.load(0).waiting_sequences == 1
    return it


def chunk(number):
    it = Watched().submit()
    return it.until(lambda: it.p.worker.tokens().live == number * CHUNK_TOKENS)


def first_token():
    it = Watched().submit()
    return it.until(it.p.tokens)


def before_commit():
    it = first_token()
    for _ in range(10):
        if it.verified():
            return it
    raise AssertionError("nothing arrives")


def running():
    it = Watched().submit()
    return it.until(lambda: len(it.d.tokens()) == 3)


STAGES = {
    "queued": queued,
    "reserved": reserved,
    "queued at the prefill worker": queued_at_the_prefill_worker,
    **{f"chunk {number}": lambda number=number: chunk(number) for number in range(1, 5)},
    "first token": first_token,
    "before commit": before_commit,
    "running": running,
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_cancel_at_any_stage_frees_both_workers_within_one_step_and_is_acknowledged_each_time(stage):
    it = STAGES[stage]()
    computed = it.computed()
    for side in (it.p, it.d):
        side.worker.cancel("g", it.order.key)
        side.worker.cancel("g", it.order.key)
        side.assert_balanced()
        assert side.ends()[-2:] == [("r", 1, "CANCELLED")] * 2
    require_free(it, stage, computed)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gateway_that_is_gone_at_any_stage_leaves_nothing_after_one_step(stage):
    it = STAGES[stage]()
    computed = it.computed()
    for side in (it.p, it.d):
        side.worker.drop("g")
        side.assert_balanced()
    require_free(it, stage, computed)


def require_free(it, stage, computed):
    """After one step of each worker, and one more turn in which each end hears what the other has let go."""
    it.bench.turn(2)
    assert it.left() == {}
    if "queued" in stage:
        it.bench.settle()
        assert len(it.p.tokens("other") + it.d.tokens("other")) in (1, 32)
    else:
        assert it.p.owns_nothing() and it.d.owns_nothing()
        assert it.computed() == computed


def wish(prompt, count, at=STARTED_S, **changes):
    return Wish(gateway="g0", at=at, prompt=prompt, max_tokens=count, **changes)


def world_of(deadline_s=None):
    """A request that queues at the decode worker behind another one. The workers are slower than the gateway."""
    other, late = wish(PROMPT[::-1], 19), wish(PROMPT, COUNT, STARTED_S + 0.004, deadline_s=deadline_s)
    scenario = quiet([other, late], blocks=8, budget_tokens=CHUNK_TOKENS)
    return World(replace(scenario, lags_s={"p0": 0.004, "d0": 0.004, "g0": 0.0002}))


def stage_of(world):
    """What the second request is at, as one sees from outside."""
    client, p, d = world.clients[1], world.processes["p0"], world.processes["d0"]
    if client.tokens:
        return "first token" if len(client.tokens) == 1 else "running"
    if d.worker.load(0).waiting_sequences:
        return "queued"
    for view in p.core.view().running:
        if view.id[0] in client.wire_ids:
            return f"chunk {(len(PROMPT) - view.uncomputed) // CHUNK_TOKENS}"
    return "reserved" if world.clients[0].outcome is not None and not p.worker.tokens().live else "between"


NAMED = {"queued", "reserved", *(f"chunk {number}" for number in range(1, 5)), "first token", "running"}


def test_a_client_that_goes_away_at_any_stage_leaves_nothing_anywhere():
    seen = set()
    for stage in sorted(NAMED):
        world = world_of()
        with world.begun():
            world.until(lambda stage=stage, world=world: stage_of(world) == stage)
            seen.add(stage_of(world))
            assert world.cancel(1)
            world.finish()
        assert [client.outcome for client in world.clients] == ["length", "cancelled"]
    assert seen == NAMED


def test_a_deadline_at_any_stage_leaves_nothing_anywhere():
    """The world checks that it is kept to the millisecond, and that its blocks are gone soon after."""
    seen, coarse, fine = set(), (0.0023 * n for n in range(1, 52)), (0.12 + 0.0001 * n for n in range(1000))
    for deadline_s in chain(coarse, fine):
        world = world_of(deadline_s=deadline_s)
        with world.begun():
            while world.clients[1].outcome is None:
                stage = stage_of(world)
                world.step()
            world.finish()
        assert [client.outcome for client in world.clients] == ["length", "DeadlineExpired"]
        seen.add(stage)
        if seen >= NAMED:
            return
    pytest.fail(f"no deadline fell into {NAMED - seen}")


@pytest.mark.parametrize("seed", range(4))
def test_what_a_thawed_prefill_worker_still_sends_is_refused_and_counted(seed):
    """Its stream to the gateway broke while it was frozen. It reaches the decode worker, and does not hear it."""
    world = World(
        quiet([wish(LONG, COUNT)], prefills=2, budget_tokens=CHUNK_TOKENS, seed=seed, lease_ms=60_000)
    )
    with world.begun():
        target = world.processes["d0"].endpoint
        world.until(lambda: target.counters().get("blocks_placed", 0) >= 2)
        frozen = next(
            world.processes[name] for name in ("p0", "p1") if world.processes[name].worker.tokens().live
        )
        frozen.freeze()
        world.network.script = deaf(frozen.epoch)
        for stream in world.streams.between("g0", frozen.name):
            world.streams.cut(stream, 0.0, 1.0)
        world.until(lambda: world.clients[0].outcome == "length")
        placed = target.counters()["blocks_placed"]
        frozen.thaw()
        world.until(lambda: target.counters().get("late", 0) > 0)
        world.finish()
        assert target.counters()["blocks_placed"] == placed
    assert world.clients[0].attempts == 2
    assert list(world.clients[0].tokens) == golden(list(LONG), COUNT)


def deaf(epoch):
    """A network in which this start of a source hears nothing."""

    def script(packet):
        lost = not packet.to_target and wire.decode(packet.header).source_epoch == epoch
        return () if lost else (packet,)

    return script
