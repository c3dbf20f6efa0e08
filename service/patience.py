"""How long a peer that only listens may take nothing of what it is told: who watches health, who reads load reports."""

import asyncio
from typing import Any

import grpc

from service.errors import Exhausted

STALL_S = 10.0


async def tell(context: grpc.aio.ServicerContext[Any, Any], message: object) -> None:
    """Raises Exhausted for a peer that does not read. Initial metadata must have been sent: to give up sending it is to
    lose the status too."""
    try:
        async with asyncio.timeout(STALL_S):
            await context.write(message)
    except TimeoutError:
        text = f"nothing was read for {STALL_S:g} seconds"
        raise Exhausted(text, reason="CLIENT_STALLED") from None
