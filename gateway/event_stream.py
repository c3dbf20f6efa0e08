"""An answer as server-sent events: one `data:` frame per chunk, and `[DONE]` after a complete one.

The HTTP routes return it as their response. An error after the first byte is a frame of its own, after which
the stream ends. However it ends, the answer's generator is closed.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import orjson
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.generation import Delta
from gateway.json_fields import JsonObject
from gateway.openai_answers import Answer
from gateway.openai_errors import error_object
from service.errors import InternalFault, ServiceError

_DONE = b"data: [DONE]\n\n"

_log = structlog.stdlib.get_logger(__name__)


class EventStream(Response):
    """first: the delta that is already there, taken from `rest`. until_sent: what is let go of then, `rest` with it."""

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: Answer,
        first: tuple[int, Delta],
        rest: AsyncGenerator[tuple[int, Delta], None],
        *,
        until_sent: AsyncExitStack,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._answer = answer
        self._first = first
        self._rest = rest
        self._until_sent = until_sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._until_sent:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            last = await self._say(send)
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _say(self, send: Send) -> bytes:
        """Everything but the last frame, which it returns."""
        try:
            await _send(send, await self._frames(*self._first))
            async for index, delta in self._rest:
                await _send(send, await self._frames(index, delta))
            await _send(send, b"".join(map(_frame, self._answer.closing())))
        except ServiceError as error:
            return _frame(error_object(error, self._answer.names))
        except Exception:
            _log.exception("a stream failed")
            return _frame(error_object(InternalFault("internal error")))
        return _DONE

    async def _frames(self, index: int, delta: Delta) -> bytes:
        """What there is to say of a whole prompt is said on another thread."""

        def frames() -> bytes:
            return b"".join(map(_frame, self._answer.chunks(index, delta)))

        return frames() if delta.scores is None else await asyncio.to_thread(frames)


async def _send(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _frame(content: JsonObject) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"
