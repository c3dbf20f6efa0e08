"""What the hand-over costs a lone long request: the gap between its first and its second token.

    python -m benchmarks.handover [--target 127.0.0.1:50051] [--prompt-tokens 4096] [--runs 5]

A decode step is the median gap between the later tokens of the same request. Run it against an otherwise idle
`crossdock serve`; the prompt is new each time.
"""

import argparse
import asyncio
import secrets
import statistics
import time
from itertools import pairwise

import grpc

from benchmarks.interference import spec
from crossdock.v1 import inference_pb2 as pb
from crossdock.v1.inference_pb2_grpc import InferenceServiceStub

TOKENS = 24


async def arrivals(stub: InferenceServiceStub, prompt_tokens: int, count: int) -> tuple[float, list[float]]:
    """Seconds to the first token, and the arrival of each token."""
    request = pb.GenerateStreamRequest(spec=spec(prompt_tokens, count, secrets.randbits(32)))
    began, times = time.perf_counter(), []
    async for message in stub.GenerateStream(request):
        times += [time.perf_counter() for delta in message.deltas for _ in delta.token_ids]
    return times[0] - began, times


async def measure(options: argparse.Namespace) -> None:
    async with grpc.aio.insecure_channel(options.target) as channel:
        stub = InferenceServiceStub(channel)
        await arrivals(stub, 64, TOKENS)
        first, gaps, steps = [], [], []
        for _ in range(options.runs):
            to_first, times = await arrivals(stub, options.prompt_tokens, TOKENS)
            later = [second - one for one, second in pairwise(times[1:])]
            first.append(to_first)
            gaps.append(times[1] - times[0])
            steps.append(statistics.median(later))
    step = statistics.median(steps)
    gap = statistics.median(gaps)
    print(
        f"time to first token  {statistics.median(first) * 1e3:8.1f} ms  ({options.prompt_tokens} prompt tokens)"
    )
    print(f"decode step          {step * 1e3:8.1f} ms")
    print(
        f"gap token 1 -> 2     {gap * 1e3:8.1f} ms  = {gap / step:.2f} steps; each run: "
        + " ".join(f"{each * 1e3:.1f}" for each in gaps)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="127.0.0.1:50051")
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=5)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
