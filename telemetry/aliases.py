"""The four gauges that inference gateways read, under the names of vLLM, beside our own."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from telemetry.registry import MetricsRegistry

_HELP = "Alias for gateways."


@dataclass(frozen=True, slots=True)
class GatewayGauges:
    """What a gateway balances by. `kv_used_ratio` is 0 to 1."""

    model: str
    running_requests: int
    waiting_requests: int
    kv_used_ratio: float
    page_tokens: int
    total_pages: int


class VllmAliases(Collector):
    """Computed when scraped, in the scrape's thread."""

    def __init__(self, registry: MetricsRegistry, provider: Callable[[], GatewayGauges]) -> None:
        self._owner = registry
        self._provider = provider
        registry.registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Nothing is asked at registration."""
        return []

    def collect(self) -> Iterable[Metric]:
        """The gauges of now; none when the provider fails, which is counted."""
        try:
            now = self._provider()
        except Exception as wrong:  # noqa: BLE001  (costs these four, not the whole scrape)
            self._owner.error("vllm_aliases", "provider", f"{type(wrong).__name__}: {wrong}")
            return []
        found = []
        values = (
            ("vllm:num_requests_running", now.running_requests),
            ("vllm:num_requests_waiting", now.waiting_requests),
            ("vllm:kv_cache_usage_perc", now.kv_used_ratio),
        )
        for name, value in values:
            family = GaugeMetricFamily(name, _HELP, labels=["model_name", "engine"])
            family.add_metric([now.model, "0"], value)
            found.append(family)
        labels = ["model_name", "engine", "block_size", "num_gpu_blocks"]
        config = GaugeMetricFamily("vllm:cache_config_info", _HELP, labels=labels)
        config.add_metric([now.model, "0", str(now.page_tokens), str(now.total_pages)], 1)
        return [*found, config]
