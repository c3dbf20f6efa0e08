"""What an attempt asks of a worker that is alone with it, and what it makes of all that this one can say."""

import itertools
from dataclasses import replace

import pytest

from gateway.attempt import Attempt, AttemptPreempted, Target, WorkerFailed
from gateway.lifecycle import Phase
from gateway.mailbox import Mailbox, Turnstile
from gateway.request import EndReason
from service.reports import EndCause, TokenEnd
from tests.fakes.scripted_workers import TICKET_KEY
from tests.gateway.test_attempt import FAILURES, LETTERS, Scene


class Single(Scene):
    """One attempt at an answer of three tokens, all of it on worker d."""

    def __init__(self):
        super().__init__()
        order = self.journal.order(1)
        itself = Target(worker=self.d.record, ticket=None, ticket_key=TICKET_KEY)
        self.attempt = Attempt(
            journals=[self.journal], order=order, prefill=None, target=itself, mailbox=Mailbox(Turnstile())
        )

    def reach(self, phase):
        self.attempt.begin()
        said = [self.say.token(0, 11), self.say.adopted][: SINGLY.index(phase)]
        self.tell("d", *said)
        assert self.attempt.phase is phase
        return self


SINGLY = (Phase.COMPUTING, Phase.HANDING_OVER, Phase.DECODING)


def test_a_worker_alone_is_asked_once_and_without_a_ticket():
    scene = Single()
    say = scene.say
    scene.attempt.begin()
    assert (scene.p.kinds(), scene.d.kinds()) == ([], ["reserve"])
    assert scene.d.told[0].reserve.ticket == b""
    assert scene.d.record.view().queued_tokens == 3
    scene.tell("d", say.token(0, 11))
    assert scene.d.record.view().queued_tokens == 0
    batch = scene.tell("d", say.adopted, say.token(1, 12), say.token(2, 13, TokenEnd.LENGTH))
    assert (scene.heard, batch.end) == ([11, 12, 13], EndReason.LENGTH)
    assert scene.attempt.phase is Phase.DONE and scene.attempt.handed_over
    scene.attempt.close()
    assert (scene.p.kinds(), scene.d.kinds()) == ([], ["reserve"])
    assert scene.d.is_free()


@pytest.mark.parametrize("phase", SINGLY)
def test_closing_a_worker_alone_cancels_it_once(phase):
    scene = Single().reach(phase)
    scene.attempt.close()
    assert (scene.p.kinds(), scene.d.kinds()) == ([], ["reserve", "cancel"])
    assert scene.d.is_free()


def test_a_worker_alone_that_ends_with_its_first_token_needs_no_cancel():
    scene = Single().reach(Phase.COMPUTING)
    batch = scene.tell("d", scene.say.token(0, 2, TokenEnd.STOP))
    scene.attempt.close()
    assert (batch.end, scene.attempt.phase) == (EndReason.STOP, Phase.DONE)
    assert scene.d.kinds() == ["reserve"]


@pytest.mark.parametrize("phase", SINGLY)
def test_a_worker_alone_may_give_the_sequence_up_at_any_time(phase):
    scene = Single().reach(phase)
    scene.tell("d", replace(scene.say.ended(EndCause.PREEMPTED), preemptions=1))
    assert type(scene.attempt.failure) is AttemptPreempted
    scene.attempt.close()
    assert scene.d.kinds() == ["reserve"]


@pytest.mark.parametrize(("phase", "cause"), list(itertools.product(SINGLY, EndCause)))
def test_whatever_ends_at_a_worker_alone_ends_the_attempt(phase, cause):
    scene = Single().reach(phase)
    scene.tell("d", scene.say.ended(cause))
    given_up = cause is EndCause.PREEMPTED
    assert type(scene.attempt.failure) is (AttemptPreempted if given_up else FAILURES[cause])


@pytest.mark.parametrize("phase", SINGLY)
def test_no_two_letters_of_a_worker_alone_do_more_than_end_the_attempt(phase):
    for first, second in itertools.product(LETTERS.values(), repeat=2):
        scene = Single().reach(phase)
        for make in (first, second):
            if scene.attempt.live():
                scene.tell("d", make(scene.say))
        assert (scene.attempt.phase is Phase.LOST) == (scene.attempt.failure is not None)
        assert tuple(scene.heard) in {(), (11,), (2,), (11, 12), (11, 12, 13)}
        if not scene.attempt.live() and scene.attempt.failure is None:
            assert tuple(scene.heard) in {(2,), (11, 12, 13)}
        assert scene.journal.ended == (tuple(scene.heard) in {(2,), (11, 12, 13)})
        scene.attempt.close()
        assert scene.p.is_free() and scene.d.is_free()


def test_a_worker_alone_that_owns_what_it_has_not_begun_is_not_believed():
    scene = Single().reach(Phase.COMPUTING)
    scene.tell("d", scene.say.adopted)
    assert type(scene.attempt.failure) is WorkerFailed
