"""How likely a prompt is does not depend on what is cached, nor on who computes it.

Row 73 of the cases: prompt logprobs with a prefix cache are a full list, cold and warm alike.
"""

import asyncio

from crossdock.v1 import inference_pb2
from tests.cases.conftest import cold, computed, wish
from tests.e2e.conftest import stream

LENGTH = 512
WIDE = 2


def scored(words, length=LENGTH, max_tokens=4, **sampling):
    """A request that wants its prompt's logprobs."""
    request = wish(words, length, max_tokens, **sampling)
    request.output.prompt_logprobs = WIDE
    return request


def full(answer, length=LENGTH):
    """All that is said of the prompt; that it is all of it."""
    told = answer.prompt.prompt_logprobs
    assert len(told.token_logprobs) == length - 1 and told.top_count == WIDE
    assert len(told.top_token_ids) == len(told.top_logprobs) == WIDE * (length - 1)
    assert len(answer.prompt.token_ids) == length
    return told


async def test_row_73_prompt_logprobs_are_the_same_full_list_cold_and_warm(rig):
    request = cold(scored(7301))
    first = await stream(rig.channel, request)
    before = await rig.until_idle()
    again = await stream(rig.channel, request)
    after = await rig.until_idle()
    assert full(again) == full(first)
    assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)
    assert [answer.usage.cached_tokens for answer in (first, again)] == [0, 0]
    assert computed(after, *after) - computed(before, *before) >= LENGTH, "all of it, once more"
    plain = wish(7301, LENGTH, 4)
    plain.cache_salt = request.cache_salt
    warm = await stream(rig.channel, plain)
    assert warm.usage.cached_tokens > 0 and not warm.prompt.HasField("prompt_logprobs")
    assert (warm.token_ids, warm.logprobs) == (first.token_ids, first.logprobs)


async def test_row_73_a_prompt_that_is_partly_cached_is_told_whole(rig):
    request = cold(scored(7302, LENGTH))
    alone = full(await stream(rig.channel, request))
    warmer = cold(wish(7302, LENGTH // 2, 4))
    await stream(rig.channel, warmer)
    request.cache_salt = warmer.cache_salt
    assert full(await stream(rig.channel, request)) == alone


async def test_many_at_once_are_told_what_each_is_told_alone(rig):
    requests = [cold(scored(7310 + n, 40 + 90 * n)) for n in range(6)]
    alone = [full(await stream(rig.channel, each), 40 + 90 * n) for n, each in enumerate(requests)]
    together = await asyncio.gather(*(stream(rig.channel, each) for each in requests))
    assert [each.prompt.prompt_logprobs for each in together] == alone


async def test_a_prompt_that_wants_nothing_generated_is_computed_once_and_handed_to_nobody(rig):
    request = cold(scored(7320, max_tokens=0))
    before = await rig.until_idle()
    answer = await stream(rig.channel, request)
    after = await rig.until_idle()
    assert full(answer) == full(await stream(rig.channel, cold(scored(7320))))
    assert (answer.token_ids, answer.text, answer.usage.completion_tokens) == ([], "", 0)
    assert answer.finish.reason == inference_pb2.FINISH_REASON_LENGTH
    assert computed(after, *after) - computed(before, *before) == LENGTH
