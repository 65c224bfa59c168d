"""What the HTTP door measures. Declared once, here."""

from telemetry import buckets
from telemetry.registry import MetricsRegistry


class HttpMetrics:
    """Calls that the HTTP server answered; a stream counts when it ends."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self._calls = registry.counter(
            "http_server_calls_total",
            "HTTP calls that ended, by route and status; 499: the client went before its answer.",
            {"route": None, "status": None},
        )
        self._duration = registry.histogram(
            "http_server_call_duration_seconds", "Whole HTTP calls, streams included.", buckets.RPC_S, {"route": None}
        )

    def ended(self, route: str, status: int, duration_s: float) -> None:
        """Note the end of a call of `route`, a path of the list of routes. Never raises."""
        self._calls.inc(1, route, str(status))
        self._duration.observe(duration_s, route)
