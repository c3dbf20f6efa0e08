"""What one tenant may learn of another, or do to it: nothing, neither by what is cached, nor by the names of requests,
nor by how long a key is looked at."""

import random
import time

import grpc
import numpy as np
import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from crossdock.client import AsyncClient, Generation
from crossdock.v1 import control_pb2, control_pb2_grpc
from gateway import api_keys
from gateway.api_keys import ApiKeys
from tests.e2e.conftest import tokens_of
from tests.security.conftest import CONTROL_TOKEN

LENGTH = 200
GUESSES, LOOKS, NEIGHBOURS = 20_000, 15, 100
"""A look at each guess in each round; its time is told in that of its neighbours in the round, since a core is twice as
fast in one second as in another."""
CORRELATED = 0.1
"""Of ranks; the chance of it between what is not is far below one in a million with so many guesses."""


class Scene:
    def __init__(self, stack):
        self._stack = stack
        self._seeds = iter(random.Random(7).sample(range(10**6), 1000))

    def prompt(self):
        """One that nobody has asked for before."""
        return tokens_of(next(self._seeds), LENGTH)

    async def ask(self, tenant, prompt, salt=""):
        """How many tokens of it were cached."""
        credentials = self._stack.credentials(self._stack.keys[tenant])
        async with AsyncClient(self._stack.said["gateway"]["grpc"], credentials=credentials) as client:
            how = Generation(max_tokens=1, temperature=0.0, cache_salt=salt)
            return (await client.generate(prompt, how)).usage.cached_tokens

    async def computed(self):
        """Tokens that the workers have ever computed: a short prompt goes to either."""
        async with self._stack.channel() as channel:
            audit = await control_pb2_grpc.ControlServiceStub(channel).Audit(
                control_pb2.AuditRequest(),
                metadata=self._stack.credentials(CONTROL_TOKEN).metadata(),
                timeout=20,
            )
        return sum(ledger.tokens.computed for ledger in audit.ledgers)

    async def cost(self, tenant, prompt):
        before = await self.computed()
        await self.ask(tenant, prompt)
        return await self.computed() - before


@pytest.fixture(scope="module")
def scene(stack):
    return Scene(stack)


async def test_a_tenant_finds_its_own_prefixes_and_nobody_elses(scene):
    """SEC-10."""
    prompt = scene.prompt()
    assert await scene.ask("acme", prompt) == 0
    assert await scene.ask("acme", prompt) > LENGTH // 2
    assert await scene.ask("zeta", prompt) == 0
    assert await scene.ask("zeta", prompt) > LENGTH // 2


@pytest.mark.parametrize("salt", ["", "acme", "zeta", "s3cret"])
async def test_the_salt_of_another_tenant_opens_nothing(scene, salt):
    """SEC-10. A salt keeps requests of one tenant apart; who the tenant is says the key and not the request."""
    prompt = scene.prompt()
    await scene.ask("acme", prompt, salt)
    assert await scene.ask("acme", prompt, salt) > LENGTH // 2
    assert await scene.ask("acme", prompt, salt + "x") == 0
    assert await scene.ask("zeta", prompt, salt) == 0


async def test_another_tenants_prefix_costs_what_a_new_one_costs(scene):
    """SEC-10. How long the first token takes is what has to be computed for it; `benchmarks/tenant_timing.py` measures
    it."""
    shared, new = scene.prompt(), scene.prompt()
    await scene.ask("acme", shared)
    assert await scene.cost("zeta", shared) == await scene.cost("zeta", new) > 0
    assert await scene.cost("acme", shared) < await scene.cost("acme", new)


async def test_a_name_is_its_tenants_own_and_so_is_the_right_to_abort(stack):
    """SEC-10. Both run under one name at once; whoever aborts it ends its own request and not the other's."""
    acme, zeta = (stack.credentials(stack.keys[tenant]).metadata() for tenant in ("acme", "zeta"))
    abort = vllm_engine_pb2.AbortRequest(request_ids=["r"])
    async with stack.channel() as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        goes_on = stub.Generate(long_request(100), metadata=acme, timeout=60)
        await goes_on.read()
        await stub.Abort(abort, metadata=zeta)
        ends = stub.Generate(long_request(400), metadata=zeta, timeout=60)
        await ends.read()
        await stub.Abort(abort, metadata=zeta)
        assert (await last_of(ends)).finish_reason == "abort"
        assert (await last_of(goes_on)).finish_reason == "length"


def long_request(tokens):
    """A stream named r of so many tokens."""
    return vllm_engine_pb2.GenerateRequest(
        request_id="r",
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=tokens_of(1, 20)),
        sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True),
        stream=True,
    )


async def last_of(call):
    while (part := await call.read()) is not grpc.aio.EOF:
        last = part
    return last.complete


def test_a_key_that_is_nearly_right_takes_as_long_as_any_other(tmp_path):
    """SEC-21."""
    right = api_keys.make(tmp_path / "keys", "acme")
    assert abs(correlation(right, ApiKeys(tmp_path / "keys").tenant_of)) < CORRELATED


def test_the_search_for_timing_finds_a_comparison_that_stops_early(tmp_path):
    """SEC-21. What the other test would find."""
    right = api_keys.make(tmp_path / "keys", "acme")

    def leaky(key):
        for ours, theirs in zip(right, key, strict=True):
            if ours != theirs:
                return None
        return "acme"

    assert correlation(right, leaky) > 5 * CORRELATED


def correlation(right, look):
    """Between the number of secret characters that a guess has right and the time that it takes, by ranks."""
    dice = random.Random(3)
    start = right.rindex("_") + 1 if right.count("_") == 2 else right.index("_", 4) + 1
    shared = [dice.randrange(32) for _ in range(GUESSES)]
    guesses = [_guess(right, start + count, dice) for count in shared]
    nanoseconds = np.array([[_taken(look, guess) for guess in guesses] for _ in range(LOOKS)])
    neighbours = nanoseconds.reshape(LOOKS, -1, NEIGHBOURS)
    rounds = (neighbours / np.median(neighbours, axis=-1, keepdims=True)).reshape(LOOKS, GUESSES)
    return float(np.corrcoef(_ranks(shared), _ranks(np.median(rounds, axis=0)))[0, 1])


def _taken(look, guess):
    """Nanoseconds."""
    begin = time.perf_counter_ns()
    found = look(guess)
    taken = time.perf_counter_ns() - begin
    assert found is None
    return taken


def _guess(right, same, dice):
    """As right up to there, wrong in the next character, anything after it."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    wrong = dice.choice([each for each in letters if each != right[same]])
    return right[:same] + wrong + "".join(dice.choices(letters, k=len(right) - same - 1))


def _ranks(values):
    """Equal values have equal ranks, as far as it matters here."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]
