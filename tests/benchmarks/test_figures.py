"""The arithmetic of the load client: percentiles, windows, rates, ratios."""

import random

import pytest

from benchmarks.serving.client import read
from benchmarks.serving.figures import Answer, Chunk, Limits, flat, percentile, spread_ms, summary, window
from benchmarks.serving.load import mix
from benchmarks.serving.prompts import WORDS, IdPrompts, TextPrompts

LIMITS = Limits(first_token_ms=1000, per_token_ms=100)


def answered(*chunks, sent=0.0, due=0.0, max_tokens=4, failure=None, prompt_seen=8):
    return Answer(
        prompt_tokens=8,
        max_tokens=max_tokens,
        due=due,
        sent=sent,
        chunks=[Chunk(*chunk) for chunk in chunks],
        prompt_seen=prompt_seen,
        failure=failure,
    )


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([5.0], 99, 5.0),
        ([1.0, 2.0, 3.0], 50, 2.0),
        ([4.0, 1.0], 50, 2.5),
        ([0.0, 10.0], 95, 9.5),
        (list(range(101)), 99, 99.0),
    ],
)
def test_a_percentile_lies_between_the_two_nearest_ranks(values, percent, expected):
    assert percentile(values, percent) == pytest.approx(expected)


def test_the_figures_of_one_answer_follow_their_definitions():
    answer = answered((2.0, 2), (2.5, 1), (3.5, 3), sent=1.5)
    assert answer.first_token_s == 0.5
    assert answer.output_tokens == 6
    assert answer.per_token_s == 1.5 / 4, "the tokens of the first chunk are no part of it"
    assert answer.gaps() == [(2.0, 2.5), (2.5, 3.5)]


def test_an_answer_that_came_at_once_has_no_time_per_token():
    assert answered((2.0, 4)).per_token_s is None
    assert spread_ms([None, None]) is None


def test_rates_are_over_the_time_from_the_first_sending_to_the_last_token():
    answers = [
        answered((1.5, 1), (2.0, 3), sent=1.0, due=0.9),
        answered((2.0, 2), (5.0, 2), sent=1.5, due=1.5),
    ]
    figures = summary(answers, LIMITS)
    assert (figures["seconds"], figures["output_tokens_per_s"], figures["requests_per_s"]) == (4.0, 2.0, 0.5)
    assert figures["sent_late_ms"] == 100.0
    assert figures["good_share"] == 0.0, "500 ms, then 167 and 1500 per token"
    assert figures["ttft_ms"]["count"] == 2


def test_failures_are_counted_by_what_they_say_and_take_no_part_in_the_rest():
    silent, refused = answered(), answered(failure="http 500: no")
    figures = summary([answered((1.0, 4)), silent, refused, answered(failure="http 500: no")], LIMITS)
    assert figures["failures"] == {"no token came": 1, "http 500: no": 2}
    assert figures["itl_ms"] is None and figures["ttft_ms"]["count"] == 1
    assert summary([silent], LIMITS) == {"requests": 1, "failures": {"no token came": 1}}


def test_what_is_not_as_asked_is_shown():
    figures = summary([answered((1.0, 3), max_tokens=4), answered((1.0, 4), prompt_seen=9)], LIMITS)
    assert (figures["short_answers"], figures["prompts_counted_otherwise"]) == (1, 1)


def test_a_gap_counts_in_a_window_when_it_reaches_into_it_or_lies_in_it():
    stream = answered((0.0, 1), (1.0, 1), (2.0, 1), (4.0, 2), (4.5, 1))
    inside, touching = (window([stream], 1.0, 4.2, overlapping=each) for each in (False, True))
    assert (inside["itl_ms"]["count"], touching["itl_ms"]["count"]) == (2, 3)
    assert touching["itl_ms"]["max"] == 2000.0
    assert (
        inside["output_tokens_per_s"] == touching["output_tokens_per_s"] == pytest.approx(4 / 3.2, abs=0.01)
    )


def test_numbers_of_nested_figures_have_dots_in_their_names():
    assert flat({"a": {"p50": 1.5, "none": None}, "b": 2, "c": {"error": 1}, "d": "text", "e": True}) == {
        "a.p50": 1.5,
        "b": 2,
        "c.error": 1,
    }


def events(*lines):
    return b"".join(b"data: " + line + b"\n\n" for line in lines)


def test_tokens_of_a_chunk_are_counted_by_the_running_usage():
    answer = answered()
    first = b'{"choices": [{"text": "a b"}], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}'
    second = b'{"choices": [{"text": ""}], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}'
    third = b'{"choices": [{"text": "c"}], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}'
    data = events(first, second, third, b"[DONE]")
    answer.parts = [(1.0, data[:20]), (2.0, data[20 : len(data) // 2]), (3.0, data[len(data) // 2 :])]
    read(answer)
    assert answer.chunks == [Chunk(2.0, 2), Chunk(3.0, 1)], "a chunk came when its last byte came"
    assert answer.prompt_seen == 7 and answer.whole


def test_without_a_running_usage_each_chunk_with_text_is_a_token_and_the_last_usage_is_right():
    answer = answered(prompt_seen=None)
    chunks = [b'{"choices": [{"text": "%s"}]}' % text for text in (b"", b"a", b"b")]
    answer.parts = [
        (float(at), events(chunk))
        for at, chunk in enumerate([*chunks, b'{"choices": [], "usage": {"completion_tokens": 5}}'])
    ]
    read(answer)
    assert answer.chunks == [Chunk(1.0, 1), Chunk(2.0, 4)]


def test_an_error_in_the_stream_is_a_failure():
    answer = answered()
    answer.parts = [(1.0, events(b'{"error": {"message": "gone"}}'))]
    read(answer)
    assert "gone" in answer.failure and not answer.whole


def test_prompts_have_their_length_and_no_two_begin_alike():
    ids, text = IdPrompts(range(100, 200)), TextPrompts(lambda words: len(words.split()))
    assert [len(ids.make(tokens, random.Random(tokens))) for tokens in (1, 16, 4096)] == [1, 16, 4096]
    assert len(text.make(31, random.Random(1)).split()) == 31
    assert len({tuple(ids.make(16, random.Random(f"5/{number}"))) for number in range(200)}) == 200
    assert len(set(WORDS)) == len(WORDS)


def test_the_same_seed_gives_the_same_mix():
    assert mix(50, 3) == mix(50, 3) != mix(50, 4)
    sizes = mix(2000, 0)
    assert 120 < sum(size.prompt for size in sizes) / 2000 < 180
    assert all(4 <= size.prompt <= 1024 and 4 <= size.answer <= 320 for size in sizes)
