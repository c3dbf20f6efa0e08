"""What a decode step costs outside its kernels, in microseconds of processor time.

    python -m benchmarks.step_overhead [--sequences 1,8,64,256] [--steps 400] [--context 512] [--profile 64]

The real worker, core, policy, runner, sampler (compiled, where it can be) and rim run on one thread; only the model is
replaced, by one that returns random logits. A step is cut into: plan (the view of what runs, and the policy), batch
(blocks, copies, the runner's layout up to the model's first kernel), sampling, commit (what the core notes of it),
output (reports, load, the message as bytes). Each part's median over the steps is printed. Sampling is greedy or seeded
(temperature 0.8, top_p 0.95), over the built-in model's vocabulary and over a tiny one, where reading logits costs
nothing.
"""

import argparse
import asyncio
import cProfile
import gc
import pstats
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import uvloop

from crossdock.worker.v1 import worker_pb2 as pb
from decode_worker.policy import DecodePolicy
from decode_worker.worker import DecodeWorker
from engine.cache.block_pool import BlockPool
from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from engine.core import EngineCore
from engine.kernels.select import choose_backend
from engine.loop import EngineLoop
from engine.policy import Plan, View
from engine.results import StepResult
from engine.runner import TransformerRunner
from engine.sampling import Sampler
from kvtransfer.events import Closed, Opened, Received
from kvtransfer.identity import Identity
from kvtransfer.ticket import Ticket, mint
from service.garbage import freeze_garbage
from service.machine import KEPT_BYTES, keep_freed_memory
from service.orders import AttemptKey, Choice, SequenceOrder
from service.worker_rim import PROTOCOL_VERSION, Host, WorkerRim

VOCAB = 49_152
TINY_VOCAB = 64
BLOCK_SIZE = 16
PARTS = ("plan", "batch", "model", "sampling", "commit", "output")
MODES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0, "top_p": 1.0},
    "seeded": {"temperature": 0.8, "top_p": 0.95},
}


class Instants:
    """When each part of a step ended, step by step."""

    def __init__(self) -> None:
        self._steps: list[list[tuple[str, float]]] = []

    def begin(self) -> None:
        self._steps.append([("begin", time.thread_time())])

    def end(self, part: str) -> None:
        self._steps[-1].append((part, time.thread_time()))

    def medians(self) -> dict[str, float]:
        """Microseconds of each part, and of the whole step without the model."""
        spent: dict[str, list[float]] = {part: [] for part in (*PARTS, "all")}
        for step in self._steps:
            took = dict.fromkeys(PARTS, 0.0)
            for (_, before), (part, after) in pairwise(step):
                took[part] += (after - before) * 1e6
            for part in PARTS:
                spent[part].append(took[part])
            spent["all"].append(sum(took.values()) - took["model"])
        return {part: median(each) for part, each in spent.items()}


class TimedPolicy(DecodePolicy):
    instants: Instants

    def plan(self, view: View, now: float) -> Plan:
        plan = super().plan(view, now)
        self.instants.end("plan")
        return plan


class RandomModel:
    """In the place of a transformer: logits that were drawn beforehand. config: as far as a runner asks."""

    class config:  # noqa: N801
        layers, kv_heads, head_dim = 1, 3, 64

    def __init__(self, vocab: int, rows_max: int, instants: Instants) -> None:
        self._logits = torch.randn(rows_max, vocab, generator=torch.Generator().manual_seed(1)) * 3
        self._instants = instants

    def forward(
        self, token_ids: torch.Tensor, kv: torch.Tensor, meta: Any, rows: torch.Tensor
    ) -> torch.Tensor:
        self._instants.end("batch")
        logits = self._logits[: len(rows)]
        self._instants.end("model")
        return logits


class TimedSampler(Sampler):
    def __init__(self, instants: Instants) -> None:
        super().__init__(choose_backend(torch.float32, threads=1).sampling)
        self._instants = instants

    def sample(self, *rows: Any) -> Any:
        self._instants.end("commit")
        sampled = super().sample(*rows)
        self._instants.end("sampling")
        return sampled


class NullTarget:
    """In the place of a transfer: blocks are said to have arrived."""

    def expect(self, ticket: Ticket) -> None: ...
    def bind(self, ticket_id: bytes, blocks: list[memoryview]) -> None: ...
    def commit(self, ticket_id: bytes) -> None: ...
    def withdraw(self, ticket_id: bytes) -> None: ...


class Stream:
    """In the place of gRPC: takes messages, makes bytes of them, says when those of a step are there."""

    def __init__(self, instants: Instants) -> None:
        self._instants = instants
        self.wrote = asyncio.Event()

    async def send_initial_metadata(self, metadata: object) -> None: ...

    async def write(self, message: pb.DecodeServiceAttachResponse) -> None:
        message.SerializeToString()
        if message.WhichOneof("message") == "outputs":
            self._instants.end("output")
            self.wrote.set()

    async def requests(self) -> AsyncIterator[pb.DecodeServiceAttachRequest]:
        yield pb.DecodeServiceAttachRequest(
            hello=pb.Hello(protocol_version=PROTOCOL_VERSION, gateway_id="g", gateway_epoch=1)
        )
        await asyncio.Event().wait()


class Bench:
    """A decode worker with so many running sequences."""

    def __init__(self, sequences: int, vocab: int, context: int, answer: int) -> None:
        self.instants = Instants()
        model = RandomModel(vocab, sequences, self.instants)
        layout = KVLayout(
            model_digest="none",
            layers=model.config.layers,
            kv_heads=model.config.kv_heads,
            head_dim=model.config.head_dim,
            block_size=BLOCK_SIZE,
            dtype=torch.bfloat16,
        )
        blocks = sequences * (-(-(context + BLOCK_SIZE + answer) // BLOCK_SIZE) + 1)
        cache = KVCache(layout, blocks)
        policy = TimedPolicy(budget_tokens=256, seats=sequences)
        object.__setattr__(policy, "instants", self.instants)
        self.core = EngineCore(
            pool=BlockPool(blocks),
            block_size=BLOCK_SIZE,
            runner=TransformerRunner(model, cache),  # type: ignore[arg-type]
            sampler=TimedSampler(self.instants),
            policy=policy,
        )
        self.rim = WorkerRim(pb.DecodeServiceAttachResponse, asyncio.get_running_loop())
        self.worker = DecodeWorker(
            core=self.core,
            policy=policy,
            cache=cache,
            target=NullTarget(),  # type: ignore[arg-type]
            vocab_size=vocab,
            tell=self.rim.tell,
            clock=time.monotonic,
            queue_requests_max=sequences,
        )
        self.loop = EngineLoop(
            self.core,
            clock=time.monotonic,
            on_step=self._on_step,
            on_turn=lambda steps: self.rim.flush(self.worker.load(steps), self.core.pool.index.changes()),
            on_crash=lambda error: None,
            inbox_actions_max=1,
        )
        self.stream = Stream(self.instants)

    async def attach(self) -> asyncio.Task[None]:
        host = Host(worker=self.worker, welcome=pb.Welcome(), post=_now, insist=_now, refusals={})
        task = asyncio.create_task(
            self.rim.attach(self.stream.requests(), self.stream, host, lambda gateway, request: lambda: None)  # type: ignore[arg-type]
        )
        await asyncio.sleep(0.01)
        return task

    def adopt(self, number: int, order: SequenceOrder) -> None:
        ticket_id = number.to_bytes(16, "big")
        ticket = mint(
            lambda size: ticket_id,
            request_id=order.key.request_id,
            attempt=1,
            source=Identity(worker_id="p", epoch=1),
            target=Identity(worker_id="d", epoch=1),
            layout_fingerprint=bytes(32),
            num_tokens=len(order.token_ids),
            first_block=0,
            num_blocks=-(-len(order.token_ids) // BLOCK_SIZE),
            lease_ms=1000,
        )
        self.worker.reserve("g/1", order, ticket)
        self.worker.on_transfer(Opened(ticket_id=ticket_id))
        self.worker.on_transfer(
            Received(ticket_id=ticket_id, num_tokens=len(order.token_ids), first_tokens=((0, 1),))
        )
        self.worker.on_transfer(Closed(ticket_id=ticket_id))

    async def step(self) -> None:
        self.instants.begin()
        self.loop.turn()
        await self.stream.wrote.wait()
        self.stream.wrote.clear()

    def _on_step(self, result: StepResult) -> None:
        self.instants.end("commit")
        self.worker.on_step(result)


def _now(action: Callable[[], None]) -> None:
    action()


def order_of(number: int, context: int, answer: int, mode: str) -> SequenceOrder:
    """Contexts differ, so that each step some sequences need another block."""
    tokens = context + number % BLOCK_SIZE
    return SequenceOrder(
        key=AttemptKey(request_id=f"cmpl-{number:024x}", attempt=1),
        choices=(Choice(index=0, seed=number),),
        token_ids=tuple((number * 31 + place) % TINY_VOCAB for place in range(tokens)),
        prompt_tokens=tokens,
        max_tokens=answer,
        min_tokens=0,
        stop_token_ids=frozenset({VOCAB + 1}),
        top_k=0,
        min_p=0.0,
        logprobs=None,
        cache_scope=number.to_bytes(32, "big"),
        **MODES[mode],  # type: ignore[arg-type]
    )


@contextmanager
def profiled(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    profile = cProfile.Profile()
    profile.enable()
    yield
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


async def measure(options: argparse.Namespace, sequences: int, vocab: int, mode: str) -> dict[str, float]:
    bench = Bench(sequences, vocab, options.context, options.steps + 100)
    task = await bench.attach()
    for number in range(1, sequences + 1):
        bench.adopt(number, order_of(number, options.context, options.steps + 100, mode))
    for _ in range(50):
        await bench.step()
    freeze_garbage()
    with profiled(options.profile == sequences):
        for _ in range(options.steps):
            await bench.step()
    gc.unfreeze()
    task.cancel()
    return bench.instants.medians()


async def run(options: argparse.Namespace) -> None:
    shown = [part for part in PARTS if part != "model"] + ["all"]
    print(f"{'sequences':>9} {'sampling':8} {'vocabulary':>10}  " + " ".join(f"{each:>9}" for each in shown))
    for mode in options.modes:
        for vocab in options.vocabularies:
            for sequences in options.sequences:
                took = await measure(options, sequences, vocab, mode)
                figures = " ".join(f"{took[part]:9.1f}" for part in shown)
                print(f"{sequences:9} {mode:8} {vocab:10}  {figures}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    counts = lambda text: [int(each) for each in text.split(",")]  # noqa: E731
    parser.add_argument("--sequences", type=counts, default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[VOCAB, TINY_VOCAB])
    parser.add_argument("--profile", type=int, help="print a profile of the steps with so many sequences")
    torch.set_num_threads(1)
    keep_freed_memory(KEPT_BYTES)
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
