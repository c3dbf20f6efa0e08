"""kill -9 of the only prefill worker under streams: the decode worker goes on with all of them, and takes new ones."""

import asyncio

import grpc
import pytest

from tests.e2e.conftest import stream
from tests.e2e.test_kills import PATIENCE_S, SPECS, kill, ready, scored, some_tokens, wanted

WITNESSED = 3


@pytest.mark.timeout(900)
async def test_without_the_only_prefill_worker_everything_goes_on_to_the_same_tokens(narrow_stack):
    late = [wanted(number) for number in range(100, 108)]
    before = computed(narrow_stack)
    async with grpc.aio.insecure_channel(narrow_stack.grpc) as channel:
        golden = [await stream(channel, each) for each in SPECS]
        streams = [asyncio.create_task(stream(channel, each, PATIENCE_S)) for each in SPECS]
        await some_tokens(channel, WITNESSED)
        kill(narrow_stack.children()["prefill-0"])
        # It is started again, which takes seconds: what is asked now has only the other one.
        streams += [asyncio.create_task(stream(channel, each, PATIENCE_S)) for each in late]
        answers = await asyncio.gather(*streams)
        await ready(narrow_stack, "prefill")
        golden += [await stream(channel, each) for each in late]
        for asked, answer, expected in zip([*SPECS, *late], answers, golden, strict=True):
            assert answer.token_ids == expected.token_ids
            assert answer.logprobs == expected.logprobs
            assert answer.text == expected.text
            assert scored(asked, answer) == scored(asked, expected)
    generated = 2 * sum(len(answer.token_ids) for answer in answers) + 2 * WITNESSED
    assert computed(narrow_stack) - before > generated, "it has computed prompts"


def computed(stack):
    """Tokens, by the decode worker, once nothing is left to do."""
    (ledger,) = [each for each in stack.idle_ledgers() if each.worker_id == "decode-0"]
    return ledger.tokens.computed
