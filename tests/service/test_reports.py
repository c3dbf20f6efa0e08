"""Reports on the wire: as they were, in order, the tokens of a step together."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.worker.v1 import worker_pb2 as pb
from service.load import WorkerLoad
from service.orders import AttemptKey
from service.reports import (
    AdoptedReport,
    BadReport,
    EndCause,
    EndedReport,
    HandedOverReport,
    PromptReport,
    ReservedReport,
    TokenEnd,
    TokenReport,
    decode,
    encode,
    from_load_report,
    to_load_report,
)
from service.scores import Scores

u32 = st.integers(0, 2**32 - 1)
real = st.floats(-100, 0, width=32)
keys = st.builds(AttemptKey, request_id=st.text(max_size=8), attempt=u32)
tokens = st.builds(
    TokenReport,
    key=keys,
    position=u32,
    token_id=u32,
    logprob=st.none() | real,
    top=st.lists(st.tuples(u32, real), max_size=3).map(tuple),
    end=st.none() | st.sampled_from(TokenEnd),
    cached_tokens=u32,
    choice=u32,
)


@st.composite
def prompt_reports(draw):
    width, count = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    top = st.lists(st.tuples(u32, real), min_size=width, max_size=width).map(tuple)
    scores = Scores.of([(draw(real), draw(u32), draw(top)) for _ in range(count)])
    return PromptReport(key=draw(keys), first_position=draw(u32), scores=scores)


ended = st.builds(EndedReport, key=keys, cause=st.sampled_from(EndCause), detail=st.text(max_size=8))
of_source = st.one_of(tokens, ended, prompt_reports(), st.builds(HandedOverReport, key=keys))
of_target = st.one_of(
    tokens,
    ended,
    prompt_reports(),
    st.builds(ReservedReport, key=keys, blocks_held=u32),
    st.builds(AdoptedReport, key=keys),
)


def assert_round_trip(reports, response):
    messages = encode(reports, 5, response)
    sent = [response.FromString(message.SerializeToString()) for message in messages]
    assert [report for message in sent for report in decode(message)] == reports
    return messages


@given(st.lists(of_source, max_size=8))
def test_reports_of_a_prefill_worker_come_back_as_they_were(reports):
    assert_round_trip(reports, pb.PrefillServiceAttachResponse)


@given(st.lists(of_target, max_size=8))
def test_reports_of_a_decode_worker_come_back_as_they_were(reports):
    messages = assert_round_trip(reports, pb.DecodeServiceAttachResponse)
    kinds = [message.WhichOneof("message") for message in messages]
    assert ("outputs", "outputs") not in set(itertools.pairwise(kinds)), "tokens in a row share a message"
    assert all(message.outputs.step == 5 for message in messages if message.HasField("outputs"))


def token(number):
    key = AttemptKey(request_id=f"r{number}", attempt=1)
    return TokenReport(key=key, position=0, token_id=number, logprob=None, top=(), end=None)


def test_all_tokens_of_a_step_are_one_message():
    (message,) = encode([token(number) for number in range(64)], 1, pb.DecodeServiceAttachResponse)
    assert list(message.outputs.token_ids) == [*range(64)]
    assert not message.outputs.details, "there is no more to say of them"
    assert encode([], 1, pb.DecodeServiceAttachResponse) == []


def test_an_adoption_stays_before_the_tokens_that_come_of_it():
    adopted = AdoptedReport(key=token(1).key)
    messages = encode([adopted, token(1), token(2)], 1, pb.DecodeServiceAttachResponse)
    assert [message.WhichOneof("message") for message in messages] == ["adopted", "outputs"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"token_logprobs": [-1.0]},
        {"token_logprobs": [-1.0], "ranks": [1], "top_count": 1},
        {"token_logprobs": [-1.0], "ranks": [1], "top_count": 1, "top_token_ids": [1]},
        {"token_logprobs": [-1.0], "ranks": [1], "top_token_ids": [1], "top_logprobs": [-1.0]},
        {"token_logprobs": [-1.0], "ranks": [1], "top_count": 2**32 - 1},
    ],
)
def test_logprobs_of_a_prompt_whose_arrays_do_not_fit_are_refused(fields):
    message = pb.PromptLogprobs(request_id="r", attempt=1, first_position=1, **fields)
    for response in (pb.PrefillServiceAttachResponse, pb.DecodeServiceAttachResponse):
        with pytest.raises(BadReport, match="prompt_logprobs"):
            decode(response(prompt_logprobs=message))


def test_what_is_about_the_worker_as_a_whole_is_no_report():
    for response in (pb.PrefillServiceAttachResponse, pb.DecodeServiceAttachResponse):
        assert decode(response()) == []
        assert decode(response(welcome=pb.Welcome())) == []
        assert decode(response(load=pb.LoadReport())) == []
        assert decode(response(audit=pb.AuditReport())) == []


@pytest.mark.parametrize("cause", [0, 11, 99, -1])
def test_an_end_of_an_unknown_cause_is_an_end_all_the_same(cause):
    (report,) = decode(
        pb.PrefillServiceAttachResponse(ended=pb.Ended(request_id="r", attempt=1, cause=cause))
    )
    assert report.cause is EndCause.INTERNAL


@pytest.mark.parametrize(
    ("output", "field"),
    [
        ({"end_reason": 3}, "end_reason"),
        ({"end_reason": -1}, "end_reason"),
        ({"top_token_ids": [1], "top_logprobs": []}, "top_logprobs"),
        ({"top_token_ids": [], "top_logprobs": [-1.0]}, "top_logprobs"),
        ({"index": 2}, "details"),
    ],
)
def test_a_token_that_no_worker_of_ours_reports_is_named_by_its_field(output, field):
    (message,) = encode([token(0), token(1)], 1, pb.DecodeServiceAttachResponse)
    message.outputs.details.add(**output)
    with pytest.raises(BadReport, match=field):
        decode(message)


@pytest.mark.parametrize("column", ["request_ids", "attempts", "choices", "positions", "token_ids"])
def test_tokens_of_which_something_is_missing_are_refused(column):
    (message,) = encode([token(0), token(1)], 1, pb.DecodeServiceAttachResponse)
    getattr(message.outputs, column).pop()
    with pytest.raises(BadReport, match="outputs"):
        decode(message)


def test_a_load_comes_back_as_it_was():
    load = WorkerLoad(
        step=1,
        running_sequences=2,
        waiting_sequences=3,
        waiting_tokens=2**40,
        free_blocks=5,
        total_blocks=6,
        finished_sequences=2**40,
        borrowed_core_ms=2**40,
    )
    for draining, frozen in ((True, False), (False, True)):
        report = to_load_report(load, draining=draining, frozen=frozen, counts={"a": 1})
        assert from_load_report(report) == load
        assert (report.draining, report.frozen, dict(report.counts)) == (draining, frozen, {"a": 1})
