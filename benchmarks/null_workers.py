"""Workers that compute nothing: one prefill worker and some decode workers in one process, on the real contract.

    python -m benchmarks.null_workers FOLDER --decode 4 --step-ms 5

Each decode worker gives every sequence it has one token per step; the workers' steps are spread over the step's
length. A token's id is the number of the step it came from, and FOLDER/steps has the time of each step, so that whoever
gets the token knows how old it is. Prints the addresses when it serves, and ends with its standard input.
"""

import argparse
import asyncio
import json
import mmap
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import uvloop

from crossdock.worker.v1 import worker_pb2 as pb
from crossdock.worker.v1 import worker_pb2_grpc as pb_grpc
from kvtransfer.ticket import key_check
from service.orders import AttemptKey
from service.outbox import Outbox
from service.reports import TokenEnd, TokenReport, encode
from service.server import bind, create_server
from service.worker_rim import PROTOCOL_VERSION

TICKET_KEY = bytes(32)
FIRST_ID, STEPS = 1_000, 32_768
"""Ids of the steps: ordinary words of the built-in model."""
LOAD_INTERVAL_S = 0.1
_BLOCKS = 1 << 20


class StepTimes:
    """Seconds on the machine's monotonic clock, by step; shared between processes. Numbers are used again after
    STEPS."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * STEPS))
        with path.open("r+b") as file:
            self._seconds = memoryview(mmap.mmap(file.fileno(), 8 * STEPS)).cast("d")
        self._numbers = count()

    def begin(self) -> int:
        """Note a step; the id of its tokens."""
        number = next(self._numbers) % STEPS
        self._seconds[number] = time.monotonic()
        return FIRST_ID + number

    def age(self, token_id: int, now: float) -> float:
        return now - self._seconds[token_id - FIRST_ID]


def _welcome(name: str) -> pb.Welcome:
    return pb.Welcome(
        protocol_version=PROTOCOL_VERSION,
        worker_id=name,
        epoch=1,
        layout_fingerprint=bytes(32),
        kv_endpoints=["ipc:///nowhere"],
        model_digest="null",
        max_model_len=8192,
        vocab_size=1 << 20,
        block_size=16,
        total_blocks=_BLOCKS,
        max_num_seqs=4096,
        ticket_key_check=key_check(TICKET_KEY),
    )


class _Session:
    """One gateway's stream: greets, tells the load, and passes on what is asked."""

    def __init__(
        self, name: str, response: Callable[..., Any], ask: Callable[[Any, Outbox[Any]], None]
    ) -> None:
        self._name, self._response, self._ask = name, response, ask

    async def run(self, requests: AsyncIterator[Any], context: Any) -> None:
        outbox: Outbox[Any] = Outbox(65_536)
        outbox.put(self._response(welcome=_welcome(self._name)))
        tasks = [asyncio.create_task(self._read(requests, outbox)), asyncio.create_task(self._load(outbox))]
        try:
            async for message in outbox.drain():
                await context.write(message)
        finally:
            for task in tasks:
                task.cancel()

    async def _read(self, requests: AsyncIterator[Any], outbox: Outbox[Any]) -> None:
        async for request in requests:
            self._ask(request, outbox)
        outbox.close()

    async def _load(self, outbox: Outbox[Any]) -> None:
        while True:
            outbox.put(self._response(load=pb.LoadReport(total_blocks=_BLOCKS, free_blocks=_BLOCKS)))
            await asyncio.sleep(LOAD_INTERVAL_S)


class NullPrefill(pb_grpc.PrefillServiceServicer):
    """Every prompt is done at once; `hand_over` is told whose target goes on."""

    def __init__(self, hand_over: Callable[[str, int], None], times: StepTimes) -> None:
        self._hand_over, self._times = hand_over, times

    async def Attach(self, requests: AsyncIterator[Any], context: Any) -> None:  # noqa: N802
        await _Session("prefill", pb.PrefillServiceAttachResponse, self._ask).run(requests, context)

    def _ask(self, request: Any, outbox: Outbox[Any]) -> None:
        if request.WhichOneof("message") != "submit":
            return
        spec = request.submit.sequence
        key = {"request_id": spec.request_id, "attempt": spec.attempt}
        first = TokenReport(AttemptKey(**key), 0, self._times.begin(), None, (), None)
        outbox.put(*encode([first], 0, pb.PrefillServiceAttachResponse))
        outbox.put(pb.PrefillServiceAttachResponse(handed_over=pb.HandedOver(**key)))
        self._hand_over(spec.request_id, spec.attempt)


class NullDecode(pb_grpc.DecodeServiceServicer):
    """step: once per step, a token for each sequence that was handed over."""

    def __init__(self, name: str, times: StepTimes) -> None:
        self._name, self._times = name, times
        self._reserved: dict[tuple[str, int], tuple[Outbox[Any], int]] = {}
        self._running: dict[tuple[str, int], tuple[Outbox[Any], Iterator[int], int]] = {}

    async def Attach(self, requests: AsyncIterator[Any], context: Any) -> None:  # noqa: N802
        await _Session(self._name, pb.DecodeServiceAttachResponse, self._ask).run(requests, context)

    def adopt(self, request_id: str, attempt: int) -> None:
        """Of an attempt that may be another worker's."""
        reserved = self._reserved.pop((request_id, attempt), None)
        if reserved is not None:
            outbox, max_tokens = reserved
            outbox.put(
                pb.DecodeServiceAttachResponse(adopted=pb.Adopted(request_id=request_id, attempt=attempt))
            )
            self._running[request_id, attempt] = (outbox, count(1), max_tokens)

    def step(self) -> None:
        by_gateway: dict[Outbox[Any], list[TokenReport]] = defaultdict(list)
        token_id = self._times.begin()
        for (request_id, attempt), (outbox, positions, max_tokens) in list(self._running.items()):
            position = next(positions)
            last = position == max_tokens - 1
            end, key = (TokenEnd.LENGTH if last else None), AttemptKey(request_id, attempt)
            by_gateway[outbox].append(TokenReport(key, position, token_id, None, (), end))
            if last or outbox.closed:
                del self._running[request_id, attempt]
        for outbox, reports in by_gateway.items():
            outbox.put(*encode(reports, 0, pb.DecodeServiceAttachResponse))

    def _ask(self, request: Any, outbox: Outbox[Any]) -> None:
        match request.WhichOneof("message"):
            case "reserve":
                spec = request.reserve.sequence
                key = (spec.request_id, spec.attempt)
                self._reserved[key] = (outbox, spec.max_tokens)
                reserved = pb.Reserved(request_id=key[0], attempt=key[1])
                outbox.put(pb.DecodeServiceAttachResponse(reserved=reserved))
            case "cancel":
                self._running.pop((request.cancel.request_id, request.cancel.attempt), None)


class Stepping(Protocol):
    def step(self) -> None: ...


def on_the_beat(workers: Sequence[Stepping], step_s: float) -> list[asyncio.Task[None]]:
    """The workers' steps, spread over the length of a step."""
    return [
        asyncio.create_task(_step(worker, step_s, step_s * index / len(workers)))
        for index, worker in enumerate(workers)
    ]


async def _step(worker: Stepping, step_s: float, offset_s: float) -> None:
    """On the beat, however long a step took."""
    due = time.monotonic() + offset_s
    while True:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        worker.step()
        due = max(due + step_s, time.monotonic())


async def _serve(options: argparse.Namespace) -> None:
    times = StepTimes(options.folder / "steps")
    workers = [NullDecode(f"decode-{index}", times) for index in range(options.decode)]

    def hand_over(request_id: str, attempt: int) -> None:
        for worker in workers:
            worker.adopt(request_id, attempt)

    server_of = {"prefill": create_server()}
    pb_grpc.add_PrefillServiceServicer_to_server(NullPrefill(hand_over, times), server_of["prefill"])
    for index, worker in enumerate(workers):
        server_of[f"decode-{index}"] = server = create_server()
        pb_grpc.add_DecodeServiceServicer_to_server(worker, server)
    addresses = {name: f"unix:{options.folder}/{name}.sock" for name in server_of}
    for name, server in server_of.items():
        bind(server, addresses[name])
        await server.start()
    tasks = on_the_beat(workers, options.step_ms / 1000)
    prefill = addresses.pop("prefill")
    print(json.dumps({"prefill": prefill, "decode": list(addresses.values())}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*(server.stop(None) for server in server_of.values()))


def run(serve: Callable[[argparse.Namespace], Coroutine[Any, Any, None]], description: str | None) -> None:
    """Serves with what the command line says."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=5.0)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    run(_serve, __doc__)
