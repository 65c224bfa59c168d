"""What a prefill member measures. Declared once, here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from telemetry import buckets
from telemetry.prefix_metrics import PrefixGauges, prefix_computed, prefix_samples
from telemetry.registry import Computed, MetricsRegistry, Samples

#: How a prefill ends: well, or with a cause of PrefillFailed.
OUTCOMES = (
    *("committed", "draining", "unknown_model", "wrong_incarnation", "layout_mismatch", "bad_grant", "queue_full", "too_long"),
    *("revoked", "deadline", "transfer_failed", "lease_expired", "model_error", "abandoned", "unknown_adapter"),
)
#: States of a page.
PAGE_STATES = ("free", "owned", "cached", "granted", "quarantined", "pinned")
#: How a Drain found its grant.
DRAIN_STATES = ("drained", "committed")
#: Why a write failed.
PUSH_CAUSES = (
    *("peer_gone", "not_registered", "not_connected", "bad_metadata", "connect_failed", "transport_error"),
    *("closed", "stale", "withdrawn", "queue_full"),
)


@dataclass(frozen=True, slots=True)
class PrefillGauges:
    """What a prefill member holds now; computed when scraped."""

    running_sequences: float = 0
    waiting_sequences: float = 0
    waiting_tokens: float = 0
    pages: Mapping[str, float] = field(default_factory=dict)  # by state
    kv_used_ratio: float = 0  # 0 to 1
    open_grants: float = 0
    pushes_in_flight: float = 0
    remote_agents: float = 0
    inbox_messages: float = 0
    engine_busy_ratio: float = 0  # 0 to 1, since the start
    pushed_bytes: float = 0  # since the start, kept by the engine thread
    cached_tokens: float = 0  # the same
    prefix: PrefixGauges = field(default_factory=PrefixGauges)


class PrefillMetrics:
    """A prefill member's metrics. Durations in seconds, sizes in bytes."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self.prefills = registry.counter("prefill_requests_total", "Prefills that ended, by outcome.", {"outcome": OUTCOMES})
        self.queue = registry.histogram("prefill_queue_seconds", "Arrival to the first chunk.", buckets.PHASE_S)
        self.compute = registry.histogram("prefill_compute_seconds", "First chunk to last.", buckets.PHASE_S)
        self.computed_tokens = registry.counter("prefill_computed_tokens_total", "Prompt tokens computed.")
        self._steps(registry)
        self._pushes(registry)
        self._model = registry.computed(
            (
                Computed("prefill_model_part_seconds_total", "Inside the model, by part of a step.", "part", counter=True),
                Computed("prefill_lent_steps_total", "Steps that used threads of members with nothing to compute.", counter=True),
                Computed(
                    "prefill_recalled_steps_total", "Those of them that gave the threads back before the end.", counter=True
                ),
            )
        )
        self._gauges = registry.computed(
            (
                Computed("prefill_running_sequences", "Prompts being computed."),
                Computed("prefill_waiting_sequences", "Prompts waiting for their first chunk."),
                Computed("prefill_waiting_tokens", "Prompt tokens not yet computed."),
                Computed("prefill_pages", "KV pages by state.", "state"),
                Computed("prefill_kv_used_ratio", "Share of KV pages that somebody holds, 0 to 1."),
                Computed("prefill_open_grants", "Grants being written."),
                Computed("prefill_pushes_in_flight", "Writes posted and not yet done."),
                Computed("prefill_remote_agents", "Receiving agents connected."),
                Computed("prefill_inbox_messages", "Messages waiting for the engine thread."),
                Computed("prefill_engine_busy_ratio", "Share of time that the engine thread was busy since the start."),
                Computed("prefill_pushed_bytes_total", "Bytes of writes that were done.", counter=True),
                Computed("prefill_cached_tokens_total", "Prompt tokens found in the cache.", counter=True),
                *prefix_computed("prefill"),
            )
        )

    def model_from(
        self, part_seconds: Callable[[], Mapping[str, float]], lent_steps: Callable[[], int], recalled_steps: Callable[[], int]
    ) -> None:
        """Set who tells the seconds of each part of the model, steps with more threads, and those that gave them back early;
        called in the scrape's thread."""
        self._model.provide(
            lambda: {
                "prefill_model_part_seconds_total": part_seconds(),
                "prefill_lent_steps_total": lent_steps(),
                "prefill_recalled_steps_total": recalled_steps(),
            }
        )

    def gauges_from(self, provider: Callable[[], PrefillGauges]) -> None:
        """Set who tells the gauges; called in the scrape's thread."""
        self._gauges.provide(lambda: _samples(provider()))

    def _steps(self, registry: MetricsRegistry) -> None:
        self.step = registry.histogram("prefill_step_seconds", "One step of the engine.", buckets.STEP_S)
        self.step_tokens = registry.histogram("prefill_step_tokens", "Prompt tokens scheduled in one step.", buckets.STEP_TOKENS)
        self.step_sequences = registry.histogram(
            "prefill_step_sequences", "Sequences scheduled in one step.", buckets.STEP_TOKENS
        )

    def _pushes(self, registry: MetricsRegistry) -> None:
        self.handover = registry.histogram(
            "prefill_handover_seconds", "First page sent to the last write done.", buckets.TRANSFER_S
        )
        self.handover_exposed = registry.histogram(
            "prefill_handover_exposed_seconds", "The part of a hand-over after the last chunk.", buckets.TRANSFER_S
        )
        self.handover_hidden = registry.histogram(
            "prefill_handover_hidden_ratio", "Share of a hand-over hidden by computing, 0 to 1.", buckets.RATIO
        )
        self.handover_size = registry.histogram("prefill_handover_bytes", "Bytes written for one grant.", buckets.BYTES)
        self.post = registry.histogram("prefill_post_seconds", "Inside posting writes, for one grant.", buckets.TRANSFER_S)
        self.push_failures = registry.counter(
            "prefill_push_failures_total", "Writes that failed, by cause.", {"cause": PUSH_CAUSES}
        )
        self.drains = registry.counter("prefill_drains_total", "Drains answered, by state.", {"state": DRAIN_STATES})


def _samples(now: PrefillGauges) -> Samples:
    return {
        "prefill_running_sequences": now.running_sequences,
        "prefill_waiting_sequences": now.waiting_sequences,
        "prefill_waiting_tokens": now.waiting_tokens,
        "prefill_pages": now.pages,
        "prefill_kv_used_ratio": now.kv_used_ratio,
        "prefill_open_grants": now.open_grants,
        "prefill_pushes_in_flight": now.pushes_in_flight,
        "prefill_remote_agents": now.remote_agents,
        "prefill_inbox_messages": now.inbox_messages,
        "prefill_engine_busy_ratio": now.engine_busy_ratio,
        "prefill_pushed_bytes_total": now.pushed_bytes,
        "prefill_cached_tokens_total": now.cached_tokens,
        **prefix_samples("prefill", now.prefix),
    }
