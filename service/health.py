"""What the gRPC health service says of this process.

The name "" is liveness, "readiness" and each full service name say whether new work is welcome. It does not
judge: the process tells it, and never waits for anybody who watches. Keeps nothing of names that are not its own.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service import status
from service.bounded_calls import BoundedCalls
from service.errors import ServiceUnknown
from service.patience import tell

READINESS = "readiness"
WATCHES_MAX = 2048
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
_Context = grpc.aio.ServicerContext[Any, Any]


class Health(health_pb2_grpc.HealthServicer):
    """services: full names. Alive at once, ready only when told so. standing: names that are ready as long as the
    process lives, whatever it has behind it."""

    def __init__(self, services: Sequence[str], standing: Sequence[str] = ()) -> None:
        self._names = (READINESS, *services)
        self._statuses = dict.fromkeys(("", *standing), _SERVING) | dict.fromkeys(self._names, _NOT_SERVING)
        self._watches = BoundedCalls(WATCHES_MAX)
        self._changed = asyncio.Event()
        self._released = False
        self.ended = False
        """For good: this process takes no part any more."""

    def register(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    def set_ready(self, ready: bool) -> None:
        """Every watcher will hear the last that was said. Without effect after `shut_down`."""
        if not self.ended:
            self._say(dict.fromkeys(self._names, _SERVING if ready else _NOT_SERVING))

    def shut_down(self) -> None:
        """NOT_SERVING under every name, for good."""
        self.ended = True
        self._say(dict.fromkeys(self._statuses, _NOT_SERVING))

    def release(self) -> None:
        """Ends every watch: they would keep the server from ending."""
        self._released = True
        self._say({})

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        known = self._statuses.get(request.service)
        if known is None:
            await status.abort(context, ServiceUnknown("no such service"))
        return health_pb2.HealthCheckResponse(status=known)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:
        """Each watcher is told by itself, and what it missed while it did not read is left out."""
        await context.send_initial_metadata(())
        async with self._watches.room(context.peer()):
            told = None
            while True:
                changed, known = self._changed, self._statuses.get(request.service, _UNKNOWN)
                if known != told:
                    await tell(context, health_pb2.HealthCheckResponse(status=known))
                    told = known
                if self._released:
                    return
                await changed.wait()

    def _say(self, statuses: "dict[str, health_pb2.HealthCheckResponse.ServingStatus]") -> None:
        self._statuses |= statuses
        self._changed.set()
        self._changed = asyncio.Event()
