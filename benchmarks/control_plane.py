"""What the gateway itself costs: streams from workers that compute nothing, through real gateway processes.

    python -m benchmarks.control_plane [--offered 51200 25600 12800] [--gateways 1] [--step-ms 5] [--decode 4]
        [--seconds 5] [--profile FILE]

Reported for each number of gateways and each load, which is what is offered to one gateway: twice what one core is to
carry, all of it, half of it. Tokens per second; processor time of the gateways per token and what that makes per core;
how many tokens share a message; how old a token is when a client has it, and how much of that was added: what it is
older than with nothing between worker and client (`benchmarks.echo`, under the same load, right before), by median and
by 99th percentile. Clients and null workers are one process each, and are the limit from some gateways on. Run it where
a core is free for each process; where they share cores, read the processor time.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from benchmarks.null_workers import TICKET_KEY, StepTimes
from benchmarks.raw_client import RawClient
from crossdock.v1 import inference_pb2 as pb

WARM_UP_S = 2.0
TOKENS_PER_CORE = 25_600
"""Per second: what a gateway on one core is to carry."""
CONNECTIONS = 4
"""To each gateway."""
SHARES = (0.5, 0.99)
METHOD = "/crossdock.v1.InferenceService/GenerateStream"
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Seen:
    """What the clients of one run have got. ages: seconds, one for each token."""

    ages: list[float] = field(default_factory=list)
    messages: int = 0


class Run(NamedTuple):
    """used_s: processor time of what was measured. ages: in order."""

    took_s: float
    used_s: float
    messages: int
    ages: list[float]

    def age_ms(self, share: float) -> float:
        """That this share of the tokens does not exceed."""
        return self.ages[int(len(self.ages) * share)] * 1e3


@contextmanager
def child(*argv: str, environ: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """A process, and the first line it says, as JSON."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, *argv], stdin=pipe, stdout=pipe, text=True, env={**os.environ, **(environ or {})}
    ) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.terminate()


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def request(number: int) -> bytes:
    """A stream for as long as the run lasts."""
    spec = pb.GenerationSpec(
        token_ids=pb.TokenIds(ids=range(1_000, 1_032)),
        sampling=pb.SamplingParams(max_tokens=8_000, temperature=0.0, seed=number),
        stop=pb.StopConditions(ignore_eos=True),
    )
    return pb.GenerateStreamRequest(spec=spec).SerializeToString()


async def measure(
    targets: Sequence[str], pids: Sequence[int], streams: int, times: StepTimes, seconds: float
) -> Run:
    """streams: of all targets together. pids: whose processor time counts."""
    seen = Seen()

    def take(raw: bytes) -> None:
        now = time.monotonic()
        seen.messages += 1
        for delta in pb.GenerateStreamResponse.FromString(raw).deltas:
            seen.ages += [times.age(token_id, now) for token_id in delta.token_ids]

    def used() -> float:
        return sum(map(processor_seconds, pids))

    clients = [await dial(target, take) for target in targets for _ in range(CONNECTIONS)]
    for number in range(streams):
        clients[number % len(clients)].open(METHOD, request(number))
    await asyncio.sleep(WARM_UP_S)
    seen.ages.clear()
    seen.messages = 0
    began, before = time.monotonic(), used()
    await asyncio.sleep(seconds)
    run = Run(time.monotonic() - began, used() - before, seen.messages, sorted(seen.ages))
    assert not any(client.ended for client in clients), "a stream has ended"
    for client in clients:
        client.close()
    await asyncio.sleep(1)
    return run


async def dial(target: str, take: Callable[[bytes], None]) -> RawClient:
    host, _, port = target.rpartition(":")
    _, client = await asyncio.get_running_loop().create_connection(lambda: RawClient(take), host, int(port))
    return client


def line(gateways: int, streams: int, offered: float, run: Run, bare: Run) -> str:
    """Of the report. bare: the same load with nothing between worker and client."""
    tokens = len(run.ages)
    added = [run.age_ms(share) - bare.age_ms(share) for share in SHARES]
    return (
        f"{gateways:8} {streams:7} {offered:9.0f} {tokens / run.took_s:9.0f} {run.used_s / run.took_s:6.2f}"
        f" {run.used_s / tokens * 1e6:8.1f} {tokens / run.used_s:11.0f} {tokens / run.messages:10.2f}"
        f" {run.age_ms(0.5):7.2f} {run.age_ms(0.99):7.2f} {added[0]:8.2f} {added[1]:8.2f}"
    )


def gateway_argv(workers: dict[str, Any], profile: str | None) -> Sequence[str]:
    flags = ("--grpc-port=0", "--http-port=0", "--log-level=warning", "--queue-requests-max=4096")
    pools = (f"--prefill-workers={workers['prefill']}", f"--decode-workers={','.join(workers['decode'])}")
    run = (
        ("-m", "commands.main")
        if profile is None
        else ("-m", "cProfile", "-o", profile, "-m", "commands.main")
    )
    return (*run, "gateway", *pools, *flags)


def report(gateways: int, options: argparse.Namespace) -> None:
    """All loads, with so many gateways over one set of workers."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        through, bare = Path(place, "workers"), Path(place, "echo")
        flags = (f"--decode={options.decode}", f"--step-ms={options.step_ms}")
        for folder in (through, bare):
            folder.mkdir()
        _, workers = stack.enter_context(child("-m", "benchmarks.null_workers", str(through), *flags))
        _, echo = stack.enter_context(child("-m", "benchmarks.echo", str(bare), *flags))
        environ = {"CROSSDOCK_TICKET_KEY": TICKET_KEY.hex()}
        argv = gateway_argv(workers, options.profile)
        started = [stack.enter_context(child(*argv, environ=environ)) for _ in range(gateways)]
        targets, pids = [said["grpc"] for _, said in started], [process.pid for process, _ in started]
        for offered in options.offered:
            streams = max(1, round(offered * options.step_ms / 1000)) * gateways
            alone, run = (
                uvloop.run(measure(to, of, streams, StepTimes(folder / "steps"), options.seconds))
                for to, of, folder in (([echo["grpc"]] * gateways, [], bare), (targets, pids, through))
            )
            print(line(gateways, streams, streams / options.step_ms * 1000, run, alone), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    whole = [2 * TOKENS_PER_CORE, TOKENS_PER_CORE, TOKENS_PER_CORE / 2]
    parser.add_argument(
        "--offered", type=float, nargs="+", default=whole, help="tokens per second and gateway"
    )
    parser.add_argument("--gateways", type=int, nargs="+", default=[1], help="how many; one report for each")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--decode", type=int, default=4, help="decode workers; their steps are spread")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--profile", help="where cProfile of a gateway goes; its times are then of no use")
    options = parser.parse_args()
    print(
        "gateways streams   offered  tokens/s  cores us/token tokens/core tokens/msg"
        "  p50 ms  p99 ms +p50 ms  +p99 ms"
    )
    for gateways in options.gateways:
        report(gateways, options)


if __name__ == "__main__":
    main()
