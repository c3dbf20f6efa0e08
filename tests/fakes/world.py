"""One process that plays gateway, workers, network and clock, in an order that follows from a seed alone.

The workers, the transfers, the router and the attempts are the real ones; the engine computes hashes; the streams
between gateway and workers are queues; nothing sleeps. Every random choice comes from World.dice.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from crossdock.worker.v1 import worker_pb2 as pb
from decode_worker.policy import DecodePolicy
from decode_worker.servicer import DecodeServicer
from decode_worker.worker import DecodeWorker
from engine.cache.block_pool import BlockPool
from engine.cache.kv_cache import KVCache
from engine.core import EngineCore
from engine.sampling import Sampler
from gateway.attempt import Attempt, AttemptLost, Target
from gateway.journal import Journal
from gateway.mailbox import Delivery, Mailbox, Turnstile, WorkerLost
from gateway.prefix_map import PrefixMap
from gateway.request import Request, Sampling, Stop
from gateway.router import Route, pick
from gateway.worker_pool import WorkerRecord, WorkerState
from kvtransfer.desk import End, TicketDesk
from kvtransfer.identity import Identity
from kvtransfer.memory_transport import MemoryNetwork, deliver
from kvtransfer.source_endpoint import TransferSource
from kvtransfer.target_endpoint import TransferTarget
from kvtransfer.ticket import mint
from prefill_worker.policy import PrefillPolicy
from prefill_worker.servicer import PrefillServicer
from prefill_worker.worker import PrefillWorker
from service.errors import InvalidRequest
from service.load import WorkerLoad
from service.orders import AttemptKey, OrderLimits
from service.reports import decode, encode
from tests.fakes.hash_model import VOCAB, HashRunner, hash_layout

KEY = b"0123456789abcdef0123456789abcdef"
LEASE_MS = 3000
TICK_S = 0.002
GATEWAY = "gateway/1"
TOKENS_MAX = 4096


class _Pool:
    """Stands for the pool behind a WorkerRecord."""

    def refusal(self, welcome):
        return None

    def changed(self):
        pass


class _Wire:
    """Stands for the stream from the gateway to one worker."""

    def __init__(self):
        self.messages = deque()

    def send(self, message):
        self.messages.append(message)


@dataclass
class Node:
    """One worker process."""

    record: WorkerRecord
    wire: _Wire
    core: EngineCore
    worker: object
    endpoint: object
    servicer: object
    response: type
    events: deque = field(default_factory=deque)
    reports: list = field(default_factory=list)
    outbound: deque = field(default_factory=deque)
    steps: int = 0

    def turn(self, now):
        """One turn of its threads: transport, inbox, a step."""
        self.endpoint.turn(0)
        while self.events:
            self.worker.on_transfer(self.events.popleft())
        while self.wire.messages:
            self._take(self.wire.messages.popleft())
        if not self.core.idle():
            self.worker.on_step(self.core.step(now))
            self.steps += 1
        self.endpoint.turn(0)
        reports, self.reports[:] = list(self.reports), []
        if reports:
            self.outbound += encode([report for _, report in reports], self.steps, self.response)
        assert self.worker.tokens().balanced(), self.worker.tokens()
        ledger = self.worker.ledger()
        assert ledger.violations == (), ledger
        assert ledger.free + ledger.cached + ledger.owned + ledger.quarantined == ledger.total

    def _take(self, message):
        if message.WhichOneof("message") == "cancel":
            key = AttemptKey(request_id=message.cancel.request_id, attempt=message.cancel.attempt)
            self.worker.cancel(GATEWAY, key)
            return
        submission = getattr(self.servicer, "_submission", None) or self.servicer._action
        try:
            submission(GATEWAY, message)()
        except InvalidRequest as error:
            raise AssertionError(f"the gateway accepted what a worker refuses: {error}") from error


@dataclass
class Client:
    """One request, its answer so far, and what became of it."""

    request: Request
    journal: Journal
    attempt: Attempt | None = None
    attempts: int = 0
    tokens: list = field(default_factory=list)
    outcome: str | None = None
    cancel_at: float | None = None


class World:
    """blocks: (per prefill worker, per decode worker). script: what the data network does to messages. ahead: whether
    decode workers begin a step before they have read what the last one drew."""

    def __init__(
        self, seed, *, prefills=1, decodes=1, blocks=(64, 64), script=deliver, budget_tokens=7, ahead=False
    ):
        self.ahead = ahead
        self.dice = random.Random(seed)
        self.now = 0.0
        self.network = MemoryNetwork(script)
        self.clients = []
        self.layout = hash_layout()
        self.prefills = [self._prefill(f"p{n}", blocks[0], budget_tokens) for n in range(prefills)]
        self.decodes = [self._decode(f"d{n}", blocks[1]) for n in range(decodes)]

    def submit(self, prompt, count, *, temperature=0.0, seed=0, stop=frozenset(), cancel_at=None):
        number = len(self.clients)
        request = Request(
            id=f"r{number}",
            model="hash",
            prompt_token_ids=tuple(prompt),
            sampling=Sampling(
                temperature=temperature, top_p=1.0, top_k=0, min_p=0.0, seed=seed, logprobs=None
            ),
            stop=Stop(max_tokens=count, min_tokens=0, token_ids=stop, strings=(), include_string=False),
            include_special_tokens=False,
            deadline=None,
        )
        client = Client(request=request, journal=Journal(request, f"w{number}"), cancel_at=cancel_at)
        self.clients.append(client)
        return client

    def run(self, seconds=120.0):
        """Until every request has ended and nothing is owned; fails when that takes longer on the virtual clock."""
        while self.now < seconds:
            self.turn()
            if all(client.outcome for client in self.clients) and self.idle():
                return
        raise AssertionError(
            f"not idle after {seconds} s: {[c.outcome for c in self.clients]} {self.owners()}"
        )

    def turn(self):
        """Every actor once, in random order; some are left out, as a busy machine would."""
        actors = [*self.prefills, *self.decodes, *self.clients]
        self.dice.shuffle(actors)
        for actor in actors:
            if self.dice.random() < 0.2:
                continue
            if isinstance(actor, Client):
                self._serve(actor)
            else:
                actor.turn(self.now)
                self._post(actor)
        self.now += TICK_S

    def idle(self):
        nodes = [*self.prefills, *self.decodes]
        quiet = all(not node.wire.messages and not node.events and node.core.idle() for node in nodes)
        return quiet and not any(self.owners().values())

    def owners(self):
        ledgers = {node.record.worker_id: node.worker.ledger() for node in (*self.prefills, *self.decodes)}
        return {name: ledger.owners for name, ledger in ledgers.items() if ledger.owned or ledger.promised}

    def _serve(self, client):
        if client.outcome is not None:
            return
        if client.cancel_at is not None and self.now >= client.cancel_at:
            if client.attempt is not None:
                client.attempt.close()
            client.outcome = "cancelled"
        elif client.attempt is None:
            self._begin(client)

    def _begin(self, client):
        client.attempts += 1
        client.journal.begin()
        order = client.journal.order(client.attempts)
        views = [[node.record.view() for node in nodes] for nodes in (self.prefills, self.decodes)]
        route = pick(*views, order)
        assert isinstance(route, Route) and route.prefill is not None, route
        source = next(node.record for node in self.prefills if node.record.address == route.prefill)
        target = next((node.record for node in self.decodes if node.record.address == route.decode), source)
        source.picked = target.picked = sum(each.attempts for each in self.clients)
        right = None
        if client.journal.remaining() > 1:
            ticket = self._mint(order, source.welcome, target.welcome)
            right = Target(worker=target, ticket=ticket, ticket_key=KEY)
        mailbox = Mailbox(Turnstile())
        client.attempt = Attempt(
            journals=[client.journal], order=order, prefill=source, target=right, mailbox=mailbox
        )
        client.attempt.begin()

    def _mint(self, order, source, target):
        return mint(
            self.dice.randbytes,
            request_id=order.key.request_id,
            attempt=order.key.attempt,
            source=Identity(worker_id=source.worker_id, epoch=source.epoch),
            target=Identity(worker_id=target.worker_id, epoch=target.epoch),
            layout_fingerprint=self.layout.fingerprint(),
            num_tokens=len(order.token_ids),
            first_block=0,
            num_blocks=self.layout.blocks_for(len(order.token_ids)),
            lease_ms=LEASE_MS,
        )

    def _post(self, node):
        """Bring a worker's reports to the attempts they are about."""
        while node.outbound:
            message = node.outbound.popleft()
            for report in decode(message):
                for client in self.clients:
                    key = AttemptKey(request_id=client.journal.wire_id, attempt=client.attempts)
                    if client.attempt is not None and client.outcome is None and report.key == key:
                        self._hear(client, node.record.address, report)

    def _hear(self, client, sender, letter):
        batches = client.attempt.hear([Delivery(sender=sender, letter=letter)])
        for token in (token for batch in batches for token in batch.tokens):
            assert token.position == len(client.tokens), "each position once, without gap"
            client.tokens.append(token.token_id)
        if client.journal.ended:
            client.outcome = batches[-1].end.name.lower()
            client.attempt.close()
        elif client.attempt.failure is not None:
            assert isinstance(client.attempt.failure, AttemptLost), client.attempt.failure
            client.attempt.close()
            client.attempt = None

    def lose(self, client, address):
        """The gateway's stream to a worker broke, as seen by one attempt."""
        self._hear(client, address, WorkerLost())

    def _prefill(self, name, blocks, budget_tokens):
        policy = PrefillPolicy(budget_tokens=budget_tokens, seats=8)
        core, cache = self._engine(blocks, policy)
        events, reports = deque(), []
        identity = Identity(worker_id=name, epoch=self.dice.getrandbits(32))
        source = TransferSource(
            identity=identity,
            layout=self.layout,
            transport=self.network.source(),
            emit=events.append,
            clock=self.clock,
        )
        worker = PrefillWorker(
            core=core,
            cache=cache,
            source=source,
            tell=lambda gateway, report: reports.append((gateway, report)),
            clock=self.clock,
            queue_requests_max=100,
        )
        servicer = PrefillServicer(None, None, worker, self._limits(), self._desk(identity, End.SOURCE))
        wire, record = self._record(name, identity, blocks, ())
        response = pb.PrefillServiceAttachResponse
        return Node(record, wire, core, worker, source, servicer, response, events=events, reports=reports)

    def _decode(self, name, blocks):
        policy = DecodePolicy(budget_tokens=64, seats=8)
        core, cache = self._engine(blocks, policy, ahead=self.ahead)
        events, reports = deque(), []
        identity = Identity(worker_id=name, epoch=self.dice.getrandbits(32))
        transport = self.network.listen(f"mem://{name}")
        target = TransferTarget(
            identity=identity,
            layout=self.layout,
            key=KEY,
            transport=transport,
            emit=events.append,
            clock=self.clock,
        )
        worker = DecodeWorker(
            core=core,
            policy=policy,
            cache=cache,
            target=target,
            vocab_size=VOCAB,
            tell=lambda gateway, report: reports.append((gateway, report)),
            clock=self.clock,
            queue_requests_max=100,
        )
        servicer = DecodeServicer(None, None, worker, self._limits(), self._desk(identity, End.TARGET))
        wire, record = self._record(name, identity, blocks, target.endpoints())
        response = pb.DecodeServiceAttachResponse
        return Node(record, wire, core, worker, target, servicer, response, events=events, reports=reports)

    def clock(self):
        return self.now

    def _engine(self, blocks, policy, *, ahead=False):
        cache = KVCache(self.layout, blocks)
        runner = HashRunner(cache)
        core = EngineCore(
            pool=BlockPool(blocks),
            block_size=self.layout.block_size,
            runner=runner,
            sampler=Sampler(),
            policy=policy,
            ahead=ahead,
        )
        return core, cache

    def _record(self, name, identity, blocks, endpoints):
        record = WorkerRecord.__new__(WorkerRecord)
        welcome = pb.Welcome(
            worker_id=name,
            epoch=identity.epoch,
            layout_fingerprint=self.layout.fingerprint(),
            kv_endpoints=endpoints,
            block_size=self.layout.block_size,
            max_model_len=TOKENS_MAX,
            total_blocks=blocks,
            max_num_seqs=8,
        )
        wire = _Wire()
        for key, value in {
            "address": name,
            "state": WorkerState.READY,
            "welcome": welcome,
            "load": WorkerLoad(free_blocks=1, total_blocks=1),
            "picked": 0,
            "frozen": False,
            "prefixes": PrefixMap(blocks),
            "attachment": wire,
            "_pool": _Pool(),
            "_bookings": {},
        }.items():
            setattr(record, key, value)
        return wire, record

    def _limits(self):
        return OrderLimits(vocab_size=VOCAB, tokens_max=TOKENS_MAX)

    def _desk(self, identity, end):
        return TicketDesk(
            key=KEY,
            identity=identity,
            end=end,
            layout_fingerprint=self.layout.fingerprint(),
            block_size=self.layout.block_size,
        )
