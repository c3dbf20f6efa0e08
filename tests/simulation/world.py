"""One history: processes, networks, clients and faults on one clock, in an order that follows from the seed alone."""

import random
from collections import Counter
from contextlib import contextmanager
from functools import partial

from engine.sequence import PREEMPTIONS_MAX, State
from tests.fakes.hash_model import POSITION_BYTES, hash_layout
from tests.simulation.agenda import Agenda
from tests.simulation.client import Client
from tests.simulation.data_network import DataNetwork
from tests.simulation.faults import PACKET_KINDS, Kind
from tests.simulation.gateways import GatewayProcess
from tests.simulation.invariants import watching
from tests.simulation.nemesis import STREAM_NOTICE_S, Nemesis
from tests.simulation.scenario import BLOCK
from tests.simulation.streams import Streams
from tests.simulation.workers import DecodeProcess, PrefillProcess

LOOK_S = 0.2
ALL_ENDED_WITHIN_S = 50.0
CHOICE_ENDED_WITHIN_S = 20.0
"""More for each choice: in a small pool they go one by one, and each may lose attempts a lease long."""
COUNTED_AS = {"I9": "leaks", "I11": "hangs", "I12": "hangs"}
DISTURBING = set(Kind) - {*PACKET_KINDS, Kind.CANCEL}
RECOUNT_SHARE = 0.06
LEASE_SLACK_S = 0.03
"""An end looks at its timers every 20 ms."""


class Violation(AssertionError):
    """rule: the number of the invariant in the design."""

    def __init__(self, rule, what):
        super().__init__(f"{rule}: {what}")
        self.rule = rule


class World:
    def __init__(self, scenario):
        self.scenario = scenario
        self.dice = random.Random(f"order {scenario.seed}")
        self.agenda = Agenda()
        self.counts = Counter()
        self.failure = None
        self.layout = hash_layout(BLOCK)
        self.streams = Streams(self.agenda, self.dice, scenario.stream_latency_s)
        self.nemesis = Nemesis(self)
        self.network = DataNetwork(
            self.agenda,
            self.dice,
            self.nemesis.script,
            latency_s=scenario.data_latency_s,
            capacity_packets=scenario.capacity_packets,
        )
        self.processes = {}
        self.clients = [Client(self, number, wish) for number, wish in enumerate(scenario.wishes)]
        self.present = [client for client in self.clients if client.number not in scenario.absent]
        self._by_wire_id = {}
        self._commits = set()
        self.heard = {}
        self._disturbances = [fault for fault in scenario.faults if fault.kind in DISTURBING]
        self._gone_within_s = self._promised_end_s()

    def run(self):
        """From the first start to the end of all things. Raises Violation."""
        with self.begun():
            self.finish()
        return self.counts

    @contextmanager
    def begun(self):
        """Everybody has started, and nothing has happened yet."""
        with watching(self):
            try:
                for name in self.scenario.processes():
                    self.start(name)
                for client in self.present:
                    self.agenda.at(client.wish.at, partial(self._submit, client))
                yield self
            finally:
                for process in self.processes.values():
                    process.end()

    def until(self, condition):
        """Go on until something is so."""
        while not condition():
            self.step()
            if self.agenda.now > ALL_ENDED_WITHIN_S:
                self.fail("I12", "what the scene waits for does not happen")

    def finish(self):
        """Go on until all is over. Raises Violation."""
        look_at = LOOK_S
        choices = sum(len(client.choices) for client in self.present)
        patience_s = ALL_ENDED_WITHIN_S + CHOICE_ENDED_WITHIN_S * choices
        quiet_from = max((self.nemesis.over_at, *(client.wish.at for client in self.present)))
        while True:
            self.step()
            if self.agenda.now >= look_at:
                look_at = self.agenda.now + LOOK_S
                if self.agenda.now > quiet_from and self._all_over():
                    return
                if self.agenda.now > quiet_from + patience_s:
                    self._fail_hanging()

    def start(self, name):
        """A process starts, at the same address as the one before it."""
        scenario = self.scenario
        pace = {"rate": scenario.rates[name], "lag_s": scenario.lags_s[name]}
        if name in scenario.gateways:
            process = GatewayProcess(self, name, scenario.prefills(), scenario.decodes(), **pace)
        else:
            kind = PrefillProcess if name in scenario.prefills() else DecodeProcess
            process = kind(self, name, scenario.blocks[name], **pace)
        self.processes[name] = process

    def alive(self, name):
        """The process of this name, or None."""
        return self.processes.get(name)

    def kill(self, name, *, stream_notice_s, data_notice_s):
        process = self.processes.pop(name)
        for client in self.clients:
            if client.gateway is process and client.outcome is None:
                client.outcome = "broken"
                self.ended(client)
        for stream in self.streams.of(process):
            self.streams.cut(stream, stream_notice_s, stream_notice_s)
        process.end()
        self.network.bury(process, data_notice_s)

    def cancel(self, number):
        """A client goes away; False when it has its answer already."""
        client = self.clients[number]
        if client.task is None or client.outcome is not None:
            return False
        client.gateway.cancel(client)
        return True

    def fail(self, rule, what):
        """Raises Violation, and keeps it in case that somebody catches it."""
        self.counts[COUNTED_AS.get(rule, rule)] += 1
        violation = Violation(rule, what)
        self.failure = self.failure or violation
        raise violation

    def crashed(self, error):
        """Something that nothing should raise was raised where nobody hears it."""
        self.failure = self.failure or error

    def check(self, worker):
        """I1, I2, I14: cheap each time, and now and then a full recount."""
        if self.dice.random() < RECOUNT_SHARE:
            self._recount(worker)

    def check_leases(self, worker):
        """I11: nobody waits for the other end of a transfer longer than the lease."""
        longest_s = self.scenario.lease_ms / 1000 + LEASE_SLACK_S
        for ticket_id in worker.endpoint.waiting:
            heard = self.heard.get((worker.identity, ticket_id), self.agenda.now)
            if (self.agenda.now - heard) * worker.rate > longest_s:
                self.fail("I11", f"{worker.name} has waited since {heard} for the other end of a transfer")

    def dialled_by(self, peer):
        """Who really is at the other end of a connection."""
        return self.network.dialled[peer]

    def attempted(self, key, request_id):
        client = self.clients[int(request_id)]
        before, name = client.wire_ids, key.request_id
        number = 1 + before.get(name, before.get(name.rpartition(".")[0], 0))
        if key.attempt != number:
            self.fail("I5", f"attempt {number} of request {request_id} is called {key}")
        client.wire_ids[name] = number
        self._by_wire_id[name] = client

    def committed(self, worker, ticket, first_tokens, kv):
        """I5, I7: one commit for each attempt, and of the right bytes."""
        self.counts["commits"] += 1
        attempt = (ticket.request_id, ticket.attempt)
        if attempt in self._commits:
            self.fail("I5", f"{attempt} is committed twice")
        self._commits.add(attempt)
        client = self._by_wire_id[ticket.request_id]
        prompt = len(client.wish.prompt)
        held = ticket.first_block * BLOCK * POSITION_BYTES
        sent = ticket.num_tokens * POSITION_BYTES - held
        self.counts["blocks not sent"] += ticket.first_block
        self.counts["choices committed"] += len(first_tokens)
        right = {choice: client.choices[choice].answer for choice, _ in first_tokens}
        if client.wish.beam is not None:
            self.counts["searches committed"] += 1
            right = {None: client.choices[0].answer}
        said = all(
            right[choice].tokens[ticket.num_tokens - prompt] == first for choice, first in first_tokens
        )
        if not said or any(kv[:sent] != answer.kv[held : held + sent] for answer in right.values()):
            self.counts["wrong commits"] += 1
            self.fail("I7", f"{worker.name} commits wrong KV for request {client.number}")

    def preempted(self, worker, sequence):
        """A request is given up a bounded number of times. What a lost worker did, nobody may know."""
        client = self._by_wire_id[sequence.id[0]]
        client.preemptions += 1
        self.counts["swapped out" if sequence.state is State.PREEMPTED else "given back"] += 1
        most = PREEMPTIONS_MAX * len(client.choices) * (client.attempts if self._disturbances else 1)
        if sequence.preemptions > PREEMPTIONS_MAX or client.preemptions > most:
            self.fail("I12", f"{worker.name} gives up {sequence.id} for the {client.preemptions}th time")

    def salt_of(self, wire_id):
        return self._by_wire_id[wire_id].wish.salt

    def ended(self, client):
        self.counts[f"ended {client.outcome}"] += 1
        self.agenda.after(self._gone_within_s, partial(self._check_gone, client))

    def calm(self, seconds, name=None):
        """Whether nothing happened to a process, or to anybody, that ended less than so long ago."""
        since = self.agenda.now - seconds
        return not any(
            fault.at <= self.agenda.now and fault.over_at() >= since and name in (None, *fault.who)
            for fault in self._disturbances
        )

    def _check_gone(self, client):
        """I9: what has ended owns nothing any more, once leases are over and the world was calm for as long."""
        if not self.calm(self._gone_within_s):
            self.agenda.after(LOOK_S, partial(self._check_gone, client))
            return
        for name, process in self.processes.items():
            if name not in self.scenario.gateways and process.pool.owned() & client.wire_ids.keys():
                self.fail("I9", f"{name} still has blocks of request {client.number}: {process.left()}")

    def _promised_end_s(self):
        """How long the blocks of a request may outlive it: when nothing is lost on the way a few round trips and one
        sign of life, since a last word may have found no room; else leases, and the time that a silent peer is
        given."""
        scenario = self.scenario
        slowest_s = max(scenario.lags_s.values()) + scenario.data_latency_s + scenario.stream_latency_s
        narrow = min(scenario.capacity_packets, scenario.remembered_max) < scenario.choices()
        packets_lost = any(fault.kind in PACKET_KINDS for fault in scenario.faults)
        lossy = narrow or packets_lost or self._disturbances
        lease_s = scenario.lease_ms / 1000
        return 0.1 + 20 * slowest_s + (2.4 * lease_s + STREAM_NOTICE_S if lossy else 0.4 * lease_s)

    def _submit(self, client):
        gateway = self.processes.get(client.wish.gateway)
        if gateway is None:
            client.end("broken")
        else:
            client.gateway = gateway
            gateway.submit(client)

    def step(self):
        if not self.agenda.step():
            self.fail("I11", "nothing will ever happen again")
        if self.failure is not None:
            raise self.failure

    def _all_over(self):
        """Everybody has an answer, nobody owns or books anything, and gateways know what is cached where."""
        if any(client.outcome is None for client in self.present) or self._owing() or self._misinformed():
            return False
        for client in self.present:
            client.check_end()
        for process in self.processes.values():
            if process.name not in self.scenario.gateways:
                self._recount(process)
        return True

    def _owing(self):
        """What is left of the requests, by process."""
        owing = {}
        for name, process in self.processes.items():
            left = process.left()
            if left:
                owing[name] = left
        return owing

    def _misinformed(self):
        """(gateway, worker): pairs of which the first does not know what the second has cached."""
        return [
            (name, record.address)
            for name in self.scenario.gateways
            if name in self.processes
            for record in self.processes[name].attached()
            if record.address in self.processes
            and not _same_hashes(record.prefixes, self.processes[record.address].pool.index)
        ]

    def _fail_hanging(self):
        waiting = [client.number for client in self.present if client.outcome is None]
        if waiting:
            self.fail("I12", f"requests {waiting} do not end; owing: {self._owing()}")
        if self._misinformed():
            self.fail(
                "I14", f"gateways that do not know what their workers have cached: {self._misinformed()}"
            )
        self.fail("I9", f"all requests have ended, and still {self._owing()}")

    def _recount(self, worker):
        ledger = worker.worker.ledger()
        whole = ledger.free + ledger.cached + ledger.owned + ledger.quarantined
        if not worker.worker.tokens().balanced():
            self.fail("I14", f"{worker.name}: tokens do not add up: {worker.worker.tokens()}")
        if ledger.violations or whole != ledger.total:
            self.fail("I1", f"{worker.name}: {ledger}")
        if ledger.owned + ledger.quarantined != sum(map(bool, worker.pool.owners)):
            self.fail("I2", f"{worker.name}: {ledger} and {worker.pool.owners}")
        load = worker.worker.load(0)
        available = ledger.free + ledger.cached - ledger.promised
        if (load.free_blocks, load.total_blocks) != (available, ledger.total):
            self.fail("I14", f"{worker.name} reports {load} and has {ledger}")


def _same_hashes(prefixes, index):
    return prefixes.known and len(prefixes) == len(index) and all(each in prefixes for each in index.hashes())
