"""What an attempt asks of its two workers, and what it makes of all that they can say."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gateway.attach import DECODE, PREFILL
from gateway.attempt import (
    Attempt,
    AttemptLost,
    AttemptPreempted,
    HandOffLost,
    Target,
    WorkerFailed,
    WorkerFull,
)
from gateway.journal import Journal
from gateway.lifecycle import LIVE, Phase
from gateway.mailbox import DeadlinePassed, Delivery, Mailbox, Turnstile, Unwanted, WorkerLost
from gateway.request import EndReason
from kvtransfer.identity import Identity
from kvtransfer.ticket import mint, open_sealed
from service.errors import DeadlineExpired, GuideFailed, InternalFault
from service.guides import Guide, GuideKind
from service.reports import EndCause, TokenEnd
from tests.fakes.scripted_workers import (
    BLOCK_SIZE,
    FINGERPRINT,
    TICKET_KEY,
    Say,
    ScriptedWorker,
    make_pool,
    make_request,
)

ANSWER = (11, 12, 13)


class Scene:
    """One attempt at an answer of three tokens, on workers p and d; `heard` collects what it returns."""

    def __init__(self, emitted=(), **request):
        (source,), (target,) = make_pool(PREFILL, ("p",)), make_pool(DECODE, ("d",))
        self.p, self.d = ScriptedWorker(source, PREFILL), ScriptedWorker(target, DECODE)
        self.p.join()
        self.d.join()
        self.journal = Journal(make_request(max_tokens=len(ANSWER), stop=(2,), **request), "wire")
        order = self.journal.order(1)
        self.say = Say(order.key)
        for token in [self.say.token(*each) for each in enumerate(emitted)]:
            self.journal.take(token)
        order = self.journal.order(1)
        self.ticket = self._ticket(order)
        right = Target(worker=target, ticket=self.ticket, ticket_key=TICKET_KEY)
        self.attempt = Attempt(
            journals=[self.journal],
            order=order,
            prefill=source,
            target=right if self.journal.remaining() > 1 else None,
            mailbox=Mailbox(Turnstile()),
        )
        self.heard = []

    def tell(self, sender, *letters):
        batches = self.attempt.hear([Delivery(sender=sender, letter=letter) for letter in letters])
        self.heard += [token.token_id for batch in batches for token in batch.tokens]
        return batches[-1] if batches else None

    def reach(self, phase):
        """Bring the attempt into a phase by the shortest way."""
        if phase is Phase.ROUTED:
            return self
        self.attempt.begin()
        say = self.say
        ways = {
            Phase.RESERVING: (),
            Phase.COMPUTING: (("d", say.reserved),),
            Phase.HANDING_OVER: (("d", say.reserved), ("p", say.token(0, 11))),
            Phase.ADOPTED: (("d", say.reserved), ("d", say.adopted)),
            Phase.DECODING: (("d", say.reserved), ("p", say.token(0, 11)), ("d", say.adopted)),
        }
        for sender, letter in ways[phase]:
            self.tell(sender, letter)
        assert self.attempt.phase is phase
        return self

    def _ticket(self, order):
        tokens = len(order.token_ids)
        return mint(
            lambda count: bytes(range(1, count + 1)),
            request_id=order.key.request_id,
            attempt=order.key.attempt,
            source=Identity(worker_id="p", epoch=7),
            target=Identity(worker_id="d", epoch=7),
            layout_fingerprint=FINGERPRINT,
            num_tokens=tokens,
            first_block=0,
            num_blocks=-(-tokens // BLOCK_SIZE),
            lease_ms=1000,
        )


REACHABLE = (Phase.RESERVING, Phase.COMPUTING, Phase.HANDING_OVER, Phase.ADOPTED, Phase.DECODING)


def test_a_good_answer_asks_for_blocks_then_for_the_prompt_and_cancels_nothing_that_ended():
    scene = Scene()
    say = scene.say
    scene.attempt.begin()
    assert (scene.p.kinds(), scene.d.kinds()) == ([], ["reserve"])
    assert open_sealed(scene.d.told[0].reserve.ticket, TICKET_KEY) == scene.ticket
    assert list(scene.d.told[0].reserve.sequence.token_ids) == [5, 6, 7]
    scene.tell("d", say.reserved)
    submit = scene.p.told[0].submit
    assert open_sealed(submit.ticket, TICKET_KEY) == scene.ticket
    assert list(submit.target_endpoints) == ["mem://d"]
    assert scene.p.record.view().queued_tokens == 3
    scene.tell("p", say.token(0, 11))
    assert scene.p.record.view().queued_tokens == 0
    scene.tell("d", say.adopted, say.token(1, 12))
    scene.tell("p", say.handed_over)
    batch = scene.tell("d", say.token(2, 13, TokenEnd.LENGTH))
    assert (scene.heard, batch.end) == ([11, 12, 13], EndReason.LENGTH)
    assert scene.attempt.phase is Phase.DONE and scene.attempt.failure is None
    scene.attempt.close()
    assert (scene.p.kinds(), scene.d.kinds()) == (["submit"], ["reserve"])
    assert scene.p.is_free() and scene.d.is_free()


def test_an_answer_of_one_token_never_speaks_to_the_decode_worker():
    """Case 70."""
    scene = Scene(emitted=(11, 12))
    scene.attempt.begin()
    assert scene.p.told[0].submit.ticket == b""
    batch = scene.tell("p", scene.say.token(2, 13, TokenEnd.LENGTH))
    scene.attempt.close()
    assert batch.end is EndReason.LENGTH
    assert (scene.p.kinds(), scene.d.kinds()) == (["submit"], [])


def test_a_first_token_that_is_the_last_gives_the_reservation_back():
    scene = Scene().reach(Phase.COMPUTING)
    batch = scene.tell("p", scene.say.token(0, 2, TokenEnd.STOP))
    scene.attempt.close()
    assert (batch.end, scene.attempt.phase) == (EndReason.STOP, Phase.DONE)
    assert (scene.p.kinds(), scene.d.kinds()) == (["submit"], ["reserve", "cancel"])


def test_tokens_of_the_decode_worker_wait_for_the_first_one():
    scene = Scene().reach(Phase.ADOPTED)
    scene.tell("d", scene.say.token(1, 12), scene.say.token(2, 13, TokenEnd.LENGTH))
    assert scene.heard == [] and scene.attempt.live()
    batch = scene.tell("p", scene.say.token(0, 11))
    assert (scene.heard, batch.end, scene.attempt.phase) == ([11, 12, 13], EndReason.LENGTH, Phase.DONE)


@pytest.mark.parametrize("phase", [Phase.ROUTED, *REACHABLE])
def test_closing_in_any_phase_cancels_what_was_asked_for_and_books_nothing(phase):
    scene = Scene().reach(phase)
    scene.attempt.close()
    asked_p, asked_d = "submit" in scene.p.kinds(), "reserve" in scene.d.kinds()
    assert ("cancel" in scene.p.kinds()) == (asked_p and phase is not Phase.DECODING)
    assert not asked_d or "cancel" in scene.d.kinds()
    assert scene.p.is_free() and scene.d.is_free()
    for message in (*scene.p.told, *scene.d.told):
        if message.WhichOneof("message") == "cancel":
            assert (message.cancel.request_id, message.cancel.attempt) == ("wire", 1)


FAILURES = {
    EndCause.CANCELLED: AttemptLost,
    EndCause.INVALID: InternalFault,
    EndCause.EXHAUSTED: WorkerFull,
    EndCause.DRAINING: AttemptLost,
    EndCause.TRANSFER_FAILED: HandOffLost,
    EndCause.TICKET_REFUSED: AttemptLost,
    EndCause.INTERNAL: WorkerFailed,
    EndCause.PREEMPTED: AttemptLost,
    EndCause.GUIDE_FAILED: AttemptLost,
}


@pytest.mark.parametrize(("phase", "sender", "cause"), list(itertools.product(REACHABLE, "pd", EndCause)))
def test_an_end_at_a_worker_ends_the_attempt_unless_it_has_said_its_last_word(phase, sender, cause):
    scene = Scene().reach(phase)
    scene.tell(sender, scene.say.ended(cause, "10.0.0.1 said so"))
    if sender == "p" and phase is Phase.DECODING:
        assert scene.attempt.phase is phase and scene.attempt.failure is None
        return
    assert scene.attempt.phase is Phase.LOST
    owns = sender == "d" and phase in (Phase.ADOPTED, Phase.DECODING)
    given_up = cause is EndCause.PREEMPTED and owns
    assert type(scene.attempt.failure) is (AttemptPreempted if given_up else FAILURES[cause])
    if cause is EndCause.INVALID:
        assert "10.0.0.1" not in str(scene.attempt.failure), "a client sees no text of a worker"


@pytest.mark.parametrize(("phase", "sender"), [(Phase.COMPUTING, "p"), (Phase.DECODING, "d")])
def test_a_guide_that_cannot_be_followed_ends_the_request_and_blames_no_worker(phase, sender):
    scene = Scene(guide=Guide(kind=GuideKind.REGEX, text="a")).reach(phase)
    scene.tell(sender, scene.say.ended(EndCause.GUIDE_FAILED, "10.0.0.1 said so"))
    failure = scene.attempt.failure
    assert isinstance(failure, GuideFailed) and not isinstance(failure, AttemptLost)
    assert failure.reason == "GUIDE_FAILED" and "10.0.0.1" not in str(failure)


@pytest.mark.parametrize("phase", [Phase.ADOPTED, Phase.DECODING])
def test_whoever_gives_a_sequence_up_says_how_often_and_needs_no_cancel(phase):
    scene = Scene().reach(phase)
    scene.tell("d", replace(scene.say.ended(EndCause.PREEMPTED), preemptions=2))
    assert scene.attempt.failure.times == 2
    scene.attempt.close()
    assert scene.d.kinds()[-1] != "cancel"


@pytest.mark.parametrize(("phase", "sender"), list(itertools.product(REACHABLE, "pd")))
def test_a_lost_worker_ends_the_attempt_unless_it_has_said_its_last_word(phase, sender):
    scene = Scene().reach(phase)
    scene.tell(sender, WorkerLost())
    lost = not (sender == "p" and phase is Phase.DECODING)
    assert (type(scene.attempt.failure) is WorkerFailed) == lost
    assert not lost or scene.attempt.failure.address == sender
    assert (scene.attempt.phase is Phase.LOST) == lost


@pytest.mark.parametrize("phase", REACHABLE)
def test_the_deadline_ends_the_attempt_in_any_phase(phase):
    scene = Scene().reach(phase)
    scene.tell("", DeadlinePassed())
    assert type(scene.attempt.failure) is DeadlineExpired


def test_what_was_entered_before_a_failure_is_shown_and_what_comes_after_it_is_not():
    scene = Scene().reach(Phase.DECODING)
    scene.tell("d", scene.say.token(1, 12), WorkerLost(), scene.say.token(2, 13, TokenEnd.LENGTH))
    assert scene.heard == [11, 12]
    assert len(scene.journal) == 2
    assert type(scene.attempt.failure) is WorkerFailed


def test_a_token_that_contradicts_the_journal_is_a_fault_and_not_shown():
    scene = Scene().reach(Phase.DECODING)
    scene.tell("d", scene.say.token(1, 12), scene.say.token(1, 99))
    assert scene.heard == [11, 12]
    assert type(scene.attempt.failure) is InternalFault


LETTERS = {
    "reserved": lambda say: say.reserved,
    "adopted": lambda say: say.adopted,
    "handed over": lambda say: say.handed_over,
    "token 0": lambda say: say.token(0, 11),
    "token 1": lambda say: say.token(1, 12),
    "last": lambda say: say.token(2, 13, TokenEnd.LENGTH),
    "stop": lambda say: say.token(0, 2, TokenEnd.STOP),
    "ended": lambda say: say.ended(EndCause.INTERNAL),
}


@pytest.mark.parametrize(("phase", "sender"), list(itertools.product(REACHABLE, "pd")))
def test_no_two_letters_in_any_phase_from_anybody_do_more_than_end_the_attempt(phase, sender):
    """A worker can say anything at any time: it never raises, and afterwards closing leaves nothing behind."""
    for first, second in itertools.product(LETTERS.values(), repeat=2):
        scene = Scene().reach(phase)
        for make in (first, second):
            if scene.attempt.live():
                scene.tell(sender, make(scene.say))
        assert (scene.attempt.phase is Phase.LOST) == (scene.attempt.failure is not None)
        assert tuple(scene.heard) in {(), (11,), (2,), (11, 12), (11, 12, 13)}
        if not scene.attempt.live() and scene.attempt.failure is None:
            assert tuple(scene.heard) in {(2,), (11, 12, 13)}
        scene.attempt.close()
        assert scene.p.is_free() and scene.d.is_free()


@pytest.mark.parametrize("phase", [Phase.RESERVING, Phase.COMPUTING, Phase.HANDING_OVER])
def test_a_decode_worker_that_generates_before_it_adopted_is_not_believed(phase):
    scene = Scene().reach(phase)
    scene.tell("d", scene.say.token(1, 12))
    assert type(scene.attempt.failure) is WorkerFailed
    assert phase in LIVE


def test_workers_that_call_themselves_alike_are_told_apart():
    scene = Scene()
    scene.p.join("twin")
    scene.d.join("twin")
    scene.reach(Phase.DECODING)
    assert SimpleNamespace(p=scene.p.record.worker_id, d=scene.d.record.worker_id) == SimpleNamespace(
        p="twin", d="twin"
    )
    scene.tell("p", WorkerLost())
    assert scene.attempt.live()
    scene.tell("d", WorkerLost())
    assert type(scene.attempt.failure) is WorkerFailed


class Pair(Scene):
    """One attempt at two choices of three tokens."""

    def __init__(self):
        super().__init__()
        request = self.journal.request
        self.journals = [Journal(request, f"wire.{choice}", choice=choice) for choice in (0, 1)]
        orders = [journal.order(1) for journal in self.journals]
        choices = tuple(choice for order in orders for choice in order.choices)
        order = replace(orders[0], key=self.say.key, choices=choices)
        right = Target(worker=self.d.record, ticket=self.ticket, ticket_key=TICKET_KEY)
        self.attempt = Attempt(
            journals=self.journals,
            order=order,
            prefill=self.p.record,
            target=right,
            mailbox=Mailbox(Turnstile()),
        )

    def tell(self, sender, *letters):
        batches = self.attempt.hear([Delivery(sender=sender, letter=letter) for letter in letters])
        return {batch.choice: [token.token_id for token in batch.tokens] for batch in batches}


def pair_computing():
    scene = Pair()
    scene.attempt.begin()
    scene.tell("d", scene.say.reserved)
    return scene


def test_the_prompt_is_computed_when_each_choice_has_its_first_token():
    scene = pair_computing()
    say = scene.say
    assert scene.tell("p", say.token(0, 11, choice=1)) == {1: [11]}
    assert scene.attempt.phase is Phase.COMPUTING
    assert scene.tell("p", say.token(0, 12, choice=0)) == {0: [12]}
    assert scene.attempt.phase is Phase.HANDING_OVER


@pytest.mark.parametrize("choice", [1, 2, 99])
def test_a_first_token_twice_or_of_a_choice_that_nobody_asked_for_ends_the_attempt(choice):
    scene = pair_computing()
    scene.tell("p", scene.say.token(0, 11, choice=1), scene.say.token(0, 11, choice=choice))
    assert type(scene.attempt.failure) is WorkerFailed


def test_the_attempt_is_done_when_its_last_choice_is():
    scene = pair_computing()
    say = scene.say
    scene.tell("p", say.token(0, 2, TokenEnd.STOP, choice=0), say.token(0, 11, choice=1))
    scene.tell("d", say.adopted, say.token(1, 12, choice=1))
    assert scene.attempt.phase is Phase.DECODING
    assert scene.tell("d", say.token(2, 13, TokenEnd.LENGTH, choice=1)) == {1: [13]}
    assert scene.attempt.phase is Phase.DONE
    scene.attempt.close()
    assert (scene.p.kinds(), scene.d.kinds()) == (["submit"], ["reserve"])


def test_a_choice_that_is_not_read_any_more_is_ended_once_and_not_shown():
    scene = pair_computing()
    say = scene.say
    scene.tell("p", say.token(0, 11, choice=0), say.token(0, 11, choice=1))
    scene.tell("", Unwanted(choice=0), Unwanted(choice=0))
    assert scene.d.kinds() == ["reserve", "end_choice"]
    assert scene.tell("d", say.adopted, say.token(1, 12, choice=0), say.token(1, 12, choice=1)) == {1: [12]}
    scene.tell("d", say.token(2, 13, TokenEnd.LENGTH, choice=1))
    assert scene.attempt.phase is Phase.DONE


def test_an_attempt_whose_choices_nobody_reads_is_over():
    scene = pair_computing()
    scene.tell("p", scene.say.token(0, 11, choice=0), scene.say.token(0, 11, choice=1))
    scene.tell("", Unwanted(choice=0), Unwanted(choice=1))
    assert not scene.attempt.live() and scene.attempt.failure is None
    scene.attempt.close()
    assert (scene.p.kinds(), scene.d.kinds()) == (["submit", "cancel"], ["reserve", "end_choice", "cancel"])
