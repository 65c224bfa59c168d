"""What requests leave in the router's metrics: counts, times, and traces where somebody would look for them."""

import pytest
from prometheus_client.openmetrics.exposition import generate_latest

from lifecycle.finish import Cause, Ending, FinishReason, is_failure
from router.observing import NOTED_GAP_S, observe_gap
from telemetry.registry import MetricsRegistry
from telemetry.router_metrics import RouterGauges, RouterMetrics

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACED = f"00-{TRACE_ID}-b7ad6b7169203331-01"


def shown(registry: MetricsRegistry, name: str) -> str:
    """The lines of one metric, as a scrape that asks for exemplars sees them."""
    return "\n".join(line for line in generate_latest(registry.registry).decode().splitlines() if line.startswith(name))


def test_only_long_gaps_between_outputs_point_to_their_trace() -> None:
    registry = MetricsRegistry("test", "0")
    metrics = RouterMetrics(registry)
    observe_gap(metrics, NOTED_GAP_S / 2, TRACED)
    assert TRACE_ID not in shown(registry, "tandem_router_inter_token_seconds")
    observe_gap(metrics, NOTED_GAP_S, TRACED)
    lines = shown(registry, "tandem_router_inter_token_seconds")
    assert f'# {{trace_id="{TRACE_ID}"}} {NOTED_GAP_S}' in lines and "tandem_router_inter_token_seconds_count 2.0" in lines


def test_what_the_store_counts_is_shown() -> None:
    registry = MetricsRegistry("test", "0")
    RouterMetrics(registry).gauges_from(
        lambda: RouterGauges(store_available=1, unwritten_ends=4, lease_lapses=2, store_forgets=3, queued_requests={"0": 0})
    )
    values = {
        name: registry.registry.get_sample_value(f"tandem_router_{name}")
        for name in ("store_available", "unwritten_ends", "lease_lapses_total", "store_forgets_total")
    }
    assert values == {"store_available": 1, "unwritten_ends": 4, "lease_lapses_total": 2, "store_forgets_total": 3}
    assert registry.registry.get_sample_value("tandem_router_queued_requests", {"priority": "0"}) == 0


@pytest.mark.parametrize(
    ("ending", "failed"),
    [
        (Ending(FinishReason.EOS), False),
        (Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL), False),
        (Ending(FinishReason.DEADLINE_EXCEEDED, Cause.QUEUE_DEADLINE), False),
        (Ending(FinishReason.DEADLINE_EXCEEDED, Cause.INTER_TOKEN_ENGINE), True),
        (Ending(FinishReason.SLOW_CONSUMER, Cause.SLOW_CONSUMER), False),
        (Ending(FinishReason.MODEL_ERROR, Cause.MODEL_FAILED), True),
        (Ending(FinishReason.MODEL_ERROR, Cause.GRAMMAR_FAILED), False),
        (Ending(FinishReason.TRANSPORT_ERROR, Cause.ATTEMPTS_EXHAUSTED), True),
    ],
)
def test_the_cell_is_blamed_for_what_it_failed_only(ending: Ending, failed: bool) -> None:
    assert is_failure(ending) is failed
