"""Workers whose blocks are on a device: what is handed over goes through host memory."""

from functools import partial

import torch

from engine.cache.staged_cache import StagedKVCache
from tests.fakes.hash_model import golden


def test_an_answer_on_devices_is_handed_over_and_generated_exactly(bench_of, order_of):
    bench = bench_of(cache_of=partial(StagedKVCache, device=torch.device("cpu")))
    order = order_of(max_tokens=9)
    ticket = bench.ticket(order)
    bench.d.worker.reserve("g", order, ticket)
    bench.p.worker.submit("g", order, bench.hand_off(ticket))
    bench.settle()
    assert bench.p.tokens() + bench.d.tokens() == golden([1, 2, 3, 4, 5], 9)


def test_a_second_prompt_that_begins_alike_is_handed_over_exactly(bench_of, order_of):
    bench = bench_of(cache_of=partial(StagedKVCache, device=torch.device("cpu")))
    for request_id, prompt in (("r", (1, 2, 3, 4, 5)), ("s", (1, 2, 3, 4, 9, 9, 9))):
        order = order_of(request_id, prompt=prompt, max_tokens=5)
        ticket = bench.ticket(order)
        bench.d.worker.reserve("g", order, ticket)
        bench.p.worker.submit("g", order, bench.hand_off(ticket))
        bench.settle()
        got = bench.p.tokens(request_id) + bench.d.tokens(request_id)
        assert got == golden(list(prompt), 5)
