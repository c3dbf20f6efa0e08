"""What the gRPC health service says of this process.

The name "" is liveness, "readiness" and each full service name say whether new work is welcome. It does not
judge: the process tells it.
"""

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

READINESS = "readiness"
HEALTH = health.SERVICE_NAME

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """services: full names. Alive at once, ready only when told so. standing: names that are ready as long as the
    process lives, whatever it has behind it."""

    def __init__(self, services: Sequence[str], standing: Sequence[str] = ()) -> None:
        self._standing = tuple(standing)
        self._names = (READINESS, *services)
        self._servicer = health.aio.HealthServicer()
        self.ended = False
        """For good: this process takes no part any more."""

    async def register(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        for name in self._standing:
            await self._servicer.set(name, _SERVING)
        await self.set_ready(False)

    async def set_ready(self, ready: bool) -> None:
        """Tells every watcher. Without effect after `shut_down`."""
        for name in self._names:
            await self._servicer.set(name, _SERVING if ready else _NOT_SERVING)

    async def shut_down(self) -> None:
        """NOT_SERVING under every name, for good."""
        self.ended = True
        await self._servicer.enter_graceful_shutdown()
