"""What every process measures: its server's calls and how late its event loop is."""

import asyncio
from collections.abc import Iterable

from telemetry import buckets
from telemetry.registry import MetricsRegistry

#: Seconds between two readings of the event loop's lag.
LAG_PERIOD_S = 0.25

#: Names of gRPC status codes.
CODES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)


class RpcMetrics:
    """Calls that a gRPC server answered."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self._calls = registry.counter(
            "rpc_server_calls_total", "Calls that ended, by method and status.", {"method": None, "code": CODES}
        )
        self._duration = registry.histogram(
            "rpc_server_call_duration_seconds", "Whole calls, streams included.", buckets.RPC_S, {"method": None}
        )

    def ended(self, method: str, code: str, duration_s: float) -> None:
        """Note the end of a call of `method` ("package.Service/Method"). Never raises."""
        self._calls.inc(1, method, code)
        self._duration.observe(duration_s, method)


class LoopLag:
    """Measures how late the event loop runs what is due."""

    def __init__(self, registry: MetricsRegistry, period_s: float = LAG_PERIOD_S) -> None:
        self._lag = registry.histogram("event_loop_lag_seconds", "How late the event loop ran a timer.", buckets.LOOP_LAG_S)
        self._period_s = period_s

    async def run(self, readings: Iterable[int] | None = None) -> None:
        """Measure until cancelled (or once for each of `readings`)."""
        loop = asyncio.get_running_loop()
        for _ in readings if readings is not None else iter(int, 1):
            due_at = loop.time() + self._period_s
            await asyncio.sleep(self._period_s)
            self._lag.observe(max(0.0, loop.time() - due_at))
