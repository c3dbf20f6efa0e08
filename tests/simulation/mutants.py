"""Production code with one guard taken out: what the simulation must notice.

A mutant is a method in whose source one piece of text is replaced. When the text is not there any more, the guard has
moved and so must the mutant.
"""

import inspect
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType

from decode_worker.prompts import Prompts
from decode_worker.reservations import Reservation, Reservations
from decode_worker.worker import DecodeWorker
from engine.binding import Binder
from engine.cache.stages import Stages
from engine.cache.swap_space import SwapSpace
from engine.core import EngineCore
from engine.sequence import Sequence
from gateway.attempt import Attempt
from gateway.worker_pool import WorkerRecord
from kvtransfer.incoming import IncomingTransfer
from kvtransfer.outgoing import OutgoingTransfer
from kvtransfer.source_io import SourceIO
from kvtransfer.target_io import TargetIO
from prefill_worker.holds import Holds
from prefill_worker.worker import PrefillWorker
from service.cache_feed import CacheFeed
from service.worker_rim import WorkerRim
from tests.simulation.faults import Kind

PACKETS = (Kind.DROP, Kind.DUPLICATE, Kind.REORDER, Kind.REPLAY)
FLIPS = (Kind.FLIP_HEADER,)
DEATHS = (Kind.KILL, Kind.FREEZE, Kind.BREAK_STREAM)
SILENCE = (Kind.STALL_DATA, Kind.FREEZE)
CANCELS = (Kind.CANCEL, Kind.SLOW, Kind.STALL_DATA)


@dataclass(frozen=True)
class Mutant:
    """edits: texts in the method's source, each there once, and what stands there instead. kinds: faults that show
    it; None for whatever a history may have, prompts that are computed beside generation among it. shown_by: the seed
    to begin with, of a history that has shown it; another one may show it when the simulation has changed."""

    name: str
    owner: type
    method: str
    edits: dict[str, str]
    kinds: tuple[Kind, ...] | None
    shown_by: int = 0

    @contextmanager
    def at_large(self):
        original = self.owner.__dict__[self.method]
        setattr(self.owner, self.method, self._changed(original))
        try:
            yield
        finally:
            setattr(self.owner, self.method, original)

    def _changed(self, function):
        source = textwrap.dedent(inspect.getsource(function))
        for guard, without in self.edits.items():
            assert source.count(guard) == 1, f"{self.name}: the guard has moved"
            source = source.replace(guard, without)
        module = compile(source, function.__code__.co_filename, "exec")
        code = next(each for each in module.co_consts if isinstance(each, CodeType))
        changed = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
        changed.__kwdefaults__ = function.__kwdefaults__
        return changed


MUTANTS = (
    Mutant(
        "a block that choices share is written in place",
        Binder,
        "batch",
        {
            "if self._pool.unwritable(batch.slots // size):": "if False:",
        },
        CANCELS,
    ),
    Mutant(
        "a token of the answer does not count for penalties",
        Sequence,
        "settle",
        {"self.adjustments is not None": "False"},
        None,
    ),
    Mutant(
        "the attempt is done when one of its choices is",
        Attempt,
        "_token",
        {"if not self._live:": "if True:"},
        CANCELS,
    ),
    Mutant(
        "the target does not look at epoch and attempt",
        TargetIO,
        "_on_transfer_message",
        {"not wire.is_for(transfer.ticket, envelope)": "False"},
        FLIPS,
    ),
    Mutant(
        "the target does not look at who sends",
        TargetIO,
        "_on_transfer_message",
        {"transfer.peer != arrival.peer": "False"},
        PACKETS,
    ),
    Mutant(
        "the target opens for a source of another start",
        TargetIO,
        "_require_valid",
        {"not ticket.source_epoch == peer.source.epoch == envelope.source_epoch": "False"},
        FLIPS,
    ),
    Mutant(
        "the target opens a ticket for another start of itself",
        TargetIO,
        "_require_valid",
        {"not ticket.target_epoch == self._identity.epoch == envelope.target_epoch": "False"},
        FLIPS,
    ),
    Mutant(
        "the target opens for another attempt",
        TargetIO,
        "_require_valid",
        {"ticket.attempt != envelope.attempt": "False"},
        FLIPS,
    ),
    Mutant(
        "the source does not look at epoch and attempt",
        SourceIO,
        "_on_message",
        {"not wire.is_for(live.transfer.ticket, envelope)": "False"},
        FLIPS,
    ),
    Mutant(
        "the source does not look at who answers",
        SourceIO,
        "_on_message",
        {"live is None or live.link is not link": "live is None"},
        PACKETS,
    ),
    Mutant(
        "one key frees what a source may still read",
        Holds,
        "_swept",
        {"hold.state is not HoldState.FREE": "hold.state in (HoldState.READ, HoldState.UNREAD)"},
        CANCELS,
    ),
    Mutant(
        "a source is closed before the last read",
        OutgoingTransfer,
        "_drain",
        {"if self._reads:": "if False:"},
        CANCELS,
        shown_by=42,
    ),
    Mutant(
        "a withdrawn reservation does not wait for the last write",
        Reservations,
        "_sweep",
        {"reservation.state is ReservationState.GONE": "reservation.state.name in ('GONE', 'WITHDRAWN')"},
        CANCELS,
    ),
    Mutant(
        "blocks are not verified",
        IncomingTransfer,
        "placed",
        {"digest != said": "False", "= digest\n": "= said\n"},
        (Kind.FLIP_PAYLOAD,),
    ),
    Mutant(
        "the manifest is not compared",
        IncomingTransfer,
        "_settle",
        {"ours != self._manifest.digest": "False"},
        FLIPS,
        shown_by=80,
    ),
    Mutant(
        "any index is taken",
        IncomingTransfer,
        "blocks",
        {"index not in self._indices": "False"},
        FLIPS,
    ),
    Mutant(
        "any size is taken",
        IncomingTransfer,
        "blocks",
        {"payload.nbytes != self._block_bytes": "False"},
        (Kind.TRUNCATE_PAYLOAD,),
    ),
    Mutant(
        "a block is taken twice",
        IncomingTransfer,
        "blocks",
        {"index in self._digests": "False"},
        PACKETS,
    ),
    Mutant(
        "a source sends more than it was granted",
        OutgoingTransfer,
        "_next_run",
        {"self._sent_bytes + self._block_bytes <= self._granted_bytes": "self._granted_bytes"},
        (),
    ),
    Mutant(
        "a target waits for ever",
        IncomingTransfer,
        "tick",
        {"now - self._heard >= self.ticket.lease_s()": "False"},
        SILENCE,
        shown_by=65,
    ),
    Mutant(
        "a source waits for ever",
        OutgoingTransfer,
        "tick",
        {"now - self._heard >= lease": "False"},
        SILENCE,
        shown_by=21,
    ),
    Mutant(
        "a withdrawn reservation is bound",
        DecodeWorker,
        "_bind",
        {"reservation.state is not ReservationState.GRANTED": "False"},
        CANCELS,
        shown_by=203,
    ),
    Mutant(
        "what came for a withdrawn reservation is taken in",
        DecodeWorker,
        "_receive",
        {"reservation.state is not ReservationState.BOUND": "False"},
        CANCELS,
        shown_by=197,
    ),
    Mutant(
        "a reservation that was withdrawn while it was copied is adopted",
        DecodeWorker,
        "_adopt",
        {"reservation.state is not ReservationState.BOUND": "False"},
        CANCELS,
        shown_by=12,
    ),
    Mutant(
        "a block that was to be received is freed while it is copied",
        Reservations,
        "_sweep",
        {" and not reservation.copying": ""},
        CANCELS,
        shown_by=12,
    ),
    Mutant(
        "a block that was to be sent is freed while it is copied",
        Holds,
        "_swept",
        {" or hold.copies": ""},
        CANCELS,
        shown_by=3,
    ),
    Mutant(
        "the end of a hand-off overtakes the copies of its blocks",
        PrefillWorker,
        "_hand_over",
        {"self._bring(ticket_id, (), partial(": "(lambda *finish: finish[2]())(ticket_id, (), partial("},
        (),
        shown_by=3,
    ),
    Mutant(
        "what is copied to be read is read too early",
        Stages,
        "drain",
        {"for landing in under_way:": "for landing in ():"},
        (),
        shown_by=3,
    ),
    Mutant(
        "what is copied to be computed with is there too late",
        Stages,
        "fill",
        {"for stage in self._stages:": "for stage in ():"},
        (),
        shown_by=3,
    ),
    Mutant(
        "a prompt that is computed beside generation takes all of itself from the cache",
        Reservation,
        "links",
        {" - (self.ticket is None)": ""},
        None,
        shown_by=74,
    ),
    Mutant(
        "a prompt that ends early keeps its blocks",
        Prompts,
        "end",
        {"self._core.pool.release(prompt.sequence.table)": "pass"},
        None,
        shown_by=84,
    ),
    Mutant(
        "a prompt that is computed keeps its place",
        Reservations,
        "computed",
        {"reservation.advance(ReservationEvent.ADOPT)": "pass"},
        None,
    ),
    Mutant(
        "a worker keeps the work of a lost gateway",
        WorkerRim,
        "_close",
        {"host.insist(partial(host.worker.drop, gateway))": "pass"},
        DEATHS,
        shown_by=535,
    ),
    Mutant(
        "a lost worker is told to nobody",
        WorkerRecord,
        "on_broken",
        {"booking.mailbox.put(self.address, WorkerLost())": "pass"},
        DEATHS,
    ),
    Mutant(
        "a report of another attempt is believed",
        WorkerRecord,
        "_pass_on",
        {
            "self._bookings.get(report.key)": "next((booking for key, booking in self._bookings.items()"
            " if key.request_id == report.key.request_id), None)"
        },
        DEATHS,
    ),
    Mutant(
        "what comes back is not where it was",
        SwapSpace,
        "restore",
        {"self._owned[who][first:]": "self._owned[who][first:][::-1]"},
        (),
        shown_by=66,
    ),
    Mutant(
        "who is given up keeps what it was promised",
        EngineCore,
        "_preempt",
        {"self.pool.waive(sequence.credit)": "pass"},
        (),
        shown_by=60,
    ),
    Mutant(
        "a gateway that missed what is cached is never told again",
        CacheFeed,
        "catch_up",
        {"self._snapshot(listener)": "pass"},
        (Kind.SLOW,),
    ),
    Mutant(
        "what is cached no more is not told",
        CacheFeed,
        "change",
        {"self._tell(listener, changes.removed, ": "self._tell(listener, (), "},
        (),
    ),
    Mutant(
        "a closed attempt is not cancelled",
        Attempt,
        "close",
        {"self._target.worker.attachment.send(": "id("},
        CANCELS,
    ),
)
