"""What all calls of the public gRPC face have in common: how they end, and how long a client may not read.

Servicers use it. Which status an error has is service.status's business.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import grpc
import structlog
from google.protobuf.message import Message

from gateway import patience
from service.errors import Exhausted, InternalFault, ServiceError, Unavailable
from service.status import abort

Context = grpc.aio.ServicerContext[Any, Any]

_log = structlog.stdlib.get_logger(__name__)


class Trailer(Protocol):
    """Trailing metadata of a call that ends now. failed: through a fault of ours."""

    def __call__(self, *, failed: bool) -> tuple[tuple[str, bytes], ...]: ...


def no_trailer(*, failed: bool) -> tuple[tuple[str, bytes], ...]:
    return ()


@asynccontextmanager
async def refusals(context: Context, trailer: Trailer = no_trailer) -> AsyncIterator[None]:
    """Ends the call with the status of what is raised inside. A cancellation that is not the caller's would leave the
    client waiting, and is a fault like any other."""
    refusal: ServiceError | None = None
    try:
        yield
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
        await abort(context, refusal)


async def write(context: Context, part: Message) -> None:
    """Raises Exhausted for a client that does not read."""
    try:
        async with asyncio.timeout(patience.STALL_S):
            await context.write(part)
    except TimeoutError:
        text = f"nothing of the answer was read for {patience.STALL_S:g} seconds"
        raise Exhausted(text, reason="CLIENT_STALLED") from None


def _fault() -> InternalFault:
    _log.exception("a call failed")
    return InternalFault("internal error")
