"""More is asked for than can be served: how much is still answered in time, and how soon the others hear no.

    python -m benchmarks.overload [--target 127.0.0.1:50051] [--loads 0.5,1,2,10] [--seconds 20] [--deadline 4]

Requests come at random times, whatever has become of those before them, at multiples of the rate that 16 callers in a
row get. Each has a deadline and a prompt of its own. The first third of each load is not counted. Run it against an
otherwise idle `crossdock serve`; the caller needs a core of its own at high loads.
"""

import argparse
import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import grpc

from commands import operator_token
from crossdock.credentials import Credentials
from crossdock.v1 import control_pb2, control_pb2_grpc
from crossdock.v1 import inference_pb2 as pb
from crossdock.v1.inference_pb2_grpc import InferenceServiceStub

CALLERS = 16
REFUSED = "RESOURCE_EXHAUSTED"


@dataclass
class Heard:
    """ends: by status. refused_s: until a refusal came."""

    ends: Counter[str] = field(default_factory=Counter)
    refused_s: list[float] = field(default_factory=list)


class Load:
    """Calls of one shape to one gateway."""

    def __init__(self, channel: grpc.aio.Channel, options: argparse.Namespace) -> None:
        self._stub = InferenceServiceStub(channel)
        self._control = control_pb2_grpc.ControlServiceStub(channel)
        self._options = options
        self._dice = random.Random(11)

    async def capacity(self) -> float:
        """Requests a second that so many callers get when each waits for its answer."""
        heard, end = Heard(), time.perf_counter() + self._options.seconds / 2

        async def go_on() -> None:
            while time.perf_counter() < end:
                await self._ask(heard, None)

        await asyncio.gather(*(go_on() for _ in range(CALLERS)))
        return float(heard.ends["OK"] / (self._options.seconds / 2))

    async def at(self, rate: float) -> tuple[Heard, float]:
        """What is heard at so many requests a second, and for how many seconds it was counted."""
        heard, warming, calls = Heard(), Heard(), []
        begin, seconds = time.perf_counter(), self._options.seconds
        due = begin
        while due < begin + seconds:
            due += self._dice.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            counted = heard if due - begin > seconds / 3 else warming
            calls.append(asyncio.create_task(self._ask(counted, self._options.deadline)))
        await asyncio.gather(*calls)
        return heard, seconds * 2 / 3

    async def computed(self) -> int:
        """Tokens that the prefill workers have ever computed."""
        operator = Credentials(key=operator_token.find(self._options.target))
        audit = await self._control.Audit(control_pb2.AuditRequest(), metadata=operator.metadata())
        prefills = (each for each in audit.ledgers if each.role == control_pb2.WORKER_ROLE_PREFILL)
        return sum(each.tokens.computed for each in prefills)

    async def _ask(self, heard: Heard, deadline_s: float | None) -> None:
        ids = [self._dice.randrange(1000, 40000) for _ in range(self._options.prompt_tokens)]
        spec = pb.GenerationSpec(
            token_ids=pb.TokenIds(ids=ids),
            sampling=pb.SamplingParams(temperature=0, max_tokens=self._options.answer_tokens),
            stop=pb.StopConditions(ignore_eos=True),
        )
        sent = time.perf_counter()
        try:
            await self._stub.Generate(pb.GenerateRequest(spec=spec), timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            heard.ends[error.code().name] += 1
            if error.code().name == REFUSED:
                heard.refused_s.append(time.perf_counter() - sent)
        else:
            heard.ends["OK"] += 1


async def measure(options: argparse.Namespace) -> None:
    async with grpc.aio.insecure_channel(options.target) as channel:
        load = Load(channel, options)
        capacity = await load.capacity()
        print(f"{CALLERS} callers in a row: {capacity:.1f} requests/s")
        for times in map(float, options.loads.split(",")):
            before = await load.computed()
            heard, seconds = await load.at(capacity * times)
            tokens = await load.computed() - before
            print(f"{times:g}x: {_line(heard, seconds)}, {tokens} prompt tokens computed", flush=True)


def _line(heard: Heard, seconds: float) -> str:
    line = f"{heard.ends['OK'] / seconds:.2f} in time/s, {dict(heard.ends)}"
    if not heard.refused_s:
        return line
    ordered = sorted(heard.refused_s)
    shares = (ordered[int(share * (len(ordered) - 1))] * 1000 for share in (0.5, 0.99, 1))
    return line + ", refused after {:.1f} ms in the median, {:.1f} p99, {:.1f} at most".format(*shares)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="127.0.0.1:50051")
    parser.add_argument("--loads", default="0.5,1,2,10")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--deadline", type=float, default=4.0)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=32)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
