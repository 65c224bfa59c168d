"""What a decode member measures. Declared once, here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lifecycle.finish import FinishReason
from telemetry import buckets
from telemetry.registry import Computed, MetricsRegistry, Samples

#: Parts of one turn of the engine thread.
STEP_PARTS = ("plan", "model", "sample", "text", "publish")
#: Why a seat is refused, as in Refused.reason.
REFUSALS = (
    *("draining", "unknown_model", "wrong_incarnation", "no_pages", "no_landing_row", "too_many_sequences", "too_long"),
    *("duplicate_attempt", "inbox_full"),
)
#: Kinds of preemption.
PREEMPTIONS = ("recompute", "swap")
#: Kinds of tokens.
TOKEN_KINDS = ("selected", "returned", "billed")

_REASONS = tuple(reason.value for reason in FinishReason)


@dataclass(frozen=True, slots=True)
class DecodeGauges:
    """What a decode member holds now; computed when scraped."""

    running_sequences: float = 0
    paused_sequences: float = 0
    waiting_sequences: float = 0
    pages: Mapping[str, float] = field(default_factory=dict)  # by state: free, owned, cached, granted, quarantined, pinned
    kv_used_ratio: float = 0  # 0 to 1
    open_grants: float = 0
    landing_rows: float = 0
    seats: float = 0
    stream_buffer_bytes: float = 0
    slow_readers: float = 0
    receiving_agents: float = 0
    inbox_messages: float = 0
    engine_busy_ratio: float = 0  # 0 to 1, since the start
    # Counts since the start, kept by the engine thread.
    grants: Mapping[str, float] = field(default_factory=dict)  # by outcome: offered, committed, reclaimed, fenced
    stray_notices: Mapping[str, float] = field(default_factory=dict)  # by cause
    silent_drains: float = 0
    fences: float = 0


class DecodeMetrics:
    """A decode member's metrics. Durations in seconds, sizes in bytes."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self.sequences = registry.counter(
            "decode_sequences_total", "Sequences that ended, by finish reason.", {"finish_reason": _REASONS}
        )
        self.refusals = registry.counter("decode_refusals_total", "Seats refused, by reason.", {"reason": REFUSALS})
        self.tokens = registry.counter("decode_tokens_total", "Tokens, by kind.", {"kind": TOKEN_KINDS})
        self.decode = registry.histogram("decode_sequence_seconds", "Commit to the last token.", buckets.PHASE_S)
        self.stop_hold = registry.histogram(
            "decode_stop_hold_seconds", "Longest hold of text for a possible stop, of one sequence.", buckets.PHASE_S
        )
        self._steps(registry)
        self._grants(registry)
        self._gauges = registry.computed(
            (
                Computed("decode_running_sequences", "Sequences generating."),
                Computed("decode_paused_sequences", "Sequences paused by back-pressure."),
                Computed("decode_waiting_sequences", "Sequences waiting for their pages or a place."),
                Computed("decode_pages", "KV pages by state.", "state"),
                Computed("decode_kv_used_ratio", "Share of KV pages that are not free, 0 to 1."),
                Computed("decode_open_grants", "Grants offered and not yet committed or taken back."),
                Computed("decode_landing_rows", "Landing rows in use."),
                Computed("decode_seats", "Seats open."),
                Computed("decode_stream_buffer_bytes", "Bytes of events not yet taken by routers."),
                Computed("decode_slow_readers", "Seats whose reader is behind."),
                Computed("decode_receiving_agents", "Receiving agents, one a writer's incarnation."),
                Computed("decode_inbox_messages", "Messages waiting for the engine thread."),
                Computed("decode_engine_busy_ratio", "Share of time that the engine thread was busy since the start."),
                Computed("decode_grants_total", "Grants, by what became of them.", "outcome", counter=True),
                Computed("decode_stray_notices_total", "Notices that changed nothing, by cause.", "cause", counter=True),
                Computed("decode_silent_drains_total", "Drain calls that their writer did not answer.", counter=True),
                Computed("decode_fences_total", "Writers that were cut off.", counter=True),
            )
        )

    def gauges_from(self, provider: Callable[[], DecodeGauges]) -> None:
        """Set who tells the gauges; called in the scrape's thread."""
        self._gauges.provide(lambda: _samples(provider()))

    def _steps(self, registry: MetricsRegistry) -> None:
        self.step = registry.histogram("decode_step_seconds", "One turn with a batch.", buckets.STEP_S)
        self.step_part = registry.histogram(
            "decode_step_part_seconds", "The parts of one turn.", buckets.STEP_S, {"part": STEP_PARTS}
        )
        self.step_sequences = registry.histogram("decode_step_sequences", "Sequences scheduled in one step.", buckets.STEP_TOKENS)
        self.step_tokens = registry.histogram("decode_step_tokens", "Tokens scheduled in one step.", buckets.STEP_TOKENS)
        self.preemptions = registry.counter("decode_preemptions_total", "Sequences preempted, by kind.", {"kind": PREEMPTIONS})

    def _grants(self, registry: MetricsRegistry) -> None:
        self.handover = registry.histogram(
            "decode_handover_seconds", "First part's arrival to the last one's.", buckets.TRANSFER_S
        )
        self.received_bytes = registry.counter("decode_received_bytes_total", "Bytes of committed hand-overs.")
        self.drain = registry.histogram(
            "decode_drain_seconds",
            "Drain calls that were answered: from the call until the writer had stopped.",
            buckets.TRANSFER_S,
        )
        self.cancel_effective = registry.histogram(
            "decode_cancel_effective_seconds", "From a cancel's arrival here until everything was released.", buckets.CANCEL_S
        )


def _samples(now: DecodeGauges) -> Samples:
    return {
        "decode_running_sequences": now.running_sequences,
        "decode_paused_sequences": now.paused_sequences,
        "decode_waiting_sequences": now.waiting_sequences,
        "decode_pages": now.pages,
        "decode_kv_used_ratio": now.kv_used_ratio,
        "decode_open_grants": now.open_grants,
        "decode_landing_rows": now.landing_rows,
        "decode_seats": now.seats,
        "decode_stream_buffer_bytes": now.stream_buffer_bytes,
        "decode_slow_readers": now.slow_readers,
        "decode_receiving_agents": now.receiving_agents,
        "decode_inbox_messages": now.inbox_messages,
        "decode_engine_busy_ratio": now.engine_busy_ratio,
        "decode_grants_total": now.grants,
        "decode_stray_notices_total": now.stray_notices,
        "decode_silent_drains_total": now.silent_drains,
        "decode_fences_total": now.fences,
    }
