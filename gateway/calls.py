"""What all calls of the public gRPC face have in common: how they end, and how long a client may not read.

Servicers use it. Which status an error has is service.status's business.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn, Protocol

import grpc
import structlog
from google.protobuf.message import Message

from gateway import patience
from service.errors import Exhausted, InternalFault, ServiceError, StreamLost, Unavailable
from service.status import abort

Context = grpc.aio.ServicerContext[Any, Any]

_log = structlog.stdlib.get_logger(__name__)


class Trailer(Protocol):
    """Trailing metadata of a call that ends now. failed: through a fault of ours."""

    def __call__(self, *, failed: bool) -> tuple[tuple[str, bytes], ...]: ...


def no_trailer(*, failed: bool) -> tuple[tuple[str, bytes], ...]:
    return ()


class Call:
    """One of them. shown: whether some of its answer is on its way to the client."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.shown = False

    async def write(self, part: Message) -> None:
        """Raises StreamLost for a client that does not read."""
        self.shown = True
        try:
            async with asyncio.timeout(patience.STALL_S):
                await self._context.write(part)
        except TimeoutError:
            text = f"nothing of the answer was read for {patience.STALL_S:g} seconds"
            raise StreamLost(text, reason="CLIENT_STALLED") from None

    async def end(self, refusal: ServiceError) -> NoReturn:
        """What could be tried again by whoever has seen nothing of an answer is only lost to whoever has."""
        if self.shown and isinstance(refusal, Exhausted | Unavailable):
            refusal = StreamLost(refusal.message, reason=refusal.reason)
        await abort(self._context, refusal)


@asynccontextmanager
async def refusals(context: Context, trailer: Trailer = no_trailer) -> AsyncIterator[Call]:
    """Ends the call with the status of what is raised inside. A cancellation that is not the caller's would leave the
    client waiting, and is a fault like any other."""
    call = Call(context)
    refusal: ServiceError | None = None
    try:
        yield call
    except ServiceError as error:
        refusal = error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        refusal = _fault()
    except Exception:
        refusal = _fault()
    told = trailer(failed=isinstance(refusal, InternalFault | Unavailable))
    context.set_trailing_metadata((*(context.trailing_metadata() or ()), *told))
    if refusal is not None:
        await call.end(refusal)


def _fault() -> InternalFault:
    _log.exception("a call failed")
    return InternalFault("internal error")
