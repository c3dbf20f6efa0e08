"""What cached prefixes save: blocks under a shared system prompt, and time to first token on a hit.

    python -m benchmarks.prefix_cache [--target 127.0.0.1:50051] [--requests 100] [--shared-tokens 1000]

First many requests with one long beginning at once, while the books are read again and again: blocks that sequences
own against the references they have to them. Then prompts of which nothing, and of which nine tenths are cached. Run it
against an otherwise idle `crossdock serve` that was just started; what is random is new in each run.
"""

import argparse
import asyncio
import secrets
import statistics
import time
from dataclasses import dataclass

import grpc

from commands import operator_token
from crossdock.credentials import Credentials
from crossdock.v1 import control_pb2, inference_pb2
from crossdock.v1.control_pb2_grpc import ControlServiceStub
from crossdock.v1.inference_pb2_grpc import InferenceServiceStub

OWN_TOKENS = 24
ANSWER_TOKENS = 64
LOOK_S = 0.05


@dataclass
class Peak:
    """The moment at which a worker's sequences had the most references. Counts are blocks."""

    references: int = 0
    owned: int = 0


def ids(count: int) -> list[int]:
    return [1000 + secrets.randbelow(39_000) for _ in range(count)]


def spec(prompt: list[int], max_tokens: int) -> inference_pb2.GenerationSpec:
    return inference_pb2.GenerationSpec(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=inference_pb2.SamplingParams(temperature=0, max_tokens=max_tokens),
        stop=inference_pb2.StopConditions(ignore_eos=True),
    )


async def ask(stub: InferenceServiceStub, prompt: list[int], max_tokens: int) -> tuple[float, int]:
    """Seconds to the first token, and prompt tokens that were cached."""
    began, first, cached = time.perf_counter(), 0.0, 0
    request = inference_pb2.GenerateStreamRequest(spec=spec(prompt, max_tokens))
    async for message in stub.GenerateStream(request):
        if not first and any(delta.token_ids for delta in message.deltas):
            first = time.perf_counter() - began
        if message.HasField("usage"):
            cached = message.usage.cached_tokens
    return first, cached


async def watch(control: ControlServiceStub, operator: Credentials, peaks: dict[str, Peak]) -> None:
    while True:
        audit = await control.Audit(control_pb2.AuditRequest(), metadata=operator.metadata())
        for ledger in audit.ledgers:
            peak = peaks.setdefault(ledger.worker_id, Peak())
            references = sum(each.blocks for each in ledger.owners)
            if references > peak.references:
                peak.references, peak.owned = references, ledger.owned_blocks
        await asyncio.sleep(LOOK_S)


async def share(stub: InferenceServiceStub, control: ControlServiceStub, options: argparse.Namespace) -> None:
    beginning, peaks = ids(options.shared_tokens), dict[str, Peak]()
    watching = asyncio.create_task(
        watch(control, Credentials(key=operator_token.find(options.target)), peaks)
    )
    began = time.perf_counter()
    asked = [ask(stub, beginning + ids(OWN_TOKENS), ANSWER_TOKENS) for _ in range(options.requests)]
    answers = await asyncio.gather(*asked)
    seconds = time.perf_counter() - began
    watching.cancel()
    print(f"{options.requests} requests, {options.shared_tokens} shared tokens: {seconds:.1f} s")
    hits = sum(cached > 0 for _, cached in answers)
    print(f"  hits {hits}, prompt tokens from the cache {sum(cached for _, cached in answers)}")
    for name, peak in sorted(peaks.items()):
        print(f"  {name}: {peak.owned} blocks owned for {peak.references} references at the peak")


async def hit(stub: InferenceServiceStub, options: argparse.Namespace) -> None:
    cold, warm = [], []
    for _ in range(options.runs):
        prompt = ids(options.shared_tokens)
        cold.append((await ask(stub, prompt, 2))[0])
        kept = prompt[: options.shared_tokens * 9 // 10]
        warm.append((await ask(stub, kept + ids(options.shared_tokens - len(kept)), 2))[0])
    before, after = statistics.median(cold), statistics.median(warm)
    print(f"time to first token, cold         {before * 1e3:8.1f} ms  ({options.shared_tokens} tokens)")
    print(f"time to first token, 90 % cached  {after * 1e3:8.1f} ms  = {before / after:.1f} times better")


async def measure(options: argparse.Namespace) -> None:
    async with grpc.aio.insecure_channel(options.target) as channel:
        stub = InferenceServiceStub(channel)
        await ask(stub, ids(64), 4)
        await share(stub, ControlServiceStub(channel), options)
        await hit(stub, options)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="127.0.0.1:50051")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--shared-tokens", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=7)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
