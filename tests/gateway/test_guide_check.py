"""Guides are tried in a process of their own: what it refuses is refused, and what it dies of costs nobody else."""

import asyncio
import os
import resource
import signal
import sys

import pytest

from gateway import guide_check
from gateway.guide_check import GuideCheck
from service.errors import Exhausted, InvalidRequest
from service.guides import Guide, GuideKind, choice

GOOD = Guide(kind=GuideKind.REGEX, text="[0-9]{3}")
BAD = Guide(kind=GuideKind.REGEX, text="(a")
ENDLESS = Guide(kind=GuideKind.JSON_SCHEMA, text='{"type": "integer", "multipleOf": 99999989}')


@pytest.fixture
async def check(model_file):
    """On a machine that may be busy for long."""
    check = GuideCheck(model_file, check_s=600.0)
    yield check
    await check.close()


async def refusal(check, guide):
    with pytest.raises(InvalidRequest) as caught:
        await check.require(guide)
    (violation,) = caught.value.violations
    return violation.field, violation.description


async def test_a_guide_that_can_be_followed_is_let_through_and_others_are_refused_with_the_reason(check):
    await check.require(GOOD)
    field, reason = await refusal(check, BAD)
    assert field == "guide.regex" and "unclosed" in reason
    assert await refusal(check, BAD) == (field, reason)


async def test_a_guide_that_takes_for_ever_is_refused_with_the_limit_and_the_next_is_checked(check):
    field, reason = await refusal(check, ENDLESS)
    assert field == "guide.json_schema" and "2 seconds" in reason
    await check.require(GOOD)
    process = check._process
    assert await refusal(check, ENDLESS) == (field, reason)
    assert check._process is process and process.returncode is None, "it was not tried again"


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are set as Linux does")
async def test_a_guide_that_takes_all_memory_is_refused_with_the_limit_and_is_not_tried_again(check):
    await check.require(GOOD)
    process = check._process
    resource.prlimit(process.pid, resource.RLIMIT_AS, (1, 1))
    field, reason = await refusal(check, ENDLESS)
    assert field == "guide.json_schema" and "memory" in reason
    assert process.returncode == -signal.SIGABRT
    await check.require(choice(["yes"]))
    assert await refusal(check, ENDLESS) == (field, reason)


async def test_a_process_that_was_killed_is_started_again(check):
    await check.require(GOOD)
    process = check._process
    process.kill()
    await process.wait()
    await check.require(choice(["yes"]))
    assert check._process.pid != process.pid


async def being_asked(check, guide):
    """The process stands still and has the question."""
    await check.require(GOOD)
    check._process.send_signal(signal.SIGSTOP)
    asking = asyncio.create_task(check.require(guide))
    for _ in range(3):
        await asyncio.sleep(0)
    return asking


async def test_a_guide_whose_process_is_killed_meanwhile_is_asked_of_another(check):
    asking = await being_asked(check, BAD)
    check._process.kill()
    with pytest.raises(InvalidRequest, match="unclosed group"):
        await asking


async def test_a_guide_whose_process_gets_no_time_is_asked_of_another(model_file):
    check = GuideCheck(model_file, check_s=3)
    await (await being_asked(check, choice(["yes"])))
    await check.close()


async def test_a_guide_that_nobody_can_judge_is_put_off_and_judged_when_it_comes_again(check):
    await check.require(GOOD)
    check._check_s = 0
    with pytest.raises(Exhausted) as put_off:
        await check.require(choice(["yes"]))
    assert put_off.value.retry_after_ms
    check._check_s = guide_check.CHECK_S
    await check.require(choice(["yes"]))


async def test_whoever_leaves_while_a_guide_is_checked_leaves_no_answer_for_the_next(check):
    await check.require(GOOD)
    leaving = asyncio.create_task(check.require(BAD))
    for _ in range(3):  # until it has asked and waits for the answer
        await asyncio.sleep(0)
    leaving.cancel()
    await check.require(choice(["yes"]))
    assert (await refusal(check, BAD))[0] == "guide.regex"


async def test_a_guide_that_is_asked_for_again_and_again_is_not_checked_again(check, monkeypatch):
    monkeypatch.setattr(guide_check, "KNOWN_MAX", 2)
    for word in ("a", "b"):
        await check.require(GOOD)
        await check.require(choice([word]))
    process = check._process
    process.kill()
    await process.wait()
    await check.require(GOOD)
    assert check._process is process


async def test_several_that_ask_the_same_share_one_answer_and_more_than_may_wait_are_put_off(
    check, monkeypatch
):
    monkeypatch.setattr(guide_check, "WAITING_MAX", 1)
    same = [asyncio.create_task(check.require(GOOD)) for _ in range(5)]
    await asyncio.sleep(0)
    with pytest.raises(Exhausted):
        await check.require(choice(["another"]))
    await asyncio.gather(*same)
    await check.require(choice(["another"]))


async def test_a_tenant_that_asks_much_is_put_off_and_others_take_their_turns(check, monkeypatch):
    monkeypatch.setattr(guide_check, "WAITING_OF_TENANT_MAX", 3)
    order = []

    async def ask(word, tenant):
        await check.require(choice([word]), tenant)
        order.append(tenant)

    many = [asyncio.create_task(ask(word, "acme")) for word in ("a", "b", "c")]
    await asyncio.sleep(0)
    with pytest.raises(Exhausted, match="of this tenant"):
        await check.require(choice(["d"]), "acme")
    await asyncio.gather(*many, ask("z", "zeta"))
    assert order == ["acme", "zeta", "acme", "acme"]


async def test_closing_ends_the_process(model_file):
    check = GuideCheck(model_file)
    await check.require(GOOD)
    process = check._process
    await check.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


async def test_without_llguidance_each_guide_is_refused_with_what_to_install(check, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert await refusal(check, GOOD) == (
        "guide.regex",
        "needs llguidance, which is not installed here: pip install 'crossdock[guided]'",
    )
    assert check._process is None


async def test_a_gateway_that_checks_none_refuses_all(post, scripted):
    body = {"model": "smol", "prompt": "x", "guided_regex": "a"}
    answer = await post(scripted(), "/v1/completions", body)
    assert answer.status_code == 400
    assert (
        answer.json()["error"]["param"] == "guided_regex"
        and "crossdock[guided]" in answer.json()["error"]["message"]
    )
