"""A prefill and a decode worker over an in-process network, told things directly; nothing stands between."""

from collections import deque
from dataclasses import replace
from itertools import count

import pytest

from decode_worker.policy import DecodePolicy
from decode_worker.worker import DecodeWorker
from engine.cache.block_pool import BlockPool
from engine.cache.copying import Copying
from engine.cache.kv_cache import KVCache
from engine.core import EngineCore
from engine.sampling import Sampler
from kvtransfer.identity import Identity
from kvtransfer.memory_transport import MemoryNetwork, deliver
from kvtransfer.source_endpoint import TransferSource
from kvtransfer.source_io import SourceLimits
from kvtransfer.target_endpoint import TransferTarget
from kvtransfer.ticket import mint, seal
from prefill_worker.policy import PrefillPolicy
from prefill_worker.worker import HandOff, PrefillWorker
from service.orders import AttemptKey, Choice, SequenceOrder
from service.reports import EndedReport, TokenReport, TokenReports
from tests.fakes.hash_model import VOCAB, HashRunner, hash_layout

KEY = bytes(range(32))
LAYOUT = hash_layout()
P, D = Identity(worker_id="p", epoch=1), Identity(worker_id="d", epoch=2)


def make_order(request_id="r", attempt=1, prompt=(1, 2, 3, 4, 5), max_tokens=6, **changes):
    fields = {
        "key": AttemptKey(request_id=request_id, attempt=attempt),
        "choices": (Choice(index=0, seed=0),),
        "token_ids": tuple(prompt),
        "prompt_tokens": len(prompt),
        "max_tokens": max_tokens,
        "min_tokens": 0,
        "stop_token_ids": frozenset(),
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "logprobs": None,
    }
    return SequenceOrder(**{**fields, **changes})


class Side:
    """One worker with its engine and its end of the hand-off. heard: (gateway, report) pairs, in order. copying: goes
    on by a part with each turn, unless a test has it stand still."""

    def __init__(self, bench, blocks, policy, cache_of):
        self.bench, self.heard, self.events = bench, [], deque()
        self.take_event = self.events.append
        self.cache = cache_of(LAYOUT, blocks)
        self.copying, self.copies_stand = Copying(self.events.append, None), False
        self.cache.copy_beside(self.copying.begin)
        self.core = EngineCore(
            pool=BlockPool(blocks),
            block_size=LAYOUT.block_size,
            runner=HashRunner(self.cache),
            sampler=Sampler(),
            policy=policy,
        )
        self.common = {
            "core": self.core,
            "cache": self.cache,
            "tell": self.hear,
            "clock": bench.clock,
            "queue_requests_max": 8,
        }

    def emit(self, event):
        """The transport says something."""
        self.take_event(event)

    def hear(self, gateway, report):
        """Tokens one by one."""
        each = report.each() if isinstance(report, TokenReports) else [report]
        self.heard += [(gateway, one) for one in each]

    def take_events(self):
        """What the transport has said, to the worker, and what waited for a copy; the ledger balances after each."""
        while self.events:
            event = self.events.popleft()
            if callable(event):
                event()
            else:
                self.worker.on_transfer(event)
            self.assert_balanced()

    def turn(self):
        self.endpoint.turn(0)
        if self.copying.due() and not self.copies_stand:
            self.copying.turn()
        self.take_events()
        if not self.core.idle():
            self.worker.on_step(self.core.step(self.bench.clock()))
            self.assert_balanced()

    def assert_balanced(self):
        ledger = self.worker.ledger()
        assert ledger.violations == ()
        assert ledger.free + ledger.cached + ledger.owned + ledger.quarantined == ledger.total

    def owns_nothing(self):
        ledger = self.worker.ledger()
        return ledger.owned == ledger.promised == ledger.quarantined == 0

    def ends(self, gateway="g"):
        """(request, attempt, cause) of what has ended here, in order."""
        return [
            (each.key.request_id, each.key.attempt, each.cause.name)
            for owner, each in self.heard
            if owner == gateway and isinstance(each, EndedReport)
        ]

    def tokens(self, request_id="r", attempt=None):
        return [
            each.token_id
            for _, each in self.heard
            if isinstance(each, TokenReport)
            and each.key.request_id == request_id
            and attempt in (None, each.key.attempt)
        ]


class Bench:
    """blocks: of each worker. script: what the network does to messages. cache_of: makes the caches."""

    def __init__(self, blocks=40, script=deliver, cache_of=KVCache):
        self.now, self._serial = 0.0, count(1)
        network = MemoryNetwork(script)
        self.p = Side(self, blocks, PrefillPolicy(budget_tokens=3, seats=4), cache_of)
        self.d = Side(self, blocks, policy := DecodePolicy(budget_tokens=16, seats=4), cache_of)
        shared = {"layout": LAYOUT, "clock": self.clock}
        self.p.endpoint = TransferSource(
            identity=P,
            transport=network.source(),
            emit=self.p.emit,
            # Every block is a message of its own: each can be lost or kept by itself.
            limits=SourceLimits(run_bytes_max=1),
            **shared,
        )
        self.d.endpoint = TransferTarget(
            identity=D,
            key=KEY,
            transport=network.listen("mem://d"),
            emit=self.d.emit,
            **shared,
        )
        self.p.worker = PrefillWorker(source=self.p.endpoint, **self.p.common)
        self.d.worker = DecodeWorker(target=self.d.endpoint, policy=policy, vocab_size=VOCAB, **self.d.common)

    def clock(self):
        return self.now

    def ticket(self, order, **changes):
        tokens = len(order.token_ids)
        ticket = mint(
            lambda size: next(self._serial).to_bytes(size, "big"),
            request_id=order.key.request_id,
            attempt=order.key.attempt,
            source=P,
            target=D,
            layout_fingerprint=LAYOUT.fingerprint(),
            num_tokens=tokens,
            first_block=0,
            num_blocks=LAYOUT.blocks_for(tokens),
            lease_ms=1000,
        )
        return replace(ticket, **changes)

    def hand_off(self, ticket, endpoints=("mem://d",)):
        return HandOff(ticket=ticket, sealed=seal(ticket, KEY), endpoints=tuple(endpoints))

    def split(self, order, constraint=lambda: ()):
        """The prompt at one worker, the rest at the other. constraint: makes what an order's guide allows, anew for
        each."""
        ticket = self.ticket(order)
        self.d.worker.reserve("g", order, ticket, *constraint())
        self.p.worker.submit("g", order, self.hand_off(ticket), *constraint())

    def alone(self, order, constraint=lambda: (), gateway="g"):
        """All of it at the worker that generates."""
        self.d.worker.reserve(gateway, order, None, *constraint())

    def token_ids(self, choice=0):
        """Of one choice, as both workers have said it, in order."""
        said = [each for side in (self.p, self.d) for _, each in side.heard if isinstance(each, TokenReport)]
        mine = sorted((each.position, each.token_id) for each in said if each.choice == choice)
        return [token for _, token in mine]

    def turn(self, turns=1, step_s=0.01):
        for _ in range(turns):
            self.p.turn()
            self.d.turn()
            self.now += step_s

    def settle(self):
        """Until both engines are idle and nothing is owned."""
        self.until(lambda: self.p.owns_nothing() and self.d.owns_nothing() and self.idle())

    def until(self, holds):
        """Fails when that takes longer than ten leases."""
        end = self.now + 10.0
        while not holds():
            assert self.now < end, (self.p.worker.ledger(), self.d.worker.ledger())
            self.turn()

    def idle(self):
        return self.p.core.idle() and self.d.core.idle() and not self.p.events and not self.d.events


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def bench_of():
    return Bench


@pytest.fixture
def order_of():
    return make_order
