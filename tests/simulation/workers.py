"""The worker processes of a history, wired as `commands.worker` wires them, over a virtual loop and clock and the
simulated networks. Everything that decides is production's.
"""

from functools import partial

from crossdock.worker.v1 import worker_pb2 as pb
from decode_worker.policy import DecodePolicy
from decode_worker.servicer import DecodeServicer
from decode_worker.worker import DecodeWorker
from engine.cache.copying import Copying
from engine.cache.kv_cache import KVCache
from engine.cache.swap_space import SwapSpace
from engine.loop import EngineLoop, InboxFull
from engine.sampling import Sampler
from engine.scheduling.headroom import Headroom
from kvtransfer.desk import End, TicketDesk
from kvtransfer.errors import TicketRefused
from kvtransfer.identity import Identity
from kvtransfer.source_io import SourceLimits
from kvtransfer.target_io import TargetLimits
from prefill_worker.policy import PrefillPolicy
from prefill_worker.servicer import PrefillServicer
from prefill_worker.worker import PrefillWorker
from service.errors import InvalidRequest
from service.orders import OrderLimits
from service.reports import EndCause
from service.worker_rim import PROTOCOL_VERSION, Host, WorkerRim
from tests.fakes.hash_model import VOCAB
from tests.fakes.lagging_lane import LaggingLane
from tests.simulation.agenda import Thread
from tests.simulation.data_network import SourceSide, TargetSide
from tests.simulation.processes import Looped
from tests.simulation.scenario import KEY
from tests.simulation.streams import Aborted, Context
from tests.simulation.watched import (
    PacedCore,
    WatchedPool,
    WatchedRunner,
    WatchedSource,
    WatchedStagedCache,
    WatchedTarget,
)

TOKENS_MAX = 4096
LOAD_INTERVAL_S = 0.25
REFUSALS = {
    InvalidRequest: EndCause.INVALID,
    TicketRefused: EndCause.TICKET_REFUSED,
    InboxFull: EndCause.EXHAUSTED,
}


class WorkerProcess(Looped):
    """blocks: of its pool. What is particular about a role is in the two classes below."""

    end_of_ticket: End
    response: type
    servicer_type: type
    limits: object

    def __init__(self, world, name, blocks, **pace):
        super().__init__(world, name, **pace)
        self.layout = world.layout
        self.identity = Identity(worker_id=name, epoch=self.epoch)
        self.transfers = Thread(self, self._transfer_turn)
        self.stepping = Thread(self, self._step_turn)
        self.cache = self._make_cache(blocks)
        self.pool = WatchedPool(blocks, self.cache, self)
        self.copying = Copying(self.insist, lambda crash: None)
        self.copies = Thread(self, self._copy_turn)
        self.cache.copy_beside(self._copy)
        self.policy = self.make_policy()
        self.core = PacedCore(
            pace_s=world.scenario.pace_s,
            pool=self.pool,
            block_size=self.layout.block_size,
            runner=WatchedRunner(self.cache, self.pool, self),
            sampler=Sampler(),
            policy=self.policy,
            swap=self.make_swap_space(),
            headroom=Headroom(world.scenario.headroom, world.scenario.headroom),
            ahead=world.scenario.ahead,
        )
        self.rim = WorkerRim(self.response, self.loop, world.scenario.cache_messages_max)
        self.endpoint = self.make_endpoint()
        self.worker = self.make_worker(queue_requests_max=world.scenario.queue_requests_max)
        self.engine_loop = EngineLoop(
            self.core,
            clock=self.clock,
            on_step=self._on_step,
            on_turn=lambda steps: self.rim.flush(self.worker.load(steps), self.pool.index.changes()),
            on_crash=lambda crash: None,
            inbox_actions_max=world.scenario.inbox_actions_max,
        )
        self.host = Host(
            worker=self.worker,
            welcome=self._welcome(),
            post=partial(self._post, self.engine_loop.post),
            insist=self.insist,
            refusals=REFUSALS,
        )
        limits = OrderLimits(vocab_size=VOCAB, tokens_max=blocks * self.layout.block_size)
        self.servicer = self.servicer_type(self.rim, self.host, self.worker, limits, self._desk())
        self.spawn(self.rim.report_load(interval_s=LOAD_INTERVAL_S))
        self.transfers.wake()

    def make_swap_space(self):
        return None

    def insist(self, action):
        self._post(self.engine_loop.insist, action)

    def on_transfer(self, event):
        self.insist(partial(self.worker.on_transfer, event))

    def serve(self, stream):
        """A gateway's call has come."""
        stream.handler = self.loop.create_task(self.servicer.Attach(stream.up, Context(stream)))
        stream.handler.add_done_callback(partial(self._served, stream))

    def end(self):
        super().end()
        self.endpoint.close()
        for name, count in self.endpoint.counters().items():
            self.world.counts[f"met {name}"] += count

    def left(self):
        """What is still here of any request."""
        load, ledger = self.worker.load(0), self.worker.ledger()
        left = {
            "blocks": [(each.owner, each.blocks) for each in ledger.owners],
            "promised": ledger.promised,
            "sequences": load.running_sequences + load.waiting_sequences,
            "transfers": len(self.endpoint.open_tickets),
        }
        return {what: much for what, much in left.items() if much}

    def _served(self, stream, handler):
        stream.down.end()
        if handler.cancelled() or not isinstance(handler.exception(), Aborted):
            self._done(handler)

    def _make_cache(self, blocks):
        """On a device, if the history says so, where nothing is copied before somebody waits for it."""
        if not (staged := self.world.scenario.staged_blocks):
            return KVCache(self.layout, blocks)
        staged_bytes = staged * self.layout.block_bytes()
        return WatchedStagedCache(self, self.layout, blocks, LaggingLane(), staged_bytes=staged_bytes)

    def _copy(self, copy, then):
        self.copying.begin(copy, then)
        self.copies.wake()

    def _copy_turn(self):
        self.copying.turn()
        return 0.0 if self.copying.due() else None

    def _post(self, post, action):
        post(action)
        self.stepping.wake()

    def _on_step(self, result):
        for sequence in result.preempted:
            self.world.preempted(self, sequence)
        self.worker.on_step(result)

    def _step_turn(self):
        self.engine_loop.turn()
        self.world.check(self)
        return 0.0 if self.engine_loop.due() else None

    def _transfer_turn(self):
        self.endpoint.turn(0)
        self.world.check_leases(self)
        return self.endpoint.patience_s()

    def _desk(self):
        return TicketDesk(
            key=KEY,
            identity=self.identity,
            end=self.end_of_ticket,
            layout_fingerprint=self.layout.fingerprint(),
            block_size=self.layout.block_size,
        )

    def _welcome(self):
        return pb.Welcome(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self.name,
            epoch=self.epoch,
            layout_fingerprint=self.layout.fingerprint(),
            kv_endpoints=self.kv_endpoints(),
            vocab_size=VOCAB,
            block_size=self.layout.block_size,
            max_model_len=TOKENS_MAX,
            total_blocks=self.pool.total,
            max_num_seqs=self.policy.seats,
        )


class PrefillProcess(WorkerProcess):
    end_of_ticket = End.SOURCE
    response = pb.PrefillServiceAttachResponse
    servicer_type = PrefillServicer

    def make_policy(self):
        scenario = self.world.scenario
        return PrefillPolicy(budget_tokens=scenario.budget_tokens, seats=scenario.seats)

    def make_endpoint(self):
        scenario = self.world.scenario
        limits = SourceLimits(
            connect_ms=scenario.connect_ms,
            transfers_max=scenario.transfers_max,
            run_bytes_max=scenario.run_blocks * self.layout.block_bytes(),
        )
        return WatchedSource(
            self,
            identity=self.identity,
            layout=self.layout,
            transport=SourceSide(self.world.network, self),
            emit=self.on_transfer,
            clock=self.clock,
            limits=limits,
        )

    def make_worker(self, **limits):
        return PrefillWorker(
            core=self.core,
            cache=self.cache,
            source=self.endpoint,
            tell=self.rim.tell,
            clock=self.clock,
            **limits,
        )

    def kv_endpoints(self):
        return ()


class DecodeProcess(WorkerProcess):
    end_of_ticket = End.TARGET
    response = pb.DecodeServiceAttachResponse
    servicer_type = DecodeServicer

    def make_policy(self):
        return DecodePolicy(budget_tokens=64, seats=self.world.scenario.seats)

    def make_swap_space(self):
        blocks = self.world.scenario.swap_blocks
        return SwapSpace(self.cache, blocks) if blocks else None

    def make_endpoint(self):
        scenario = self.world.scenario
        limits = TargetLimits(
            window_bytes=scenario.window_blocks * self.layout.block_bytes(),
            transfers_max=scenario.transfers_max,
            spent_max=scenario.remembered_max,
        )
        return WatchedTarget(
            self,
            identity=self.identity,
            layout=self.layout,
            key=KEY,
            transport=TargetSide(self.world.network, self, self.name),
            emit=self.on_transfer,
            clock=self.clock,
            limits=limits,
        )

    def make_worker(self, **limits):
        return DecodeWorker(
            core=self.core,
            policy=self.policy,
            cache=self.cache,
            target=self.endpoint,
            vocab_size=VOCAB,
            tell=self.rim.tell,
            clock=self.clock,
            **limits,
        )

    def kv_endpoints(self):
        return self.endpoint.endpoints()
