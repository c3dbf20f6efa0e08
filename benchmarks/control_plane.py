"""What the gateway itself costs: streams from workers that compute nothing, through a real gateway process.

    python -m benchmarks.control_plane [--streams 256] [--step-ms 5] [--decode 4] [--seconds 5] [--profile FILE]

Reported for all streams and for half of them: tokens per second, processor time of the gateway per token and what that
makes per core, how many tokens share a message, and how old a token is when a client has it. That age contains the null
workers' and the client's own share, both on the same machine. Run it where a core is free for each of the three; where
they share cores, read the processor time.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.null_workers import TICKET_KEY, StepTimes
from benchmarks.raw_client import RawClient
from crossdock.v1 import inference_pb2 as pb

WARM_UP_S = 2.0
METHOD = "/crossdock.v1.InferenceService/GenerateStream"
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Seen:
    """What the clients of one run have got. ages: seconds, one for each token."""

    ages: list[float] = field(default_factory=list)
    messages: int = 0


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


async def measure(target: str, gateway: int, streams: int, times: StepTimes, seconds: float) -> str:
    """One line of the report. gateway: its process id."""
    seen = Seen()

    def take(raw: bytes) -> None:
        now = time.monotonic()
        seen.messages += 1
        for delta in pb.GenerateStreamResponse.FromString(raw).deltas:
            seen.ages += [times.age(token_id, now) for token_id in delta.token_ids]

    host, _, port = target.rpartition(":")
    loop = asyncio.get_running_loop()
    clients = [(await loop.create_connection(lambda: RawClient(take), host, int(port)))[1] for _ in range(4)]
    for number in range(streams):
        clients[number % len(clients)].open(METHOD, request(number))
    await asyncio.sleep(WARM_UP_S)
    seen.ages.clear()
    seen.messages = 0
    began, used = time.monotonic(), processor_seconds(gateway)
    await asyncio.sleep(seconds)
    took, used = time.monotonic() - began, processor_seconds(gateway) - used
    tokens, messages, ages = len(seen.ages), seen.messages, sorted(seen.ages)
    assert not any(client.ended for client in clients), "a stream has ended"
    for client in clients:
        client.close()
    await asyncio.sleep(1)
    p50, p99 = (ages[int(len(ages) * share)] * 1e3 for share in (0.5, 0.99))
    return (
        f"{streams:7} {tokens / took:9.0f} {used / took:7.2f} {used / tokens * 1e6:9.1f} {tokens / used:12.0f}"
        f" {tokens / messages:12.2f} {p50:9.2f} {p99:9.2f}"
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--decode", type=int, default=4, help="decode workers; their steps are spread")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--profile", help="where cProfile of the gateway goes; its times are then of no use")
    options = parser.parse_args()
    print("streams  tokens/s   cores  us/token  tokens/core  tokens/msg    p50 ms    p99 ms")
    with tempfile.TemporaryDirectory() as folder:
        null = ("-m", "benchmarks.null_workers", folder, f"--decode={options.decode}")
        with child(*null, f"--step-ms={options.step_ms}") as (_, workers):
            times = StepTimes(Path(folder) / "steps")
            key = {"CROSSDOCK_TICKET_KEY": TICKET_KEY.hex()}
            with child(*gateway_argv(workers, options.profile), environ=key) as (gateway, said):
                for streams in (options.streams, options.streams // 2):
                    run = measure(said["grpc"], gateway.pid, streams, times, options.seconds)
                    print(uvloop.run(run), flush=True)


if __name__ == "__main__":
    main()
