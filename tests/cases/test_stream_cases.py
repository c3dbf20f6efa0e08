"""What a stream is at the border between the two workers: how many tokens, and what of its text is shown."""

import pytest

from tests.cases.conftest import SOURCES, TARGETS, cold, computed, wish
from tests.e2e.conftest import stream

LENGTH = 1000
"""Of prompts that no decode worker computes by itself."""


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_case_70_so_many_tokens_are_exactly_so_many_and_one_is_handed_over_to_nobody(rig, count):
    longer = await rig.golden(wish(7001, LENGTH, 3))
    before = await rig.until_idle()
    answer = await stream(rig.channel, cold(wish(7001, LENGTH, count)))
    after = await rig.until_idle()
    assert answer.token_ids == longer.token_ids[:count]
    assert answer.usage.completion_tokens == count
    if count == 1:  # by whoever of the two is sooner
        assert computed(after, *SOURCES, *TARGETS) - computed(before, *SOURCES, *TARGETS) == LENGTH
        assert LENGTH in {computed(after, *role) - computed(before, *role) for role in (SOURCES, TARGETS)}
    else:
        assert computed(after, *SOURCES) - computed(before, *SOURCES) == LENGTH
        assert computed(after, *TARGETS) - computed(before, *TARGETS) == count - 1


async def test_case_75_a_stop_string_over_the_border_leaks_no_part_and_holds_back_no_more(rig):
    """It begins in the text of the first token and ends in that of the second, which another worker computes."""
    whole, first = await rig.golden(wish(7501, LENGTH, 4)), await rig.golden(wish(7501, LENGTH, 1))
    assert whole.text.startswith(first.text) and len(whole.text) > len(first.text) > 0
    stop = whole.text[len(first.text) - 1 : len(first.text) + 1]
    stopped = cold(wish(7501, LENGTH, 4))
    stopped.stop.strings.append(stop)
    before = await rig.until_idle()
    answer = await stream(rig.channel, stopped)
    after = await rig.until_idle()
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert answer.finish.stop_string == stop
    assert computed(after, *SOURCES) - computed(before, *SOURCES) == LENGTH, "it crosses the border"
