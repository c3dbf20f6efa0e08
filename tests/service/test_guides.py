"""How large a guide may be, and the same guide on the other side of the wire."""

import json
import time

import pytest

from crossdock.worker.v1 import worker_pb2 as pb
from service.guides import (
    CHOICE_BYTES_MAX,
    CHOICES_MAX,
    SCHEMA_DEPTH_MAX,
    TEXT_BYTES_MAX,
    Guide,
    GuideKind,
    GuideRefused,
    choice,
    from_wire,
    to_wire,
)


def deep(levels):
    return Guide(kind=GuideKind.JSON_SCHEMA, text='{"not":' * (levels - 1) + "{}" + "}" * (levels - 1))


def regex(text):
    return Guide(kind=GuideKind.REGEX, text=text)


ALLOWED = {
    "the largest text": regex("a" * TEXT_BYTES_MAX),
    "the deepest schema": deep(SCHEMA_DEPTH_MAX),
    "brackets in strings": Guide(kind=GuideKind.JSON_SCHEMA, text=json.dumps({"const": '["\\[' * 100})),
    "an object": Guide(kind=GuideKind.JSON_OBJECT, text=""),
    "the most strings": choice(["x"] * CHOICES_MAX),
    "the longest string": choice(["x" * CHOICE_BYTES_MAX]),
}
REFUSED = {
    "nothing": regex(""),
    "a longer text": regex("a" * (TEXT_BYTES_MAX + 1)),
    "as many characters in more bytes": regex("é" * (TEXT_BYTES_MAX // 2 + 1)),
    "a deeper schema": deep(SCHEMA_DEPTH_MAX + 1),
    "brackets that never close": Guide(kind=GuideKind.JSON_SCHEMA, text="[" * 60_000),
    "an object with a text": Guide(kind=GuideKind.JSON_OBJECT, text="{}"),
    "no strings": choice([]),
    "an empty string": choice(["x", ""]),
    "more strings": choice(["x"] * (CHOICES_MAX + 1)),
    "a longer string": choice(["x" * (CHOICE_BYTES_MAX + 1)]),
    "more in all": choice(["x" * CHOICE_BYTES_MAX] * 17),
    "numbers": Guide(kind=GuideKind.CHOICE, text="[1, 2]"),
    "no list": Guide(kind=GuideKind.CHOICE, text="[" * 50_000),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_within_the_limits_goes_and_arrives_as_it_was(name):
    guide = ALLOWED[name]
    assert guide.violation() is None
    assert from_wire(pb.Guide.FromString(to_wire(guide).SerializeToString())) == guide


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_beyond_them_is_refused_with_the_rule(name):
    assert REFUSED[name].violation()


@pytest.mark.parametrize("kind", [0, 6, 99])
def test_an_unknown_kind_is_refused(kind):
    with pytest.raises(GuideRefused):
        from_wire(pb.Guide(kind=kind, text="a"))


@pytest.mark.parametrize("character", ['\\"', '"', "\\", "[", '"['])
def test_four_times_the_text_takes_four_times_as_long_to_look_at_whatever_it_is(character):
    """Also one that is no JSON: it is looked at before anybody knows. Processor time, of which the least counts."""

    def seconds(characters):
        guide = Guide(kind=GuideKind.JSON_SCHEMA, text='"' + character * (characters // len(character)))
        took = []
        for _ in range(3):
            began = time.thread_time()
            guide.violation()
            took.append(time.thread_time() - began)
        return min(took)

    assert seconds(TEXT_BYTES_MAX // 2) < 8 * seconds(TEXT_BYTES_MAX // 8) + 0.001
