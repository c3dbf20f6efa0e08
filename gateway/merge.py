"""Several answers as one stream, each delta with the number of its answer.

The HTTP face calls it for requests with several prompts. It asks each answer for one delta at a time, so
nothing piles up, and closes all of them when one fails or the reader leaves.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing

from gateway.generation import Delta


async def merge(answers: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Raises what the first failing answer raises."""
    async with AsyncExitStack() as stack:
        for answer in answers:
            await stack.enter_async_context(aclosing(answer))
        asked = {asyncio.ensure_future(anext(answer)): index for index, answer in enumerate(answers)}
        try:
            while asked:
                done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = asked.pop(task)
                    try:
                        delta = task.result()
                    except StopAsyncIteration:
                        continue
                    asked[asyncio.ensure_future(anext(answers[index]))] = index
                    yield index, delta
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
