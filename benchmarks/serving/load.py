"""Ways to put load on a server: so many requests at once, at random times, or running streams beside long prompts."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.serving.client import Server, clock, read
from benchmarks.serving.figures import Answer
from benchmarks.serving.prompts import Prompts

LATEST_S = 600.0
"""After the last request was sent: what has no end by then is cut."""
MIX_MEDIANS = (90, 80)
MIX_SPREADS = (1.08, 0.8)
MIX_LEAST, MIX_MOST = 4, (1024, 320)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    prompt: int
    answer: int


@dataclass(slots=True)
class Load:
    """One server under load. salt: of the prompts, another one in each run. asked: requests so far. answers: to all
    that was asked since the last `take`."""

    server: Server
    prompts: Prompts
    salt: int
    asked: int = 0
    answers: list[Answer] = field(default_factory=list)

    async def ask(self, size: Size, due: float | None = None) -> Answer:
        self.asked += 1
        dice = random.Random(f"{self.salt}/{self.asked}")
        answer = Answer(prompt_tokens=size.prompt, max_tokens=size.answer, due=due or clock())
        self.answers.append(answer)
        await self.server.stream(self.prompts.make(size.prompt, dice), answer)
        return answer

    def take(self) -> list[Answer]:
        """The answers since the last time, read."""
        taken, self.answers = self.answers, []
        for answer in taken:
            read(answer)
        return taken

    async def closed(self, sizes: Sequence[Size], concurrency: int) -> list[Answer]:
        """So many at once, each followed by the next."""
        left = iter(sizes)

        async def client() -> None:
            for size in left:
                await self.ask(size)

        await _all([asyncio.create_task(client()) for _ in range(concurrency)])
        return self.take()

    async def open(self, sizes: Sequence[Size], rate: float, seed: int) -> list[Answer]:
        """rate: requests per second on average, at random times (a Poisson process) that follow from the seed,
        whatever the server does."""
        dice, due, tasks = random.Random(f"{seed}/arrivals"), clock(), []
        for size in sizes:
            due += dice.expovariate(rate)
            await asyncio.sleep(max(0.0, due - clock()))
            tasks.append(asyncio.create_task(self.ask(size, due)))
        await _all(tasks)
        return self.take()


@dataclass(slots=True, kw_only=True)
class Beside:
    """Streams that run, and long prompts one after the other beside them. quiet: begin and end of the time before the
    first long one was sent."""

    streams: list[Answer]
    long: list[Answer]
    quiet: tuple[float, float]


async def beside(load: Load, *, streams: int, size: Size, long: Size, count: int, before_s: float) -> Beside:
    """Streams that end begin again; they start staggered, so that some end in every part of the time."""

    async def stream(place: int) -> None:
        answer = max(8, size.answer * (place + 1) // streams)
        while True:
            await load.ask(Size(prompt=size.prompt, answer=answer))
            answer = size.answer

    tasks = [asyncio.create_task(stream(place)) for place in range(streams)]
    await asyncio.sleep(before_s / 2)
    begin = clock()
    await asyncio.sleep(before_s)
    end = clock()
    prompts = [await load.ask(long) for _ in range(count)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return Beside(
        streams=[one for one in load.take() if one not in prompts], long=prompts, quiet=(begin, end)
    )


def mix(count: int, seed: int) -> list[Size]:
    """Like conversations (ShareGPT), with answers of a third of their length: log-normal with long tails."""
    dice = random.Random(seed)

    def draw(which: int) -> int:
        length = MIX_MEDIANS[which] * dice.lognormvariate(0.0, MIX_SPREADS[which])
        return int(min(max(length, MIX_LEAST), MIX_MOST[which]))

    return [Size(prompt=draw(0), answer=draw(1)) for _ in range(count)]


async def _all(
    tasks: list[asyncio.Task[object]] | list[asyncio.Task[None]] | list[asyncio.Task[Answer]],
) -> None:
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=LATEST_S)
        for task in late:
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
