"""One try at one or more choices on a pair of workers, or on one: what is asked of them, and what their answers mean.

Synchronous: fed with deliveries, it sends messages and returns tokens. Lives on the event loop; waits for nothing, and
trusts no worker: what cannot be ends the attempt.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from crossdock.worker.v1 import worker_pb2 as pb
from gateway.journal import Divergence, Journal
from gateway.lifecycle import LIVE, OWNED_BY_TARGET, Happening, IllegalHappening, Phase, after
from gateway.mailbox import DeadlinePassed, Delivery, Letter, Mailbox, Unwanted, WorkerLost
from gateway.request import TokenBatch
from gateway.worker_pool import WorkerRecord
from kvtransfer.ticket import Ticket, seal
from service.errors import DeadlineExpired, GuideFailed, InternalFault, ServiceError
from service.orders import SequenceOrder, to_spec
from service.reports import (
    AdoptedReport,
    EndCause,
    EndedReport,
    HandedOverReport,
    PromptReport,
    ReservedReport,
    TokenReport,
)

TOO_LATE = "the deadline passed before the answer was complete"


class AttemptLost(Exception):
    """This try will not end by itself, through no fault of the request. Another one can go on."""


class AttemptPreempted(AttemptLost):
    """The decode worker needed its blocks. times: how often that has happened to the request."""

    def __init__(self, what: str, times: int) -> None:
        super().__init__(what)
        self.times = times


class HandOffLost(AttemptLost):
    """The blocks did not get from one worker to the other."""


class WorkerFull(AttemptLost):
    """A worker takes no more now. address: its."""

    def __init__(self, what: str, address: str) -> None:
        super().__init__(what)
        self.address = address


class WorkerFailed(AttemptLost):
    """A worker broke, or said what it never should. address: its."""

    def __init__(self, what: str, address: str) -> None:
        super().__init__(what)
        self.address = address


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the sequence goes after its first token, and the right to go there. ticket: None where it has been from the
    beginning."""

    worker: WorkerRecord
    ticket: Ticket | None
    ticket_key: bytes

    def sealed(self) -> bytes:
        return seal(self.ticket, self.ticket_key) if self.ticket is not None else b""


class Attempt:
    """journals: of the order's choices. prefill: None where the target computes the prompt as well. target: None for
    answers that end with their first token. cached_tokens: that whoever computes the prompt will probably not have to
    compute. computed: somebody has computed the prompt. handed_over: the target has said that the sequence is its
    own."""

    def __init__(
        self,
        *,
        journals: Iterable[Journal],
        order: SequenceOrder,
        prefill: WorkerRecord | None,
        target: Target | None,
        mailbox: Mailbox,
        cached_tokens: int = 0,
    ) -> None:
        self.mailbox = mailbox
        self.phase = Phase.ROUTED
        self.failure: AttemptLost | ServiceError | None = None
        self.computed = False
        self.handed_over = False
        self._journals = {journal.choice: journal for journal in journals}
        self._live = set(self._journals)
        self._first_tokens_due = set(self._journals) if order.beam is None else set()
        self._order = order
        computer = prefill or (target.worker if target is not None else None)
        assert computer is not None, "somebody computes the prompt"
        self._computer = computer
        self._alone = prefill is None
        self._target = target
        self._cached_tokens = cached_tokens
        self._submitted = False
        self._ended_by: str | None = None

    def begin(self) -> None:
        """Ask for blocks, or for the prompt at once if none are needed elsewhere."""
        key = self._order.key
        uncached = max(1, len(self._order.token_ids) - self._cached_tokens)
        self._computer.book(key, self.mailbox, tokens=uncached)
        if self._target is None:
            self._submit()
            return
        worker = self._target.worker
        if not self._alone:
            worker.book(key, self.mailbox, tokens=0)
        reserve = pb.Reserve(sequence=to_spec(self._order), ticket=self._target.sealed())
        worker.attachment.send(pb.DecodeServiceAttachRequest(reserve=reserve))
        self._advance(Happening.SUBMITTED if self._alone else Happening.ASKED)

    def live(self) -> bool:
        """Whether anything may still come that somebody wants."""
        return self.phase in LIVE and bool(self._live)

    def hear(self, deliveries: list[Delivery]) -> list[TokenBatch]:
        """The tokens that these deliveries add. When they end the attempt badly, `failure` says how: what was entered
        in a journal before it is returned all the same."""
        heard = []
        for delivery in deliveries:
            batch = self._hear(delivery)
            if batch is not None and batch.tokens:
                heard.append(batch)
            if not self.live():
                break
        return heard

    def close(self) -> None:
        """Nobody follows this attempt any more: stop what the workers still do for it."""
        key = self._order.key
        cancel = pb.Cancel(request_id=key.request_id, attempt=key.attempt)
        self._computer.release(key)
        if self._submitted:
            self._computer.attachment.send(pb.PrefillServiceAttachRequest(cancel=cancel))
        if self._target is not None:
            self._target.worker.release(key)
            if self._ended_by != self._target.worker.address:
                self._target.worker.attachment.send(pb.DecodeServiceAttachRequest(cancel=cancel))

    def _hear(self, delivery: Delivery) -> TokenBatch | None:
        try:
            return self._read(delivery.sender, delivery.letter)
        except IllegalHappening as nonsense:
            self._lose(WorkerFailed(f"{delivery.sender}: {nonsense}", delivery.sender))
        except Divergence as divergence:
            self._lose(InternalFault(str(divergence)))
        return None

    def _read(self, sender: str, letter: Letter) -> TokenBatch | None:
        match letter:
            case TokenReport():
                return self._token(sender, letter)
            case PromptReport():
                self._scores(sender, letter)
            case ReservedReport():
                self._advance(Happening.GRANTED)
                self._reserved(letter.blocks_held)
            case AdoptedReport():
                if self._alone and self._first_tokens_due:
                    raise IllegalHappening("adopted before its first token")
                self._advance(Happening.ADOPTED)
                self.handed_over = True
                if self._order.beam is not None:
                    self._computed()
            case HandedOverReport():
                pass
            case EndedReport():
                self._ended(sender, letter)
            case WorkerLost():
                self._fail(sender, WorkerFailed(f"{sender} was lost", sender))
            case DeadlinePassed():
                self._lose(DeadlineExpired(TOO_LATE))
            case Unwanted():
                self._end_choice(letter.choice)
        return None

    def _reserved(self, blocks_held: int) -> None:
        """The target needs only the blocks that it does not hold: the ticket that the source gets says so."""
        assert self._target is not None and self._target.ticket is not None
        ticket = self._target.ticket
        if blocks_held > ticket.num_blocks:
            raise IllegalHappening(f"{blocks_held} blocks held of {ticket.num_blocks}")
        self._target = replace(self._target, ticket=replace(ticket, first_block=blocks_held))
        self._submit()

    def _scores(self, sender: str, report: PromptReport) -> None:
        """Whoever computes the prompt says how likely it is, while it does."""
        if sender != self._computer.address or not self._first_tokens_due:
            raise IllegalHappening("logprobs of a prompt that is not computed there")
        after(self.phase, Happening.FIRST_TOKEN)
        next(iter(self._journals.values())).score(report)

    def _token(self, sender: str, report: TokenReport) -> TokenBatch | None:
        choice = report.choice
        if choice not in self._journals:
            raise IllegalHappening(f"choice {choice} was not asked for")
        if sender == self._computer.address and not (self._alone and self.phase in OWNED_BY_TARGET):
            self._first_token(choice)
        else:
            self._advance(Happening.NEXT_TOKEN)
        if choice not in self._live:
            return None
        batch = self._journals[choice].take(report)
        if batch.end is not None:
            self._live.remove(choice)
            if not self._live:
                self._ended_by = sender
                self._advance(Happening.LAST_TOKEN)
        return batch

    def _end_choice(self, choice: int) -> None:
        """Its reader wants no more of it; the others go on."""
        if choice not in self._live:
            return
        self._live.remove(choice)
        if self._live and self._target is not None:
            key = self._order.key
            end = pb.EndChoice(request_id=key.request_id, attempt=key.attempt, choice=choice)
            self._target.worker.attachment.send(pb.DecodeServiceAttachRequest(end_choice=end))

    def _first_token(self, choice: int) -> None:
        """The prompt is computed once each choice has its first token."""
        if choice not in self._first_tokens_due:
            raise IllegalHappening(f"another first token of choice {choice}")
        after(self.phase, Happening.FIRST_TOKEN)
        self._first_tokens_due.remove(choice)
        if not self._first_tokens_due:
            self._computed()

    def _computed(self) -> None:
        self.computed = True
        self._computer.computed(self._order.key)
        self._advance(Happening.FIRST_TOKEN)

    def _ended(self, sender: str, report: EndedReport) -> None:
        match report.cause:
            case EndCause.EXHAUSTED:
                self._fail(sender, WorkerFull(_line(sender, report), sender))
            case EndCause.INVALID:
                self._fail(sender, InternalFault("a worker refused what the gateway had accepted"))
            case EndCause.GUIDE_FAILED if self._order.guide is not None:
                self._fail(sender, GuideFailed())
            case EndCause.PREEMPTED if self._may_preempt(sender):
                self._ended_by = sender
                self._fail(sender, AttemptPreempted(f"{sender}: preempted", report.preemptions))
            case EndCause.TRANSFER_FAILED:
                self._fail(sender, HandOffLost(_line(sender, report)))
            case EndCause.INTERNAL:
                self._fail(sender, WorkerFailed(_line(sender, report), sender))
            case _:
                self._fail(sender, AttemptLost(_line(sender, report)))

    def _may_preempt(self, sender: str) -> bool:
        """Only whoever owns the sequence can give it up, and generates."""
        owned = self._target is not None and (self._alone or self.phase in OWNED_BY_TARGET)
        return owned and self._target is not None and sender == self._target.worker.address

    def _fail(self, sender: str, failure: AttemptLost | ServiceError) -> None:
        """Something ended at a worker. Of no interest once it has said its last word here."""
        if sender == self._computer.address and not self._alone and self.phase is Phase.DECODING:
            return
        self._lose(failure)

    def _lose(self, failure: AttemptLost | ServiceError) -> None:
        self._advance(Happening.FAILED)
        self.failure = failure

    def _submit(self) -> None:
        sealed = self._target.sealed() if self._target else b""
        welcome = self._target.worker.welcome if self._target else None
        submit = pb.SubmitPrompt(
            sequence=to_spec(self._order),
            ticket=sealed,
            target_endpoints=welcome.kv_endpoints if welcome else (),
        )
        self._computer.attachment.send(pb.PrefillServiceAttachRequest(submit=submit))
        self._submitted = True
        self._advance(Happening.SUBMITTED)

    def _advance(self, happening: Happening) -> None:
        self.phase = after(self.phase, happening)
        if self.phase in (Phase.DECODING, Phase.DONE):
            self._submitted = False


def _line(sender: str, report: EndedReport) -> str:
    return f"{sender}: {report.cause.name.lower()}: {report.detail}"
