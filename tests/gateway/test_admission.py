import pytest

from gateway.admission import RETRY_AFTER_MS, Admission
from service.errors import Exhausted


def test_as_many_as_the_limit_are_live_and_the_next_is_refused_with_the_number():
    admission = Admission(2)
    with admission.enter(), admission.enter():
        assert admission.live == 2
        with pytest.raises(Exhausted, match="at most 2") as refusal, admission.enter():
            pytest.fail("a third one was let in")
        assert refusal.value.retry_after_ms == RETRY_AFTER_MS
        assert admission.live == 2
    assert admission.live == 0


def test_a_request_that_ends_badly_makes_room_too():
    admission = Admission(1)
    for _ in range(3):
        with pytest.raises(KeyError), admission.enter():
            raise KeyError
    with admission.enter():
        assert admission.live == 1
