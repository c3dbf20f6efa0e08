"""What a prefill worker does with an attempt: compute the prompt, push its blocks, let it go.

Everything here runs on the step thread. It starts sequences, turns the engine's results into pushes and reports, and
turns what the transport says into releases. Never touches a socket, never decides what is computed next.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from engine.cache.block_pool import Ledger
from engine.cache.copying import Action
from engine.cache.kv_cache import KVCache
from engine.cache.prefix_chain import PrefixChain
from engine.constraint import Constraint, ends_of
from engine.core import EngineCore
from engine.results import Output, StepResult
from engine.scheduling.pace import Rate
from engine.scoring import Scored
from engine.sequence import (
    EndReason,
    Progress,
    SamplingParams,
    Sequence,
    SequenceId,
    StopRules,
)
from kvtransfer.errors import Overloaded, Reason, TicketRefused
from kvtransfer.events import Closed, Committed, Failed, FirstTokens, SourceEvent
from kvtransfer.source_endpoint import TransferSource
from kvtransfer.ticket import Ticket
from prefill_worker.holds import Holds
from service.load import WorkerLoad
from service.orders import AttemptKey, AttemptRefused, SequenceOrder, superseded
from service.reports import (
    NOTHING_ALLOWED,
    EndCause,
    EndedReport,
    HandedOverReport,
    PromptReport,
    Report,
    TokenEnd,
    TokenReport,
)
from service.scores import Scores
from service.token_books import TokenBooks, TokenCounts, Waste
from service.worker_counts import PREFIX_HITS, PREFIX_QUERIES, TRANSFER_FAILURES

MEASURED_TOKENS_MIN = 64
ENDPOINTS_MAX = 8
ENDPOINT_CHARS_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOff:
    """Where an attempt's blocks go. endpoints: best first, at least one."""

    ticket: Ticket
    sealed: bytes
    endpoints: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One try at a prompt. sequence: None once it is detached. pushed: blocks that the transport is given, as soon as
    they are in host memory. computed: tokens that were computed for it here. done_at: when the prompt was done and the
    hand-off was not, in seconds."""

    gateway: str
    order: SequenceOrder
    hand_off: HandOff | None
    sequence: Sequence | None
    pushed: int = 0
    computed: int = 0
    done_at: float = 0.0


class PrefillWorker:
    """tell: gives reports for a gateway to the rim; never blocks. clock: seconds, monotonic.
    borrowed_s: seconds that cores of other workers have computed here."""

    def __init__(
        self,
        *,
        core: EngineCore,
        cache: KVCache,
        source: TransferSource,
        tell: Callable[[str, Report], None],
        clock: Callable[[], float],
        queue_requests_max: int,
        borrowed_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._core = core
        self._cache = cache
        self._source = source
        self._tell = tell
        self._clock = clock
        self._queue_requests_max = queue_requests_max
        self._borrowed_s = borrowed_s
        self._holds = Holds(core.pool)
        self._attempts: dict[AttemptKey, Attempt] = {}
        self._by_ticket: dict[bytes, Attempt] = {}
        self._finished_sequences = 0
        self._books = TokenBooks()
        self._counts = Counter[str]()
        self._hand_off_pace = Rate()

    def submit(
        self,
        gateway: str,
        order: SequenceOrder,
        hand_off: HandOff | None,
        constraint: Constraint | None = None,
    ) -> None:
        """Take one attempt, once. Refusals are reported; older attempts of the same request are void from now on.
        constraint: of the order's guide, at its tokens."""
        try:
            _require_complete(order, hand_off)
            live = ((each.gateway, key) for key, each in self._attempts.items())
            for older in superseded(gateway, order.key, live):
                self._stop(gateway, older, Waste.SUPERSEDED)
            if order.key not in self._attempts:
                self._start(gateway, order, hand_off, constraint)
        except tuple(_REFUSALS) as error:
            refusal = EndedReport(key=order.key, cause=_REFUSALS[type(error)], detail=str(error))
            self._tell(gateway, refusal)

    def cancel(self, gateway: str, key: AttemptKey) -> None:
        """Stop an attempt of this gateway and acknowledge it. Unknown and ended attempts are acknowledged too."""
        self._stop(gateway, key, Waste.CANCELLED)

    def drop(self, gateway: str) -> None:
        """The gateway is gone: stop all it asked for."""
        for attempt in [each for each in self._attempts.values() if each.gateway == gateway]:
            self._end(attempt, Waste.GATEWAY_LOST)

    def on_step(self, result: StepResult) -> None:
        """Push what was computed, report what was sampled."""
        for progress in result.progress:
            self._enter(progress)
        for scored in result.scored:
            self._tell_scores(scored)
        for output in result.outputs:
            self._first_token(output)
        for sequence in result.dead_ends:
            self._dead_end(self._attempts[_key(sequence.id)])

    def on_transfer(self, event: SourceEvent) -> None:
        """What became of a hand-off."""
        attempt = self._by_ticket.get(event.ticket_id)
        match event:
            case Committed():
                if attempt is not None:
                    self._forget(attempt)
                    self._measure(attempt)
                    self._books.deliver(attempt.computed)
                    self._tell(attempt.gateway, HandedOverReport(key=attempt.order.key))
                    self._holds.let_go(event.ticket_id)
            case Failed():
                self._counts[f"{TRANSFER_FAILURES}.{event.reason.name.lower()}"] += 1
                if attempt is not None:
                    # The target lets go when it is told to before we are.
                    unwanted = event.reason is Reason.WITHDRAWN
                    self._end(attempt, Waste.CANCELLED if unwanted else Waste.TRANSFER_FAILED)
                    self._tell(attempt.gateway, _failure(attempt, event))
            case Closed():
                self._holds.closed(event.ticket_id)

    def ledger(self) -> Ledger:
        return self._core.pool.ledger()

    def tokens(self) -> TokenCounts:
        return self._books.counts(live=sum(attempt.computed for attempt in self._attempts.values()))

    def counts(self) -> dict[str, int]:
        """Since the start, by the names of `service.worker_counts`. Any thread."""
        return dict(self._counts)

    def load(self, step: int) -> WorkerLoad:
        view, pace = self._core.view(), self._core.pace
        return WorkerLoad(
            step=step,
            running_sequences=len(self._attempts) - len(view.waiting),
            waiting_sequences=len(view.waiting),
            waiting_tokens=sum(one.uncomputed for one in (*view.waiting, *view.running)),
            free_blocks=view.available_blocks,
            total_blocks=self._core.pool.total,
            finished_sequences=self._finished_sequences,
            borrowed_core_ms=int(self._borrowed_s() * 1000),
            prompt_token_ms=pace.tokens.each_s() * 1000,
            hand_off_token_ms=self._hand_off_pace.each_s() * 1000,
        )

    def _start(
        self, gateway: str, order: SequenceOrder, hand_off: HandOff | None, constraint: Constraint | None
    ) -> None:
        """Raises TicketRefused or Overloaded, and then nothing has begun."""
        queue_requests_max = self._queue_requests_max * (2 if order.comes_back() else 1)
        if len(self._attempts) >= queue_requests_max:
            raise Overloaded(f"{queue_requests_max} requests are queued")
        if hand_off is not None and hand_off.ticket.ticket_id in self._holds:
            raise TicketRefused(Reason.SPENT, "its blocks are held")
        chain, arrived = self._core.chain(order.cache_scope), order.arrived(self._clock())
        sequence = _sequence(order, constraint, chain, arrived)
        attempt = Attempt(gateway=gateway, order=order, hand_off=hand_off, sequence=sequence)
        if hand_off is not None:
            ticket = hand_off.ticket
            self._source.open(hand_off.sealed, ticket, hand_off.endpoints)
            attempt.pushed = ticket.first_block
            self._by_ticket[ticket.ticket_id] = attempt
            self._holds.open(ticket.ticket_id, order.key.request_id)
        self._attempts[order.key] = attempt
        self._core.submit(sequence)

    def _enter(self, progress: Progress) -> None:
        """Book what the last step computed, and push the blocks it filled; the transport reads them in host memory."""
        attempt = self._attempts[_key(progress.sequence.id)]
        attempt.computed += progress.tokens
        self._books.compute(progress.tokens)
        self._push(attempt, progress.sequence.computed // self._cache.layout.block_size)

    def _push(self, attempt: Attempt, until: int) -> None:
        if attempt.hand_off is None or until <= attempt.pushed:
            return
        assert attempt.sequence is not None and attempt.sequence.table is not None
        ticket_id, first = attempt.hand_off.ticket.ticket_id, attempt.pushed
        blocks = attempt.sequence.table.ids()[first:until]
        attempt.pushed = until
        self._bring(ticket_id, blocks, partial(self._send, ticket_id, first, blocks))

    def _bring(self, ticket_id: bytes, blocks: tuple[int, ...], read: Action) -> None:
        """To host memory, after what was brought before; the blocks are held until it is done, whatever happens."""
        self._holds.copying(ticket_id)
        self._cache.to_host(blocks, read, partial(self._holds.copied, ticket_id))

    def _send(self, ticket_id: bytes, first: int, blocks: tuple[int, ...]) -> None:
        """Any thread. What was cancelled meanwhile, the transport takes no more."""
        self._source.push(ticket_id, first, [self._cache.block_view(block) for block in blocks])

    def _tell_scores(self, scored: Scored) -> None:
        attempt = self._attempts[_key(scored.sequence.id)]
        scores = Scores.of(scored.scores)
        report = PromptReport(key=attempt.order.key, first_position=scored.first_position, scores=scores)
        self._tell(attempt.gateway, report)

    def _first_token(self, output: Output) -> None:
        """The prompt is done: the token goes to the gateway at once, the blocks to the target or back."""
        attempt = self._attempts[_key(output.sequence.id)]
        self._finished_sequences += 1
        self._counts[PREFIX_QUERIES] += len(attempt.order.token_ids)
        self._counts[PREFIX_HITS] += output.sequence.cached
        going_on = self._report(attempt, output) if attempt.order.beam is None else ()
        if attempt.hand_off is not None and (going_on or attempt.order.beam is not None):
            self._hand_over(attempt, attempt.hand_off, going_on)
        else:
            self._end(attempt, None)

    def _dead_end(self, attempt: Attempt) -> None:
        self._end(attempt, Waste.GUIDE_FAILED)
        key = attempt.order.key
        self._tell(attempt.gateway, EndedReport(key=key, cause=EndCause.GUIDE_FAILED, detail=NOTHING_ALLOWED))

    def _report(self, attempt: Attempt, output: Output) -> FirstTokens:
        """Tell the first token of each choice. Returns those of the choices that go on."""
        order, going_on = attempt.order, []
        rules = order.stop_rules(StopRules, ends_of(output.sequence.constraint))
        for choice, token in zip(order.choices, (output.sampled, *output.twins), strict=True):
            end = rules.end_with(token.token, output.position + 1)
            self._tell(
                attempt.gateway,
                TokenReport(
                    key=order.key,
                    choice=choice.index,
                    position=output.position - order.prompt_tokens,
                    token_id=token.token,
                    logprob=token.logprob,
                    top=token.top,
                    end=_ENDS[end] if end else None,
                    cached_tokens=output.sequence.cached,
                ),
            )
            if end is None:
                going_on.append((choice.index, token.token))
        return tuple(going_on)

    def _hand_over(self, attempt: Attempt, hand_off: HandOff, first_tokens: FirstTokens) -> None:
        sequence = attempt.sequence
        assert sequence is not None and sequence.table is not None and sequence.credit is not None
        self._push(attempt, len(sequence.table))
        self._core.detach(sequence.id)
        attempt.sequence, attempt.done_at = None, self._clock()
        self._core.pool.waive(sequence.credit)
        ticket_id = hand_off.ticket.ticket_id
        self._holds.keep(ticket_id, sequence.table)
        self._bring(ticket_id, (), partial(self._source.finish, ticket_id, sequence.computed, first_tokens))

    def _measure(self, attempt: Attempt) -> None:
        """What a hand-off took. A short one says nothing of the link: it is all way and no freight."""
        assert attempt.hand_off is not None
        blocks = len(attempt.hand_off.ticket.blocks_to_send())
        tokens = blocks * self._cache.layout.block_size
        if tokens >= MEASURED_TOKENS_MIN:
            self._hand_off_pace = self._hand_off_pace.after(self._clock() - attempt.done_at, tokens)

    def _stop(self, gateway: str, key: AttemptKey, waste: Waste) -> None:
        attempt = self._attempts.get(key)
        if attempt is not None and attempt.gateway == gateway:
            self._end(attempt, waste)
        self._tell(gateway, EndedReport(key=key, cause=EndCause.CANCELLED, detail="cancelled"))

    def _end(self, attempt: Attempt, waste: Waste | None) -> None:
        """Stop whatever this attempt still does here. Blocks that the transport may read stay held.

        waste: why what was computed was of no use; None when it was.
        """
        self._forget(attempt)
        if waste is None:
            self._books.deliver(attempt.computed)
        else:
            self._books.waste(waste, attempt.computed)
        ticket_id = attempt.hand_off.ticket.ticket_id if attempt.hand_off else None
        sequence, attempt.sequence = attempt.sequence, None
        if sequence is not None:
            self._core.detach(sequence.id)
            if sequence.credit is not None:
                self._core.pool.waive(sequence.credit)
            if sequence.table is not None:
                if ticket_id is None:
                    self._core.pool.release(sequence.table)
                else:
                    self._holds.keep(ticket_id, sequence.table)
        if ticket_id is not None:
            self._source.cancel(ticket_id)
            self._holds.let_go(ticket_id)

    def _forget(self, attempt: Attempt) -> None:
        del self._attempts[attempt.order.key]
        if attempt.hand_off is not None:
            del self._by_ticket[attempt.hand_off.ticket.ticket_id]


_REFUSALS: dict[type[Exception], EndCause] = {
    AttemptRefused: EndCause.INVALID,
    TicketRefused: EndCause.TICKET_REFUSED,
    Overloaded: EndCause.EXHAUSTED,
}
_ENDS = {EndReason.STOP: TokenEnd.STOP, EndReason.LENGTH: TokenEnd.LENGTH}


def _require_complete(order: SequenceOrder, hand_off: HandOff | None) -> None:
    """What goes on after its first token goes on elsewhere. Raises AttemptRefused."""
    if hand_off is None and order.goes_on():
        raise AttemptRefused("ticket: needed for an answer of more than one token")
    if hand_off is not None and not _dialable(hand_off.endpoints):
        raise AttemptRefused(
            f"target_endpoints: 1 to {ENDPOINTS_MAX} of at most {ENDPOINT_CHARS_MAX} characters"
        )


def _dialable(endpoints: tuple[str, ...]) -> bool:
    return 1 <= len(endpoints) <= ENDPOINTS_MAX and max(map(len, endpoints)) <= ENDPOINT_CHARS_MAX


def _sequence(
    order: SequenceOrder, constraint: Constraint | None, chain: PrefixChain, arrived: float
) -> Sequence:
    """The prompt and one token of each choice: what this worker does of an answer."""
    first, *others = order.choices
    return Sequence(
        id=(order.key.request_id, order.key.attempt, first.index),
        tokens=list(order.token_ids),
        sampling=order.sampling(first, SamplingParams),
        twins=tuple(order.sampling(choice, SamplingParams) for choice in others),
        prompt_tokens=order.prompt_tokens,
        stop=replace(order.stop_rules(StopRules, ends_of(constraint)), length_limit=len(order.token_ids) + 1),
        constraint=constraint,
        arrived=arrived,
        preemptions=order.preemptions,
        scored=order.prompt_logprobs,
        chain=chain,
    )


def _key(sequence_id: SequenceId) -> AttemptKey:
    return AttemptKey(request_id=sequence_id[0], attempt=sequence_id[1])


def _failure(attempt: Attempt, event: Failed) -> EndedReport:
    return EndedReport(key=attempt.order.key, cause=EndCause.TRANSFER_FAILED, detail=event.detail)
