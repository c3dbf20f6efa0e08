"""Several streams as one, each item with the number of its stream.

The HTTP face calls it for requests with several prompts, the orchestrator for choices that go on by themselves. It asks
each stream for one item at a time, so nothing piles up, and closes all of them when one fails or the reader leaves.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Raises what the first failing stream raises."""
    async with AsyncExitStack() as stack:
        for stream in streams:
            await stack.enter_async_context(aclosing(stream))
        asked = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
        try:
            while asked:
                done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                for task in [each for each in asked if each in done]:  # in one order, whatever a set's is
                    index = asked.pop(task)
                    try:
                        item = task.result()
                    except StopAsyncIteration:
                        continue
                    asked[asyncio.ensure_future(anext(streams[index]))] = index
                    yield index, item
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
