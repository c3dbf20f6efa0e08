"""What share of a prompt's KV has reached the target when the prompt is done.

    python -m benchmarks.overlap [--tokens 4096] [--chunk 256] [--runs 3]

A prefill worker with the default model computes a prompt and hands it over through shared memory; the receiving end
counts the blocks it has verified at the instant when the first token is reported. The rest is what a client may have to
wait for before its second token.
"""

import argparse
import secrets
import statistics
import time
from collections import deque
from functools import partial

from engine.assembly import Engine, assemble
from engine.wishes import EngineWishes
from kvtransfer import events
from kvtransfer.assembly import TransportWishes, source_transport, target_transport
from kvtransfer.identity import Identity
from kvtransfer.source_endpoint import TransferSource
from kvtransfer.target_endpoint import TransferTarget
from kvtransfer.ticket import mint, seal
from prefill_worker.policy import PrefillPolicy
from prefill_worker.worker import HandOff, PrefillWorker
from service.config import DEFAULT_MODEL
from service.machine import free_memory_bytes
from service.model_source import resolve_model
from service.orders import AttemptKey, Choice, SequenceOrder
from service.reports import Report, TokenReport

KEY = bytes(32)
SOURCE = Identity(worker_id="source", epoch=1)
TARGET = Identity(worker_id="target", epoch=2)


class Target:
    """The receiving end, into memory of its own. committed: once everything has arrived."""

    def __init__(self, engine: Engine, blocks: int) -> None:
        layout = engine.cache.layout
        self._places = [memoryview(bytearray(layout.block_bytes())) for _ in range(blocks)]
        self.committed = False
        wishes = TransportWishes(block_bytes=layout.block_bytes())
        self.end = TransferTarget(
            identity=TARGET,
            layout=layout,
            key=KEY,
            transport=target_transport(wishes, TARGET, [], secrets.token_bytes),
            emit=self._take,
            clock=time.monotonic,
        )

    def _take(self, event: events.TargetEvent) -> None:
        match event:
            case events.Opened():
                self.end.bind(event.ticket_id, self._places)
            case events.Received():
                self.end.commit(event.ticket_id)
                self.committed = True


def order_of(engine: Engine, tokens: int) -> SequenceOrder:
    return SequenceOrder(
        key=AttemptKey(request_id=secrets.token_hex(4), attempt=1),
        choices=(Choice(index=0, seed=0),),
        token_ids=tuple(secrets.randbelow(engine.config.vocab_size) for _ in range(tokens)),
        prompt_tokens=tokens,
        max_tokens=8,
        min_tokens=0,
        stop_token_ids=frozenset(),
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        logprobs=None,
    )


def hand_off_of(engine: Engine, order: SequenceOrder, endpoints: tuple[str, ...]) -> HandOff:
    layout, tokens = engine.cache.layout, len(order.token_ids)
    ticket = mint(
        secrets.token_bytes,
        request_id=order.key.request_id,
        attempt=1,
        source=SOURCE,
        target=TARGET,
        layout_fingerprint=layout.fingerprint(),
        num_tokens=tokens,
        first_block=0,
        num_blocks=layout.blocks_for(tokens),
        lease_ms=10_000,
    )
    return HandOff(ticket=ticket, sealed=seal(ticket, KEY), endpoints=endpoints)


def measure(engine: Engine, tokens: int) -> tuple[float, float]:
    """(share that has arrived with the first token, seconds from there until all is verified)."""
    blocks = engine.cache.layout.blocks_for(tokens)
    target, inbox = Target(engine, blocks), deque[events.SourceEvent]()
    arrived: list[tuple[float, int]] = []
    source = TransferSource(
        identity=SOURCE,
        layout=engine.cache.layout,
        transport=source_transport(TransportWishes(block_bytes=engine.cache.layout.block_bytes()), SOURCE),
        emit=inbox.append,
        clock=time.monotonic,
    )

    def tell(gateway: str, report: Report) -> None:
        if isinstance(report, TokenReport):
            arrived.append((time.perf_counter(), target.end.counters().get("blocks_placed", 0)))

    worker = PrefillWorker(
        core=engine.core,
        cache=engine.cache,
        source=source,
        tell=tell,
        clock=time.monotonic,
        queue_requests_max=1,
    )
    order = order_of(engine, tokens)
    hand_off = hand_off_of(engine, order, target.end.endpoints())
    target.end.start()
    source.start()
    target.end.expect(hand_off.ticket)
    worker.submit("gateway", order, hand_off)
    while not target.committed:
        while inbox:
            worker.on_transfer(inbox.popleft())
        if engine.core.idle():
            time.sleep(0)
        else:
            worker.on_step(engine.core.step(time.monotonic()))
    late_s = time.perf_counter() - arrived[0][0]
    source.close()
    target.end.close()
    while inbox:
        worker.on_transfer(inbox.popleft())
    return arrived[0][1] / blocks, late_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    wishes = EngineWishes(model=resolve_model(DEFAULT_MODEL))
    policy = PrefillPolicy(budget_tokens=options.chunk, seats=1)
    engine = assemble(wishes, policy, memory_bytes=free_memory_bytes())
    runs = list(map(partial(measure, engine), [options.tokens] * options.runs))
    shares, late = zip(*runs, strict=True)
    print(f"moved when the prompt is done  {statistics.median(shares):6.1%}  ({options.tokens} tokens)")
    print(f"until the rest is verified     {statistics.median(late) * 1e3:6.1f} ms")


if __name__ == "__main__":
    main()
