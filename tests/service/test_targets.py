"""Where a client's calls go when there are several gateways, one is ill, or one refuses."""

import json

import pytest

from crossdock import retries
from crossdock.client import AsyncClient, Client, RequestError
from crossdock.targets import dialling
from service.errors import AttemptsLost, Unavailable
from tests.fakes.gateways import documented_service_config, gateways_well


@pytest.fixture
def gateways():
    with gateways_well(3) as started:
        yield started


def answered_by(client, calls):
    return [client.tokenize("x")[0] for _ in range(calls)]


def until(client, numbers):
    """Call until every one of these gateways answers in turn, and no other."""
    while sorted(answered_by(client, len(numbers))) != sorted(numbers):
        pass


@pytest.mark.timeout(30)
def test_several_gateways_share_the_calls_and_one_that_is_ill_gets_none_until_it_is_well(gateways):
    with Client([each.address for each in gateways]) as client:
        until(client, [0, 1, 2])
        gateways[1].serve(False)
        until(client, [0, 2])
        assert set(answered_by(client, 20)) == {0, 2}
        gateways[1].serve(True)
        until(client, [0, 1, 2])


@pytest.mark.timeout(30)
async def test_the_asyncio_client_takes_several_addresses_with_commas(gateways):
    async with AsyncClient(",".join(each.address for each in gateways)) as client:
        found = set()
        while found != {0, 1, 2}:
            found |= set(await client.tokenize("x"))


@pytest.mark.timeout(30)
def test_a_call_that_could_not_be_taken_up_is_tried_again_elsewhere(gateways):
    with Client([each.address for each in gateways]) as client:
        until(client, [0, 1, 2])
        for each in gateways:
            each.calls = 0
        gateways[0].refusals = [Unavailable("not now", retry_after_ms=1)]
        answered_by(client, 3)
        assert sum(each.calls for each in gateways) == 4 and gateways[0].refusals == []


def test_what_has_cost_workers_is_not_repeated_by_the_library(gateways):
    gateway = gateways[0]
    gateway.refusals = [Unavailable("not now", retry_after_ms=1), AttemptsLost("every attempt was lost")]
    with Client(gateway.address) as client:
        with pytest.raises(RequestError) as refused:
            client.tokenize("x")
        assert (refused.value.reason, refused.value.retry_after_ms, gateway.calls) == (
            "ATTEMPTS_LOST",
            None,
            1,
        )
        assert (client.tokenize("x"), gateway.calls) == ((0,), 3)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("gateway:50051", "gateway:50051"),
        (["10.0.0.1:1"], "10.0.0.1:1"),
        ("10.0.0.1:1,10.0.0.2:2", "ipv4:10.0.0.1:1,10.0.0.2:2"),
        (("[::1]:1", "[::1]:2"), "ipv6:[::1]:1,[::1]:2"),
    ],
)
def test_addresses_are_named_as_grpc_names_them(target, name):
    assert dialling(target).target == name


@pytest.mark.parametrize(
    "target", ["one:1,two:2", "10.0.0.1:1,[::1]:1", "10.0.0.1,10.0.0.2", [], "a:1,", ","]
)
def test_addresses_that_cannot_stand_together_are_refused_by_name(target):
    with pytest.raises(RequestError, match="INVALID_ARGUMENT: target"):
        dialling(target)


def test_other_languages_are_told_to_do_as_this_client_does():
    told = documented_service_config()
    (method,) = told.pop("methodConfig")
    options = dict(dialling(["127.0.0.1:1", "127.0.0.1:2"]).options)
    assert told == json.loads(options["grpc.service_config"])
    assert method["name"] == [{"service": told["healthCheckConfig"]["serviceName"]}]
    assert method["retryPolicy"] == {
        "maxAttempts": retries.TRIES_MAX,
        "initialBackoff": f"{retries.BACKOFF_S:g}s",
        "maxBackoff": f"{retries.BACKOFF_S_MAX:g}s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
