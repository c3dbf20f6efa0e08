"""What the split costs an idle system: time to first token through it, beside that of the same engine un-split.

    python -m benchmarks.split_overhead [--target 127.0.0.1:50051] [--prompt-tokens 128 1024] [--runs 15] [--threads 2]

Un-split is the engine alone in this process: no gateway, no RPC, no hand-off, on as many threads as the prefill pool of
an idle system computes on. Both are asked in turn, each time with a new prompt. Run it against an otherwise idle
`crossdock serve`.
"""

import argparse
import asyncio
import random
import secrets
import statistics
import time

import grpc

from benchmarks.interference import spec
from crossdock.v1 import inference_pb2 as pb
from crossdock.v1.inference_pb2_grpc import InferenceServiceStub
from decode_worker.policy import DecodePolicy
from engine.assembly import Engine, assemble
from engine.sequence import SamplingParams, Sequence, StopRules
from engine.wishes import EngineWishes
from service.machine import free_memory_bytes
from service.model_source import resolve_model

NUM_BLOCKS = 1024


def unsplit_engine(options: argparse.Namespace) -> Engine:
    wishes = EngineWishes(
        model=resolve_model(options.model), threads=options.threads, num_blocks=NUM_BLOCKS, caching=False
    )
    policy = DecodePolicy(budget_tokens=options.budget_tokens, seats=1)
    return assemble(wishes, policy, memory_bytes=free_memory_bytes())


def unsplit_seconds(engine: Engine, tokens: list[int]) -> float:
    """To the first token."""
    core = engine.core
    sequence = Sequence(
        id=(secrets.token_hex(8), 1, 0),
        tokens=tokens,
        stop=StopRules(length_limit=len(tokens) + 1),
        sampling=SamplingParams(),
        arrived=0.0,
    )
    began = time.perf_counter()
    core.submit(sequence)
    while not core.step(time.monotonic()).outputs:
        pass
    seconds = time.perf_counter() - began
    core.detach(sequence.id)
    assert sequence.table is not None and sequence.credit is not None
    core.pool.waive(sequence.credit)
    core.pool.release(sequence.table)
    return seconds


async def split_seconds(stub: InferenceServiceStub, prompt_tokens: int) -> float:
    """To the first token."""
    request = pb.GenerateStreamRequest(spec=spec(prompt_tokens, 2, secrets.randbits(32)))
    began, first = time.perf_counter(), None
    async for message in stub.GenerateStream(request):
        if first is None and any(delta.token_ids for delta in message.deltas):
            first = time.perf_counter()
    assert first is not None
    return first - began


async def measure(options: argparse.Namespace) -> None:
    engine = unsplit_engine(options)
    async with grpc.aio.insecure_channel(options.target) as channel:
        stub = InferenceServiceStub(channel)
        for prompt_tokens in options.prompt_tokens:
            split, unsplit = [], []
            for _ in range(2 + options.runs):
                tokens = [random.randrange(1000, 40000) for _ in range(prompt_tokens)]
                unsplit.append(unsplit_seconds(engine, tokens))
                split.append(await split_seconds(stub, prompt_tokens))
            print(report(prompt_tokens, split[2:], unsplit[2:]), flush=True)


def report(prompt_tokens: int, split: list[float], unsplit: list[float]) -> str:
    ours, alone = statistics.median(split) * 1e3, statistics.median(unsplit) * 1e3
    return (
        f"{prompt_tokens:5} prompt tokens: first token after {ours:7.1f} ms, un-split {alone:7.1f} ms:"
        f" {ours - alone:+.1f} ms ({ours / alone - 1:+.1%}); allowed {0.05 * alone + 3:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="127.0.0.1:50051")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--budget-tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
