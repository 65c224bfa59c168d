"""Health by service name (grpc.health.v1).

"" and each service and "readiness": whether new work is welcome. "liveness": whether the process does what it should;
a busy one and a draining one do.
"""

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]

LIVENESS = "liveness"
READINESS = "readiness"

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """The health service of one server. Nothing is ready until `set_ready`, everything is alive until `set_alive`."""

    service_name: str = SERVICE_NAME

    def __init__(self, service_names: Sequence[str]) -> None:
        self._names = ("", READINESS, *service_names)
        self._servicer = health_aio.HealthServicer()
        self._draining = False
        self._ready = False
        self._alive = True

    async def open(self, server: grpc.aio.Server) -> None:
        """Add the service to a server that has not started: the library's servicer starts as SERVING."""
        await self._publish()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_ready(self, ready: bool) -> None:
        """Say whether new work is welcome. While draining the answer stays no."""
        self._ready = ready
        await self._publish()

    async def set_alive(self, alive: bool) -> None:
        """Say whether the process does its work; one that does not is not ready either."""
        self._alive = alive
        await self._publish()

    async def drain(self) -> None:
        """Not ready for good; alive as before. (The library's own way would declare liveness dead too.)"""
        self._draining = True
        await self._publish()

    @property
    def ready(self) -> bool:
        """What "" answers."""
        return self._ready and self._alive and not self._draining

    async def _publish(self) -> None:
        for name in self._names:
            await self._servicer.set(name, _SERVING if self.ready else _NOT_SERVING)
        await self._servicer.set(LIVENESS, _SERVING if self._alive else _NOT_SERVING)
