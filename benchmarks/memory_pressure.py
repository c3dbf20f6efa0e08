"""What a shortage of KV memory costs a decode worker, and what its ways of letting requests in make of it.

    python -m benchmarks.memory_pressure [--requests 400] [--clients 48] [--overcommit 2] [--seed 1]

The engine core, its pool, its policy and its admission are real; the model is none, and a step or a prompt takes as
long on a virtual clock as a formula says, so that the figures do not depend on the machine. Lengths are drawn like
those of ShareGPT; every client asks for up to 1,024 tokens and most answers end long before, which nobody is told.
Memory is what all clients together fill on average where there is enough of it, divided by --overcommit.

Slots are positions of KV memory. Unused ones are those that running sequences have or were promised and have not
filled; beside it what a contiguous allocator that reserves the longest answer would leave unused for the same ones.
"""

import argparse
import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from decode_worker.policy import DecodePolicy
from engine.batch import Batch
from engine.cache.block_pool import BlockPool, Credit
from engine.cache.block_table import Owner, OwnerKind
from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from engine.cache.swap_space import SwapSpace
from engine.core import EngineCore
from engine.policy import SequenceView
from engine.sampling import Sampler
from engine.scheduling.admission import Room, blocks_at_start
from engine.scheduling.headroom import Headroom
from engine.sequence import PREEMPTIONS_MAX, SamplingParams, Sequence, State, StopRules

BLOCK = 16
MAX_TOKENS = 1024
PROMPT_TOKENS_PER_S = 20_000.0
HAND_OVER_S = 0.01


@dataclass(slots=True, kw_only=True)
class Asked:
    """A request. answer: tokens after which it ends, which only its client knows. known: prompt and what was said."""

    number: int
    prompt: int
    answer: int
    known: int
    arrived: float
    preemptions: int = 0
    credit: Credit | None = None
    sequence: Sequence | None = None

    def computed(self) -> int:
        """Tokens whose KV is there."""
        return self.sequence.computed if self.sequence else 0

    def most(self) -> int:
        """Blocks that it can ever need."""
        return blocks_of(self.prompt + MAX_TOKENS - 1)

    def start(self, whole_answer: bool) -> int:
        """Blocks that it is promised."""
        preemptions = PREEMPTIONS_MAX if whole_answer else self.preemptions
        return blocks_at_start(blocks_of(self.known), self.most(), preemptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How requests are let in. whole_answer: all that they can ever need is promised to them. share: kept free of what
    those that run may still need; None: it slides."""

    name: str
    whole_answer: bool = False
    share: float | None = None
    swap: bool = False


@dataclass(slots=True, kw_only=True)
class Figures:
    """seconds: until the last request is asked. Sums over the steps: sequences; slots had or promised, filled, and
    reserved by a contiguous allocator; blocks owned."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    sequences: int = 0
    slots: int = 0
    filled: int = 0
    contiguous: int = 0
    owned_blocks: int = 0
    preemptions: int = 0
    preemptions_most: int = 0


class NullRunner:
    """A model that always says token 0."""

    def run(self, batch: Batch) -> torch.Tensor:
        logits = torch.zeros(len(batch.rows), 2)
        logits[:, 0] = 1.0
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How long a step takes, in seconds: by itself, and for each sequence in it."""

    step_s: float
    sequence_s: float


class Worker:
    """A decode worker without its wires, on a virtual clock, and the clients that keep it busy."""

    def __init__(
        self, way: Way, blocks: int, lengths: Iterator[tuple[int, int]], clients: int, speed: Speed
    ) -> None:
        layout = KVLayout(
            model_digest="none", layers=1, kv_heads=1, head_dim=2, block_size=BLOCK, dtype=torch.float32
        )
        swap = SwapSpace(KVCache(layout, blocks), 4 * blocks) if way.swap else None
        self.policy = DecodePolicy(budget_tokens=4096, seats=4096)
        self.core = EngineCore(
            pool=BlockPool(blocks),
            block_size=BLOCK,
            runner=NullRunner(),
            sampler=Sampler(),
            policy=self.policy,
            swap=swap,
            headroom=Headroom() if way.share is None else Headroom(way.share, least=way.share),
        )
        self.figures, self.now = Figures(), 0.0
        self._way, self._lengths, self._speed = way, enumerate(lengths), speed
        self._asking: list[Asked] = []
        self._coming: list[tuple[float, int, Asked]] = []
        self._running: dict[int, Asked] = {}
        self._prompts_free_at = 0.0
        self._more = True
        for _ in range(clients):
            self._ask_next()

    def run(self) -> Figures:
        """Until the last request is asked: all clients are busy all the time."""
        while self._more:
            self._grant()
            self._adopt()
            self._step()
        self.figures.seconds = self.now
        return self.figures

    def _ask_next(self) -> None:
        number, lengths = next(self._lengths, (0, None))
        self._more = lengths is not None
        if lengths is not None:
            prompt, answer = lengths
            asked = Asked(number=number, prompt=prompt, answer=answer, known=prompt, arrived=self.now)
            self._asking.append(asked)

    def _grant(self) -> None:
        if self.core.swapping():
            return
        reserved = [each for _, _, each in self._coming]
        room = Room(
            free_blocks=self.core.pool.available,
            seats=len(self._asking),
            growing_blocks=self.core.growing_blocks()
            + sum(each.most() - each.start(self._way.whole_answer) for each in reserved),
            headroom=self.core.headroom,
        )
        for view in self.policy.grant(tuple(map(self._view, self._asking)), room=room, now=self.now):
            asked = next(each for each in self._asking if each.number == view.id[1])
            self._asking.remove(asked)
            owner = Owner(OwnerKind.RESERVATION, str(asked.number))
            asked.credit = self.core.pool.grant(owner, view.blocks_to_start)
            begin = max(self.now, self._prompts_free_at)
            self._prompts_free_at = begin + asked.known / PROMPT_TOKENS_PER_S
            heapq.heappush(self._coming, (self._prompts_free_at + HAND_OVER_S, asked.number, asked))

    def _view(self, asked: Asked) -> SequenceView:
        start = asked.start(self._way.whole_answer)
        return SequenceView(
            id=("", asked.number, 0),
            uncomputed=asked.known,
            blocks_to_start=start,
            blocks_to_end=asked.most() - start,
            arrived=asked.arrived,
        )

    def _adopt(self) -> None:
        while self._coming and self._coming[0][0] <= self.now:
            _, number, asked = heapq.heappop(self._coming)
            assert asked.credit is not None
            owner = Owner(OwnerKind.SEQUENCE, str(number))
            table = self.core.pool.allocate(owner, blocks_of(asked.known), asked.credit)
            sequence = Sequence(
                id=("", number, 0),
                tokens=[0] * (asked.known + 1),
                sampling=SamplingParams(),
                stop=StopRules(length_limit=asked.prompt + MAX_TOKENS),
                arrived=asked.arrived,
                computed=asked.known,
                preemptions=asked.preemptions,
                table=table,
                credit=asked.credit,
            )
            self._running[number], asked.sequence = asked, sequence
            self.core.adopt(sequence)
            self._hear(sequence)

    def _step(self) -> None:
        if self.core.idle():
            self.now = max(self.now, self._coming[0][0]) if self._coming else self.now
            return
        self._measure()
        result = self.core.step(self.now)
        self.now += self._speed.step_s + self._speed.sequence_s * len(result.outputs)
        if result.empty():
            self.now = max(self.now, self._coming[0][0])
        for output in result.outputs:
            self._hear(output.sequence)
        for sequence in result.preempted:
            self.figures.preemptions += 1
            self.figures.preemptions_most = max(self.figures.preemptions_most, sequence.preemptions)
            if sequence.state is State.DETACHED:
                asked = self._running.pop(sequence.id[1])
                asked.known, asked.preemptions = len(sequence.tokens), sequence.preemptions
                self._asking.append(asked)

    def _hear(self, sequence: Sequence) -> None:
        asked = self._running[sequence.id[1]]
        self.figures.tokens += 1
        if len(sequence.tokens) >= asked.prompt + asked.answer:
            self.core.detach(sequence.id)
            assert sequence.credit is not None and sequence.table is not None
            self.core.pool.waive(sequence.credit)
            self.core.pool.release(sequence.table)
            del self._running[asked.number]
            self._ask_next()

    def _measure(self) -> None:
        figures, pool = self.figures, self.core.pool
        running = self.core.view().running
        owned, promised = pool.total - pool.unowned, pool.unowned - pool.available
        figures.steps += 1
        figures.sequences += len(running)
        figures.owned_blocks += owned
        reserved = sum(each.start(self._way.whole_answer) for _, _, each in self._coming)
        figures.slots += (owned + promised - reserved) * BLOCK
        figures.filled += sum(self._running[one.id[1]].computed() for one in running)
        figures.contiguous += sum(self._running[one.id[1]].prompt + MAX_TOKENS for one in running)


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


def lengths(seed: int, count: int) -> Iterator[tuple[int, int]]:
    """(prompt, answer) in tokens, as ShareGPT has them: about 160 and 310 on average, with long tails."""
    dice = random.Random(seed)
    for _ in range(count):
        prompt = int(dice.lognormvariate(4.4, 1.1))
        answer = int(dice.lognormvariate(5.3, 0.95))
        yield min(1024, max(4, prompt)), min(MAX_TOKENS, max(2, answer))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--overcommit", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--step-ms", type=float, default=7.5, help="of a step; default: the built-in model, one core"
    )
    parser.add_argument("--sequence-ms", type=float, default=1.5, help="of each sequence in a step")
    options = parser.parse_args()

    speed = Speed(step_s=options.step_ms / 1e3, sequence_s=options.sequence_ms / 1e3)

    def run(way: Way, blocks: int) -> Figures:
        drawn = lengths(options.seed, options.requests)
        return Worker(way, blocks, drawn, options.clients, speed).run()

    ample = run(Way(name="ample memory"), options.clients * blocks_of(1024 + MAX_TOKENS))
    blocks = max(blocks_of(1024 + MAX_TOKENS), int(ample.owned_blocks / ample.steps / options.overcommit))
    print(f"{options.requests} requests of {options.clients} clients; {blocks} blocks of {BLOCK} tokens")
    show("ample memory", ample, ample)
    for way in (
        Way(name="whole answers reserved", whole_answer=True),
        Way(name="no headroom", share=0.0),
        Way(name="sliding headroom"),
        Way(name="sliding headroom, swap", swap=True),
    ):
        show(way.name, run(way, blocks), ample, options.requests)


def show(name: str, figures: Figures, best: Figures, requests: int = 1) -> None:
    rate, best_rate = figures.tokens / figures.seconds, best.tokens / best.seconds
    print(
        f"{name:<24} {rate:7.0f} tokens/s {rate / best_rate:5.0%} of the best, "
        f"{figures.sequences / figures.steps:5.1f} run at once, "
        f"{figures.preemptions / requests:5.2f} preemptions per request, at most {figures.preemptions_most}; "
        f"unused slots {1 - figures.filled / figures.slots:5.1%}, "
        f"contiguous {1 - figures.filled / figures.contiguous:5.1%}"
    )


if __name__ == "__main__":
    main()
