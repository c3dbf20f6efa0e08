"""What a decode worker does with an attempt: reserve, take in, generate, let go.

Everything here runs on the step thread. It grants reservations, adopts what has fully arrived or was computed here,
and turns the engine's results into reports. Never touches a socket, never reads a block that was not committed.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from decode_worker.adoption import believable, require_possible
from decode_worker.answers import Answers, report_of, token_reports
from decode_worker.endings import REFUSALS, cancelled, failed, given_back, refused, stuck
from decode_worker.policy import DecodePolicy
from decode_worker.prompts import Prompts
from decode_worker.reservations import Name, Reservation, Reservations, ReservationState
from decode_worker.unread_tokens import UnreadTokens
from engine.cache.block_pool import Credit, Ledger
from engine.cache.block_table import BlockTable
from engine.cache.kv_cache import KVCache
from engine.constraint import Constraint
from engine.core import EngineCore
from engine.results import Output, Outputs, StepResult
from engine.scheduling.admission import Room
from engine.sequence import Sequence, SequenceId, State
from kvtransfer.errors import Overloaded, Reason, TicketRefused
from kvtransfer.events import Closed, Failed, FirstTokens, Opened, Received, TargetEvent
from kvtransfer.target_endpoint import TransferTarget
from kvtransfer.ticket import Ticket
from service.load import WorkerLoad
from service.orders import AttemptKey, SequenceOrder, superseded
from service.reports import AdoptedReport, ReservedReport, TokenReport, Told
from service.token_books import TokenBooks, TokenCounts, Waste
from service.worker_counts import PREEMPTIONS, PREFIX_HITS, PREFIX_QUERIES, SWAP_OUTS, TRANSFER_FAILURES


class DecodeWorker:
    """tell: gives reports for a gateway to the rim; never blocks. clock: seconds, monotonic.
    borrowed_s: seconds that cores of other workers have computed here."""

    def __init__(
        self,
        *,
        core: EngineCore,
        policy: DecodePolicy,
        cache: KVCache,
        target: TransferTarget,
        vocab_size: int,
        tell: Callable[[str, Told], None],
        clock: Callable[[], float],
        queue_requests_max: int,
        borrowed_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._core = core
        self._policy = policy
        self._cache = cache
        self._target = target
        self._vocab_size = vocab_size
        self._tell = tell
        self._clock = clock
        self._queue_requests_max = queue_requests_max
        self._borrowed_s = borrowed_s
        self._reservations = Reservations(core.pool)
        self._names: dict[AttemptKey, Name] = {}
        self._answers = Answers(core, cache.layout.block_size)
        self._finished_sequences = 0
        self._books = TokenBooks()
        self._counts = Counter[str]()
        self._prompts = Prompts(core, self._books, cache.layout.block_size)
        self._unread = UnreadTokens(self._books)

    def reserve(
        self, gateway: str, order: SequenceOrder, ticket: Ticket | None, constraint: Constraint | None = None
    ) -> None:
        """Queue one attempt for blocks, once. Older attempts of the same request are void from now on. ticket: of the
        hand-off; without one the prompt is computed here. constraint: of the order's guide, at its tokens."""
        try:
            self._ask(gateway, order, ticket, constraint)
        except tuple(REFUSALS) as error:
            self._tell(gateway, refused(order.key, error))
        self._grant()

    def cancel(self, gateway: str, key: AttemptKey) -> None:
        """Stop an attempt of this gateway and acknowledge it; what is not here is acknowledged too."""
        self._stop(gateway, key, Waste.CANCELLED)
        self._grant()

    def end_choice(self, gateway: str, key: AttemptKey, choice: int) -> None:
        """Stop one choice of an attempt of this gateway; the others go on. Ignored where there is none such."""
        if key not in self._live() or self._gateway_of(key) != gateway:
            return
        if key in self._answers:
            self._answers.leave(key, choice)
            self._grant()
            return
        self._reservations.end_choice(self._names[key], choice)

    def drop(self, gateway: str) -> None:
        """The gateway is gone: stop all it asked for."""
        for key in self._live():
            if self._gateway_of(key) == gateway:
                self._end(key, Waste.GATEWAY_LOST)
        self._grant()

    def on_step(self, result: StepResult) -> None:
        """Report what was sampled, let go of what has ended, let the next ones in.

        What is computed of a prompt is delivered with its first token, each token after it with the one that it yields.
        """
        self._books.compute(result.tokens)
        self._unread.book(result, result.tokens - self._prompts.advance(result.progress), self._prompts)
        for gateway, report in self._prompts.scores(result.scored):
            self._tell(gateway, report)
        self._sampled(result.outputs)
        for sequence in result.dead_ends:
            self._dead_end(sequence)
        for sequence in result.preempted:
            self._counts[PREEMPTIONS] += 1
            if sequence.state is State.DETACHED:
                self._give_back(sequence)
            else:
                self._counts[SWAP_OUTS] += 1
        self._grant()

    def on_transfer(self, event: TargetEvent) -> None:
        """What became of a hand-off."""
        reservation = self._reservations.find(event.ticket_id)
        assert reservation is not None, "the transport speaks of tickets that it was told to expect"
        match event:
            case Opened():
                self._bind(reservation, event.ticket_id)
            case Received():
                self._receive(reservation, event)
            case Failed():
                self._counts[f"{TRANSFER_FAILURES}.{event.reason.name.lower()}"] += 1
                if self._names.get(reservation.order.key) == event.ticket_id:
                    self._end(reservation.order.key, Waste.TRANSFER_FAILED)
                    # What its own worker cancelled, the gateway knows from there: an answer may have ended with its
                    # first token, and this report could overtake it.
                    if event.reason is not Reason.CANCELLED:
                        self._tell(reservation.gateway, failed(reservation.order.key, event.detail))
            case Closed():
                self._reservations.closed(event.ticket_id)
                self._grant()

    def ledger(self) -> Ledger:
        return self._core.ledger()

    def tokens(self) -> TokenCounts:
        return self._books.counts(live=self._prompts.computed() + self._unread.tokens)

    def counts(self) -> dict[str, int]:
        """Since the start, by the names of `service.worker_counts`. Any thread."""
        return dict(self._counts)

    def load(self, step: int) -> WorkerLoad:
        pace = self._core.pace
        asking = self._reservations.asking()
        queued = sum(len(each.order.token_ids) for each in asking if each.ticket is None)
        return WorkerLoad(
            step=step,
            running_sequences=self._answers.seats() + self._reservations.seats(),
            waiting_sequences=len(asking),
            waiting_tokens=self._prompts.uncomputed() + queued,
            free_blocks=self._core.pool.available,
            total_blocks=self._core.pool.total,
            finished_sequences=self._finished_sequences,
            step_ms=pace.steps.each_s() * 1000,
            prompt_token_ms=pace.tokens.each_s() * 1000,
            borrowed_core_ms=int(self._borrowed_s() * 1000),
        )

    def _ask(
        self, gateway: str, order: SequenceOrder, ticket: Ticket | None, constraint: Constraint | None
    ) -> None:
        """Raises AttemptRefused, TicketRefused or Overloaded."""
        block_size = self._cache.layout.block_size
        require_possible(
            order,
            handed_over=ticket is not None,
            seats=self._policy.seats,
            total_blocks=self._core.pool.total,
            block_size=block_size,
        )
        live = [(self._gateway_of(key), key) for key in self._live()]
        older = superseded(gateway, order.key, live)
        if (gateway, order.key) in live:
            return
        if ticket is not None and ticket.first_block != 0:
            raise TicketRefused(Reason.WRONG_RANGE, "which blocks are held here is not known before")
        if ticket is not None and self._reservations.find(ticket.ticket_id) is not None:
            raise TicketRefused(Reason.SPENT, "in use")
        for key in older:
            self._stop(gateway, key, Waste.SUPERSEDED)
        queue_requests_max = self._queue_requests_max * (2 if order.comes_back() else 1)
        if len(self._reservations.asking()) >= queue_requests_max:
            raise Overloaded(f"{queue_requests_max} requests are queued")
        reservation = Reservation(
            gateway=gateway,
            order=order,
            ticket=ticket,
            blocks_max=order.blocks(block_size),
            chain=self._core.chain(order.cache_scope),
            arrived=order.arrived(self._clock()),
            constraint=constraint,
        )
        self._reservations.ask(reservation)
        self._names[order.key] = reservation.name()

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
                self._grant_one(reservation, reservation.ticket)

    def _room(self) -> Room:
        return Room(
            free_blocks=self._core.pool.available,
            seats=self._policy.seats - self._answers.seats() - self._reservations.seats(),
            growing_blocks=self._core.growing_blocks() + self._reservations.growing_blocks(),
            headroom=self._core.headroom,
        )

    def _grant_one(self, reservation: Reservation, ticket: Ticket | None) -> None:
        key = reservation.order.key
        if ticket is None:
            self._prompts.begin(reservation, *self._reservations.compute(key))
            return
        try:
            fitted = self._reservations.fitted(ticket.ticket_id)
            self._target.expect(fitted)
        except (TicketRefused, Overloaded) as error:
            self._end(key, Waste.TRANSFER_FAILED)
            self._tell(reservation.gateway, refused(key, error))
            return
        self._reservations.grant(ticket.ticket_id)
        self._tell(reservation.gateway, ReservedReport(key=key, blocks_held=fitted.first_block))

    def _bind(self, reservation: Reservation, ticket_id: bytes) -> None:
        """The source is about to send: give it places, unless the reservation was withdrawn meanwhile."""
        if reservation.state is not ReservationState.GRANTED:
            return
        blocks = self._reservations.bind(ticket_id)
        self._target.bind(ticket_id, [self._cache.block_view(block) for block in blocks])

    def _receive(self, reservation: Reservation, event: Received) -> None:
        """All is here: bring it to where it is computed with, unless the reservation was withdrawn meanwhile."""
        if reservation.state is not ReservationState.BOUND:
            return
        order = reservation.order
        assert event.num_tokens == len(order.token_ids), "the manifest was checked against the ticket"
        if not believable(event.first_tokens, order, self._vocab_size):
            self._end(order.key, Waste.TRANSFER_FAILED)
            self._tell(reservation.gateway, failed(order.key, "no such first token"))
            return
        blocks = self._reservations.copying(event.ticket_id)
        self._cache.from_host(blocks, partial(self._adopt, reservation, event))

    def _adopt(self, reservation: Reservation, event: Received) -> None:
        """Commit: one local step, after which this worker owns the sequence."""
        self._reservations.copied(event.ticket_id)
        if reservation.state is not ReservationState.BOUND:
            self._grant()
            return
        key = reservation.order.key
        wanted = tuple(pair for pair in event.first_tokens if pair[0] not in reservation.unwanted)
        if not wanted and reservation.order.beam is None:
            self._end(key, Waste.CANCELLED)
            return
        del self._names[key]
        self._go_on(reservation, wanted, *self._reservations.adopt(event.ticket_id))
        self._target.commit(event.ticket_id)

    def _go_on(
        self, reservation: Reservation, first_tokens: FirstTokens, table: BlockTable, credit: Credit
    ) -> None:
        """From the prompt's end this worker owns the sequence, however the prompt got here."""
        self._answers.begin(reservation, first_tokens, table, credit)
        self._tell(reservation.gateway, AdoptedReport(key=reservation.order.key))

    def _sampled(self, outputs: Outputs) -> None:
        shares = self._answers.shares(outputs.sequences)
        for share in shares.by_gateway:
            self._tell(share.gateway, token_reports(share, outputs))
        others = set(shares.others)
        for at in shares.others:
            self._not_running(outputs[at])
        for at in outputs.ended:
            if at not in others:
                sequence = outputs.sequences[at]
                self._finished_sequences += 1
                self._answers.leave(_key(sequence.id), sequence.id[2])

    def _not_running(self, output: Output) -> None:
        """It is of a prompt, or of a search."""
        key = _key(output.sequence.id)
        if key in self._prompts:
            self._first_tokens(key, output)
        else:
            gateway = self._answers.gateway_of(key)
            for report in self._answers.hear(key, output):
                self._token(gateway, report)

    def _first_tokens(self, key: AttemptKey, output: Output) -> None:
        """A prompt was computed here. What goes on from it does so as if it had been handed over."""
        reservation = self._reservations.find(key)
        assert reservation is not None
        sequence, order, going_on = self._prompts.finish(key), reservation.order, []
        self._counts[PREFIX_QUERIES] += len(order.token_ids)
        self._counts[PREFIX_HITS] += sequence.cached
        assert sequence.table is not None and sequence.credit is not None
        reservation.order = replace(order, preemptions=sequence.preemptions)
        self._reservations.computed(key)
        del self._names[key]
        drawn = zip(order.choices, (output.sampled, *output.twins), strict=True)
        for choice, token in drawn if order.beam is None else ():
            end = sequence.stop.end_with(token.token, output.position + 1)
            told = report_of(order, choice.index, output.position, token, end, sequence.cached)
            self._token(reservation.gateway, told)
            if end is None and choice.index not in reservation.unwanted:
                going_on.append((choice.index, token.token))
        if going_on or order.beam is not None:
            self._go_on(reservation, tuple(going_on), sequence.table, sequence.credit)
        else:
            self._core.pool.waive(sequence.credit)
            self._core.pool.release(sequence.table)

    def _token(self, gateway: str, report: TokenReport) -> None:
        self._tell(gateway, report)
        self._finished_sequences += report.end is not None

    def _dead_end(self, sequence: Sequence) -> None:
        """All of an attempt ends with the first of its choices that cannot go on."""
        if (key := _key(sequence.id)) in self._live():
            gateway = self._gateway_of(key)
            self._end(key, Waste.GUIDE_FAILED)
            self._tell(gateway, stuck(key))

    def _give_back(self, sequence: Sequence) -> None:
        """It goes on elsewhere, or here when there is room again: its gateway has all that it takes."""
        key = _key(sequence.id)
        gateway = self._gateway_of(key)
        if key in self._prompts:
            self._prompts.forget(key, Waste.PREEMPTED)
            self._reservations.withdraw(self._names.pop(key))
        else:
            self._answers.forget(sequence.id)
        self._tell(gateway, given_back(key, sequence.preemptions))

    def _stop(self, gateway: str, key: AttemptKey, waste: Waste) -> None:
        if key in self._live() and self._gateway_of(key) == gateway:
            self._end(key, waste)
        self._tell(gateway, cancelled(key))

    def _end(self, key: AttemptKey, waste: Waste) -> None:
        """Let go of all that an attempt has here. Blocks that the transport may write into stay reserved. waste: why
        what was computed of a prompt is of no use."""
        if key in self._prompts:
            self._prompts.end(key, waste)
        name = self._names.pop(key, None)
        if name is not None:
            before = self._reservations.withdraw(name)
            if isinstance(name, bytes) and before is not ReservationState.ASKING:
                self._target.withdraw(name)
        self._answers.end(key)

    def _live(self) -> list[AttemptKey]:
        return [*self._names, *self._answers]

    def _gateway_of(self, key: AttemptKey) -> str:
        if key in self._answers:
            return self._answers.gateway_of(key)
        return self._reservations.gateway_of(self._names[key])


def _key(sequence_id: SequenceId) -> AttemptKey:
    return AttemptKey(request_id=sequence_id[0], attempt=sequence_id[1])
