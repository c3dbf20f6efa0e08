"""Eyes inside the state machines and the gateway's attempts: what was accepted, checked against what is true.

`watching` wraps the few calls by which a message takes effect, for the length of one history.
"""

from collections import Counter
from contextlib import contextmanager

from gateway.attempt import Attempt, AttemptLost
from kvtransfer.actions import Place, Send
from kvtransfer.incoming import IncomingTransfer
from kvtransfer.outgoing import OutgoingTransfer
from kvtransfer.source_io import SourceIO
from kvtransfer.target_io import TargetIO
from kvtransfer.wire import Resend
from tests.simulation.faults import Kind

TAKEN_BY_TARGET = ("opened", "blocks", "manifest", "aborted")
SENDING = ("push", "finish", "granted", "resend")
TAKEN_BY_SOURCE = ("granted", "resend", "committed", "refused")


@contextmanager
def watching(world):
    """Look at everything that happens in this world."""
    eyes = _Eyes(world)
    wraps = [
        (TargetIO, "_on_message", eyes.target_hears),
        (SourceIO, "_on_message", eyes.source_hears),
        *((IncomingTransfer, name, eyes.accepts) for name in TAKEN_BY_TARGET),
        *((OutgoingTransfer, name, eyes.accepts) for name in TAKEN_BY_SOURCE),
        (OutgoingTransfer, "start", eyes.starts),
        *((OutgoingTransfer, name, eyes.sends) for name in SENDING),
        (IncomingTransfer, "placed", eyes.verifies),
        *((IncomingTransfer, name, eyes.asks_again) for name in ("manifest", "placed")),
        (Attempt, "begin", eyes.attempt_begins),
        (Attempt, "hear", eyes.attempt_hears),
        (Attempt, "close", eyes.attempt_closes),
    ]
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in wraps]
    for owner, name, wrap in wraps:
        setattr(owner, name, wrap(owner.__dict__[name]))
    try:
        yield
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


class _Eyes:
    def __init__(self, world):
        self._world = world
        self._envelope = None
        self._identities = None
        self._hearer = None
        self._verified = set()
        self._sent = Counter()
        self._allowed = Counter()
        self._flips = any(fault.kind is Kind.FLIP_HEADER for fault in world.scenario.faults)
        self._current = {}

    def target_hears(self, method):
        def on_message(io, arrival, peer, envelope, now):
            self._envelope = envelope
            self._identities = (self._world.dialled_by(arrival.peer), io._identity)
            self._hearer = io._identity
            try:
                return method(io, arrival, peer, envelope, now)
            finally:
                self._envelope = None

        return on_message

    def source_hears(self, method):
        def on_message(io, link, envelope, now):
            self._envelope = envelope
            self._identities = (io._identity, link.target)
            self._hearer = io._identity
            try:
                return method(io, link, envelope, now)
            finally:
                self._envelope = None

        return on_message

    def accepts(self, method):
        def take(transfer, *args):
            actions = method(transfer, *args)
            if self._envelope is not None:
                self._world.heard[self._hearer, transfer.ticket.ticket_id] = self._world.agenda.now
                self._require_fenced(transfer.ticket)
                self._require_unverified(transfer.ticket, actions)
            return actions

        return take

    def starts(self, method):
        def start(transfer, now):
            self._world.heard[transfer.ticket.source(), transfer.ticket.ticket_id] = self._world.agenda.now
            return method(transfer, now)

        return start

    def _require_fenced(self, ticket):
        """I4: the frame is of this attempt, this start of the source and this start of the target."""
        envelope, world = self._envelope, self._world
        world.counts["frames accepted"] += 1
        said = (envelope.ticket_id, envelope.attempt, envelope.source_epoch, envelope.target_epoch)
        if said != (ticket.ticket_id, ticket.attempt, ticket.source_epoch, ticket.target_epoch):
            world.fail("I4", f"a frame of {said} was accepted for {ticket}")
        if self._identities != (ticket.source(), ticket.target()):
            world.fail("I4", f"a frame between {self._identities} was accepted for {ticket}")

    def verifies(self, method):
        def placed(transfer, place, digests, now):
            for index, said, digest in zip(place.indices, place.digests, digests, strict=True):
                if digest == said:
                    self._verified.add((transfer.ticket.ticket_id, index))
                    self._allowed[transfer.ticket.ticket_id] += 1
            return method(transfer, place, digests, now)

        return placed

    def asks_again(self, method):
        def ask(transfer, *args):
            actions = method(transfer, *args)
            for action in actions:
                if isinstance(action, Send) and isinstance(action.message, Resend):
                    self._allowed[transfer.ticket.ticket_id] += len(action.message.indices)
            return actions

        return ask

    def sends(self, method):
        """I10: no more blocks under way than the target has room for. A damaged grant may say otherwise."""

        def send(transfer, *args):
            actions = method(transfer, *args)
            ticket_id = transfer.ticket.ticket_id
            self._sent[ticket_id] += sum(
                len(action.payload_indices) for action in actions if isinstance(action, Send)
            )
            allowed = self._allowed[ticket_id] + self._world.scenario.window_blocks
            if self._sent[ticket_id] > allowed and not self._flips:
                self._world.fail(
                    "I10", f"{self._sent[ticket_id]} blocks sent of {allowed} for {transfer.ticket}"
                )
            return actions

        return send

    def _require_unverified(self, ticket, actions):
        """I3: a block that was verified is never written again."""
        for action in actions:
            for index in action.indices if isinstance(action, Place) else ():
                if (ticket.ticket_id, index) in self._verified:
                    self._world.fail("I3", f"verified block {index} of {ticket} is overwritten")

    def attempt_begins(self, method):
        def begin(attempt):
            key = attempt._order.key
            live = self._current.get(key.request_id)
            if live is not None:
                self._world.fail("I5", f"{key} begins beside {live}")
            self._current[key.request_id] = key
            self._world.counts["attempts"] += 1
            self._world.counts["attempts on one worker"] += attempt._alone
            (request_id,) = {journal.request.id for journal in attempt._journals.values()}
            self._world.attempted(key, request_id)
            return method(attempt)

        return begin

    def attempt_hears(self, method):
        def hear(attempt, deliveries):
            for delivery in deliveries:
                said = getattr(delivery.letter, "key", attempt._order.key)
                if said != attempt._order.key or self._current.get(said.request_id) != said:
                    self._world.fail("I5", f"{attempt._order.key} hears {delivery}")
            return method(attempt, deliveries)

        return hear

    def attempt_closes(self, method):
        def close(attempt):
            self._current.pop(attempt._order.key.request_id, None)
            if isinstance(attempt.failure, AttemptLost):
                self._world.counts[f"lost: {str(attempt.failure).partition(': ')[2] or 'worker lost'}"] += 1
            return method(attempt)

        return close
