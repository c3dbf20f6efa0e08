"""What a decode worker does with an attempt: reserve, take in, generate, let go.

Everything here runs on the step thread. It grants reservations, adopts what has fully arrived, and turns the engine's
results into reports. Never touches a socket, never reads a block that was not committed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from decode_worker.adoption import begin_search, believable, require_possible, run_choices
from decode_worker.policy import DecodePolicy
from decode_worker.reservations import Reservation, Reservations, ReservationState
from decode_worker.search import Search, reports_of
from engine.cache.block_pool import Ledger
from engine.cache.kv_cache import KVCache
from engine.core import EngineCore, Output, StepResult
from engine.scheduling.admission import Room
from engine.sequence import EndReason, Sequence, SequenceId, State
from kvtransfer.errors import Overloaded, Reason, TicketRefused
from kvtransfer.events import Closed, Failed, Opened, Received, TargetEvent
from kvtransfer.target_endpoint import TransferTarget
from kvtransfer.ticket import Ticket
from service.load import WorkerLoad
from service.orders import AttemptKey, AttemptRefused, SequenceOrder, superseded
from service.reports import (
    AdoptedReport,
    EndCause,
    EndedReport,
    Report,
    ReservedReport,
    TokenEnd,
    TokenReport,
)
from service.token_books import TokenBooks, TokenCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What goes on of an adopted attempt, and the gateway that asked for it. sequences: by choice."""

    gateway: str
    order: SequenceOrder
    sequences: dict[int, Sequence]


class DecodeWorker:
    """tell: gives reports for a gateway to the rim; never blocks. clock: seconds, monotonic."""

    def __init__(
        self,
        *,
        core: EngineCore,
        policy: DecodePolicy,
        cache: KVCache,
        target: TransferTarget,
        vocab_size: int,
        tell: Callable[[str, Report], None],
        clock: Callable[[], float],
        queue_requests_max: int,
    ) -> None:
        self._core = core
        self._policy = policy
        self._cache = cache
        self._target = target
        self._vocab_size = vocab_size
        self._tell = tell
        self._clock = clock
        self._queue_requests_max = queue_requests_max
        self._reservations = Reservations(core.pool)
        self._tickets: dict[AttemptKey, bytes] = {}
        self._running: dict[AttemptKey, Running] = {}
        self._searches: dict[AttemptKey, Search] = {}
        self._finished_sequences = 0
        self._books = TokenBooks()

    def reserve(self, gateway: str, order: SequenceOrder, ticket: Ticket) -> None:
        """Queue one attempt for blocks, once. Older attempts of the same request are void from now on."""
        try:
            self._ask(gateway, order, ticket)
        except tuple(_REFUSALS) as error:
            self._refuse(gateway, order.key, error)
        self._grant()

    def cancel(self, gateway: str, key: AttemptKey) -> None:
        """Stop an attempt of this gateway and acknowledge it; what is not here is acknowledged too."""
        if key in self._live() and self._gateway_of(key) == gateway:
            self._end(key)
        self._tell(gateway, EndedReport(key=key, cause=EndCause.CANCELLED, detail="cancelled"))
        self._grant()

    def end_choice(self, gateway: str, key: AttemptKey, choice: int) -> None:
        """Stop one choice of an attempt of this gateway; the others go on. Ignored where there is none such."""
        if key not in self._live() or self._gateway_of(key) != gateway:
            return
        if key in self._running:
            if choice in self._running[key].sequences:
                self._leave(key, choice)
                self._grant()
            return
        if key in self._searches:
            return
        reservation = self._reservations.find(self._tickets[key])
        assert reservation is not None
        if choice in {each.index for each in reservation.order.choices}:
            reservation.unwanted.add(choice)

    def drop(self, gateway: str) -> None:
        """The gateway is gone: stop all it asked for."""
        for key in self._live():
            if self._gateway_of(key) == gateway:
                self._end(key)
        self._grant()

    def on_step(self, result: StepResult) -> None:
        """Report what was sampled, let go of what has ended, let the next ones in.

        Each token computed here yields one at once, so what is computed is delivered.
        """
        computed = sum(each.sequence.computed - each.first_position for each in result.progress)
        self._books.compute(computed)
        self._books.deliver(computed)
        for output in result.outputs:
            self._token(output)
        for sequence in result.preempted:
            if sequence.state is State.DETACHED:
                self._give_back(sequence)
        self._grant()

    def on_transfer(self, event: TargetEvent) -> None:
        """What became of a hand-off."""
        reservation = self._reservations.find(event.ticket_id)
        assert reservation is not None, "the transport speaks of tickets that it was told to expect"
        match event:
            case Opened():
                self._bind(reservation)
            case Received():
                self._adopt(reservation, event)
            case Failed():
                if self._tickets.get(reservation.order.key) == event.ticket_id:
                    self._end(reservation.order.key)
                    # What its own worker cancelled, the gateway knows from there: an answer may have ended with its
                    # first token, and this report could overtake it.
                    if event.reason is not Reason.CANCELLED:
                        self._tell(reservation.gateway, _failure(reservation, event))
            case Closed():
                self._reservations.closed(event.ticket_id)
                self._grant()

    def ledger(self) -> Ledger:
        return self._core.ledger()

    def tokens(self) -> TokenCounts:
        return self._books.counts(live=0)

    def load(self, step: int) -> WorkerLoad:
        view = self._core.view()
        asking = self._reservations.asking()
        seats = self._seats() + self._reservations.seats()
        return WorkerLoad(
            step=step,
            running_sequences=seats,
            waiting_sequences=len(asking) + len(view.waiting),
            waiting_tokens=sum(one.uncomputed for one in view.waiting),
            free_blocks=view.available_blocks,
            total_blocks=self._core.pool.total,
            finished_sequences=self._finished_sequences,
        )

    def _ask(self, gateway: str, order: SequenceOrder, ticket: Ticket) -> None:
        """Raises AttemptRefused, TicketRefused or Overloaded."""
        block_size = self._cache.layout.block_size
        total_blocks = self._core.pool.total
        require_possible(order, seats=self._policy.seats, total_blocks=total_blocks, block_size=block_size)
        live = [(self._gateway_of(key), key) for key in self._live()]
        older = superseded(gateway, order.key, live)
        if (gateway, order.key) in live:
            return
        if ticket.first_block != 0:
            raise TicketRefused(Reason.WRONG_RANGE, "which blocks are held here is not known before")
        if self._reservations.find(ticket.ticket_id) is not None:
            raise TicketRefused(Reason.SPENT, "in use")
        for key in older:
            self.cancel(gateway, key)
        queue_requests_max = self._queue_requests_max * (2 if order.preemptions else 1)
        if len(self._reservations.asking()) >= queue_requests_max:
            raise Overloaded(f"{queue_requests_max} requests are queued")
        self._reservations.ask(
            Reservation(
                gateway=gateway,
                order=order,
                ticket=ticket,
                blocks_max=order.blocks(block_size),
                chain=self._core.chain(order.cache_scope),
                arrived=order.arrived(self._clock()),
            )
        )
        self._tickets[order.key] = ticket.ticket_id

    def _grant(self) -> None:
        """Give blocks and seats to those the policy chooses, and tell their gateways. What shares a prefix with another
        that is granted here waits for it: the policy could not know yet that it is coming."""
        asking = self._reservations.asking()
        if not asking or self._core.swapping():
            return
        granted = self._policy.grant(
            tuple(map(self._reservations.view, asking)), room=self._room(), now=self._clock()
        )
        coming = {view.id: view.coming for view in granted}
        for reservation in asking:
            name = reservation.id()
            if name in coming and self._reservations.view(reservation).coming <= coming[name]:
                self._grant_one(reservation)

    def _room(self) -> Room:
        return Room(
            free_blocks=self._core.pool.available,
            seats=self._policy.seats - self._seats() - self._reservations.seats(),
            growing_blocks=self._core.growing_blocks() + self._reservations.growing_blocks(),
            headroom=self._core.headroom,
        )

    def _seats(self) -> int:
        """Sequences that run or were swapped out, or may run at any moment."""
        searching = sum(search.order.branches() for search in self._searches.values())
        return searching + sum(len(each.sequences) for each in self._running.values())

    def _grant_one(self, reservation: Reservation) -> None:
        key, ticket_id = reservation.order.key, reservation.ticket.ticket_id
        try:
            self._target.expect(self._reservations.fitted(ticket_id))
        except (TicketRefused, Overloaded) as error:
            self._end(key)
            self._refuse(reservation.gateway, key, error)
            return
        held = self._reservations.grant(ticket_id).ticket.first_block
        self._tell(reservation.gateway, ReservedReport(key=key, blocks_held=held))

    def _bind(self, reservation: Reservation) -> None:
        """The source is about to send: give it places, unless the reservation was withdrawn meanwhile."""
        if reservation.state is not ReservationState.GRANTED:
            return
        ticket = reservation.ticket
        blocks = self._reservations.bind(ticket.ticket_id).ids()[ticket.first_block :]
        self._target.bind(ticket.ticket_id, [self._cache.block_view(block) for block in blocks])

    def _adopt(self, reservation: Reservation, event: Received) -> None:
        """Commit: one local step, after which this worker owns the sequence."""
        if reservation.state is not ReservationState.BOUND:
            return
        order = reservation.order
        assert event.num_tokens == len(order.token_ids), "the manifest was checked against the ticket"
        if not believable(event.first_tokens, order, self._vocab_size):
            self._end(order.key)
            wrong = EndedReport(key=order.key, cause=EndCause.TRANSFER_FAILED, detail="no such first token")
            self._tell(reservation.gateway, wrong)
            return
        wanted = tuple(pair for pair in event.first_tokens if pair[0] not in reservation.unwanted)
        if not wanted and order.beam is None:
            self._end(order.key)
            return
        table, credit = self._reservations.adopt(event.ticket_id)
        self._cache.from_host(table.ids()[reservation.ticket.first_block :])
        del self._tickets[order.key]
        if order.beam is not None:
            search = begin_search(self._core, reservation, order.beam, table, credit)
            self._searches[order.key] = search
        else:
            size = self._cache.layout.block_size
            sequences = run_choices(self._core, reservation, wanted, table, credit, block_size=size)
            self._running[order.key] = Running(gateway=reservation.gateway, order=order, sequences=sequences)
        self._target.commit(event.ticket_id)
        self._tell(reservation.gateway, AdoptedReport(key=order.key))

    def _token(self, output: Output) -> None:
        key, choice = _key(output.sequence.id), output.sequence.id[2]
        if key in self._searches:
            self._hypothesis(key, output)
            return
        running = self._running[key]
        order, token = running.order, output.sampled
        self._tell(
            running.gateway,
            TokenReport(
                key=key,
                choice=choice,
                position=output.position - order.prompt_tokens,
                token_id=token.token,
                logprob=token.logprob,
                top=token.top,
                end=_END[output.sequence.end_reason] if output.sequence.end_reason else None,
            ),
        )
        if output.sequence.end_reason is not None:
            self._finished_sequences += 1
            self._leave(key, choice)

    def _hypothesis(self, key: AttemptKey, output: Output) -> None:
        """A search took a step; when it was the last one, its answers are complete all at once."""
        search = self._searches[key]
        answers = search.hear(output)
        if answers:
            del self._searches[key]
            self._finished_sequences += len(answers)
            for report in reports_of(search.order, answers):
                self._tell(search.gateway, report)

    def _leave(self, key: AttemptKey, choice: int) -> None:
        """One choice goes on no more. Its blocks are given back; those of others stay theirs."""
        sequences = self._running[key].sequences
        sequence = self._core.detach(sequences.pop(choice).id)
        if sequence.credit is not None:
            self._core.pool.waive(sequence.credit)
        if sequence.table is not None:
            self._core.pool.release(sequence.table)
        if not sequences:
            del self._running[key]

    def _give_back(self, sequence: Sequence) -> None:
        """It goes on elsewhere, or here when there is room again: its gateway has all that it takes."""
        running = self._running.pop(_key(sequence.id))
        assert len(running.sequences) == 1, "of several sequences none is given up"
        ended = EndedReport(
            key=running.order.key,
            cause=EndCause.PREEMPTED,
            detail="its blocks were needed",
            preemptions=sequence.preemptions,
        )
        self._tell(running.gateway, ended)

    def _refuse(self, gateway: str, key: AttemptKey, error: Exception) -> None:
        self._tell(gateway, EndedReport(key=key, cause=_REFUSALS[type(error)], detail=str(error)))

    def _end(self, key: AttemptKey) -> None:
        """Let go of all that an attempt has here. Blocks that the transport may write into stay reserved."""
        ticket_id = self._tickets.pop(key, None)
        if ticket_id is not None and self._reservations.withdraw(ticket_id) is not ReservationState.ASKING:
            self._target.withdraw(ticket_id)
        if key in self._searches:
            self._searches.pop(key).end()
        for choice in tuple(self._running[key].sequences) if key in self._running else ():
            self._leave(key, choice)

    def _live(self) -> list[AttemptKey]:
        return [*self._tickets, *self._running, *self._searches]

    def _gateway_of(self, key: AttemptKey) -> str:
        if key in self._running:
            return self._running[key].gateway
        if key in self._searches:
            return self._searches[key].gateway
        reservation = self._reservations.find(self._tickets[key])
        assert reservation is not None
        return reservation.gateway


_REFUSALS: dict[type[Exception], EndCause] = {
    AttemptRefused: EndCause.INVALID,
    TicketRefused: EndCause.TICKET_REFUSED,
    Overloaded: EndCause.EXHAUSTED,
}
_END = {EndReason.STOP: TokenEnd.STOP, EndReason.LENGTH: TokenEnd.LENGTH}


def _key(sequence_id: SequenceId) -> AttemptKey:
    return AttemptKey(request_id=sequence_id[0], attempt=sequence_id[1])


def _failure(reservation: Reservation, event: Failed) -> EndedReport:
    key = reservation.order.key
    return EndedReport(key=key, cause=EndCause.TRANSFER_FAILED, detail=event.detail)
