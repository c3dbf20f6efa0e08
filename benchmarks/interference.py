"""How long prompts disturb running streams: 8 streams decode, then a long prompt arrives.

    python -m benchmarks.interference [--target 127.0.0.1:50051] [--streams 8] [--prompt-tokens 4000] [--prompts 3]

Prints the gaps between tokens before, while and after long prompts are computed. Steps get longer as the streams'
contexts grow, so a "normal step" is the mean of the medians before and after. Run it against an otherwise idle
`crossdock serve`.
"""

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field

import grpc

from crossdock.v1 import inference_pb2 as pb
from crossdock.v1.inference_pb2_grpc import InferenceServiceStub


@dataclass
class Times:
    """Arrival of each token of one stream, in seconds."""

    arrivals: list[float] = field(default_factory=list)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Gaps that overlap the window."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [second - first for first, second in pairs if second >= begin and first <= end]


def spec(tokens: int, count: int, seed: int) -> pb.GenerationSpec:
    ids = random.Random(seed).choices(range(1000, 40000), k=tokens)
    return pb.GenerationSpec(
        token_ids=pb.TokenIds(ids=ids),
        sampling=pb.SamplingParams(temperature=0, max_tokens=count),
        stop=pb.StopConditions(ignore_eos=True),
    )


async def follow(stub: InferenceServiceStub, request: pb.GenerationSpec, times: Times) -> None:
    async for message in stub.GenerateStream(pb.GenerateStreamRequest(spec=request)):
        times.arrivals += [time.perf_counter() for delta in message.deltas for _ in delta.token_ids]


async def measure(options: argparse.Namespace) -> None:
    async with grpc.aio.insecure_channel(options.target) as channel:
        stub = InferenceServiceStub(channel)
        steady = [Times() for _ in range(options.streams)]
        tasks = [
            asyncio.create_task(follow(stub, spec(64, options.steady_tokens, seed), times))
            for seed, times in enumerate(steady)
        ]
        await asyncio.sleep(options.before_s)
        begin = time.perf_counter()
        windows = []
        for number in range(options.prompts):
            sent = time.perf_counter()
            first = Times()
            await follow(stub, spec(options.prompt_tokens, 2, 1000 + number), first)
            windows.append((sent, first.arrivals[0]))
        end = time.perf_counter()
        await asyncio.sleep(options.after_s)
        for task in tasks:
            task.cancel()
        report(options, steady, begin, end, windows)


def report(
    options: argparse.Namespace,
    steady: list[Times],
    begin: float,
    end: float,
    windows: list[tuple[float, float]],
) -> None:
    started = max(times.arrivals[0] for times in steady)
    before = sorted(gap for times in steady for gap in times.gaps(started, begin))
    during = sorted(gap for times in steady for first, last in windows for gap in times.gaps(first, last))
    after = sorted(gap for times in steady for gap in times.gaps(end + 0.1, end + options.after_s))
    step = (percentile(before, 0.5) + percentile(after, 0.5)) / 2
    for name, gaps in (("before", before), ("during", during), ("after", after)):
        values = " ".join(f"p{int(q * 100)} {percentile(gaps, q) * 1e3:6.1f}" for q in (0.5, 0.9, 0.99))
        print(f"{name:7} gaps {len(gaps):6}  {values}  max {gaps[-1] * 1e3:6.1f} ms")
    print(f"longest pause while a prompt is computed: {during[-1] / step:.2f} steps")
    rates = [options.prompt_tokens / (last - first) for first, last in windows]
    print(f"prompt tokens/s: {sum(rates) / len(rates):.0f}; measured over {end - begin:.1f} s")


def percentile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="127.0.0.1:50051")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--steady-tokens", type=int, default=4000)
    parser.add_argument("--before-s", type=float, default=6.0)
    parser.add_argument("--after-s", type=float, default=3.0)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
