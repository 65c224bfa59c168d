"""What a router measures. Declared once, here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lifecycle.finish import Cause, FinishReason
from telemetry import buckets
from telemetry.registry import Computed, MetricsRegistry, Samples

#: Phases of a request, as in lifecycle.usage.Timings.
PHASES = ("check", "queue", "prefill_queue", "prefill", "handover", "handover_exposed", "decode", "stop_hold", "send")
#: Kinds of tokens, as in lifecycle.usage.Usage.
TOKEN_KINDS = ("prompt", "cached", "selected", "processed", "returned", "billed")
#: Where a cancel met its request.
CANCEL_STAGES = ("unknown", "created", "queued", "admitted", "prefilling", "decoding", "draining", "ended")
#: Why a request was never created, or a member was not given one.
REFUSALS = (
    *(
        "queue_full",
        "queue_tokens_full",
        "queue_wait",
        "tenant_limit",
        "no_member",
        "store_away",
        "draining",
        "invalid",
        "unknown_model",
    ),
    *("unknown_adapter", "id_conflict", "deadline", "member_refused", "unauthenticated", "keys_away"),
    *("tenant_request_rate", "tenant_token_rate", "tenant_concurrency"),
)
#: What became of a request that was taken over from a dead router.
ADOPTIONS = ("adopted", "seat_gone", "begun_anew")
#: From a prefill member; computed by decode, because there is no other or because it has most of it already (and where it had
#: not after all); from another decode member.
PLACEMENTS = ("handed_over", "decode", "decode_cached", "prefix_gone", "moved")
#: Where the stream of a known request was: running here, kept here after its end, at another router, or only its stored end.
ATTACH_SOURCES = ("live", "kept", "passed_on", "stored")
#: Calls to the record store.
STORE_CALLS = ("create", "begin", "admit", "advance", "request_cancel", "finish", "retry", "adopt", "get", "lease", "subscribe")

_CAUSES = tuple(cause.value for cause in Cause if cause is not Cause.NONE)
_OUTCOMES = (*(reason.value for reason in FinishReason), *_CAUSES)


@dataclass(frozen=True, slots=True)
class RouterGauges:
    """What a router holds now; computed from its sets when scraped."""

    queued_requests: Mapping[str, float] = field(default_factory=dict)  # by priority
    oldest_queued_s: Mapping[str, float] = field(default_factory=dict)  # by priority
    queued_prompt_tokens: float = 0
    running_requests: float = 0
    open_tickets: float = 0
    open_streams: float = 0
    kept_streams: float = 0
    kept_bytes: float = 0
    members: Mapping[str, float] = field(default_factory=dict)  # ready members by pool
    stale_members: Mapping[str, float] = field(default_factory=dict)  # members whose news are old, by pool
    leases: float = 0
    prefix_hints: Mapping[str, float] = field(default_factory=dict)  # by pool
    store_available: float = 0  # 1 when its last call was answered
    unwritten_ends: float = 0
    # Counts since the start, kept by the queue and the store.
    offered_requests: float = 0
    offered_prompt_tokens: float = 0
    ready_prompt_tokens: float = 0
    lease_lapses: float = 0
    store_forgets: float = 0


class RouterMetrics:
    """A router's metrics. Labels are given in the order of declaration; durations are in seconds."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self._requests(registry)
        self._latency(registry)
        self._repair(registry)
        self._gauges = registry.computed(
            (
                Computed("router_queued_requests", "Requests waiting for budget.", "priority"),
                Computed("router_oldest_queued_seconds", "Age of the oldest waiting request.", "priority"),
                Computed("router_queued_prompt_tokens", "Prompt tokens of requests waiting for budget."),
                Computed("router_running_requests", "Requests that hold budget."),
                Computed("router_open_tickets", "Budgets held."),
                Computed("router_open_streams", "Client streams open."),
                Computed("router_kept_streams", "Streams kept after their end."),
                Computed("router_kept_stream_bytes", "Bytes of events of streams kept after their end."),
                Computed("router_members", "Members that take work.", "pool"),
                Computed("router_stale_members", "Members whose news are older than they may be.", "pool"),
                Computed("router_leases", "Leases held."),
                Computed("router_prefix_hints", "Cached pages that members told of, as far as they are remembered.", "pool"),
                Computed("router_store_available", "Whether the last call to the record store was answered, 0 or 1."),
                Computed("router_unwritten_ends", "Ends of requests that wait for the record store."),
                Computed(
                    "router_offered_requests_total",
                    "Requests that wanted a place in the queue, let in or not; who comes back after a refusal counts once.",
                    counter=True,
                ),
                Computed("router_offered_prompt_tokens_total", "Their prompt tokens.", counter=True),
                Computed(
                    "router_ready_prompt_tokens_total",
                    "Prompt tokens whose KV came to the decode member that was chosen for it.",
                    counter=True,
                ),
                Computed("router_lease_lapses_total", "Leases that had run out before they were renewed.", counter=True),
                Computed("router_store_forgets_total", "Times that the store was found restarted or failed over.", counter=True),
            )
        )

    def gauges_from(self, provider: Callable[[], RouterGauges]) -> None:
        """Set who tells the gauges; called in the scrape's thread."""
        self._gauges.provide(lambda: _samples(provider()))

    def _requests(self, registry: MetricsRegistry) -> None:
        self.requests = registry.counter(
            "router_requests_total", "Requests that ended, by finish reason or failure label.", {"outcome": _OUTCOMES}
        )
        self.failures = registry.counter(
            "router_failed_requests_total", "Of those the ones that the cell failed: no cancel, no deadline of the client."
        )
        self.refusals = registry.counter("router_refusals_total", "Requests refused at the door, by cause.", {"cause": REFUSALS})
        self.unrecorded = registry.counter(
            "router_unrecorded_requests_total",
            "Requests that began while the store was away, by whether their record could be written.",
            {"record": ("later", "never")},
        )
        self.tokens = registry.counter("router_tokens_total", "Tokens of ended requests, by kind.", {"kind": TOKEN_KINDS})
        self.prompt_tokens = registry.histogram("router_prompt_tokens", "Prompt length.", buckets.TOKENS)
        self.output_tokens = registry.histogram("router_output_tokens", "Tokens returned.", buckets.TOKENS)
        self.goodput = registry.counter(
            "router_goodput_requests_total", "Requests that ended well inside all of their deadlines."
        )
        self.sent_bytes = registry.counter("router_sent_bytes_total", "Bytes of text sent to clients.")

    def _latency(self, registry: MetricsRegistry) -> None:
        self.first_token = registry.histogram("router_first_token_seconds", "Arrival to the first token.", buckets.FIRST_TOKEN_S)
        self.inter_token = registry.histogram(
            "router_inter_token_seconds", "Between two outputs of a stream.", buckets.INTER_TOKEN_S
        )
        self.per_output_token = registry.histogram(
            "router_per_output_token_seconds", "(End to end - first token) / (tokens - 1), well-ended.", buckets.INTER_TOKEN_S
        )
        self.end_to_end = registry.histogram("router_end_to_end_seconds", "Arrival to the terminal event.", buckets.REQUEST_S)
        self.phase = registry.histogram(
            "router_phase_seconds", "Time of a request in each phase.", buckets.PHASE_S, {"phase": PHASES}
        )

    def _repair(self, registry: MetricsRegistry) -> None:
        self.cancels = registry.counter(
            "router_cancels_total", "Cancels, by the stage in which they met the request.", {"stage": CANCEL_STAGES}
        )
        self.cancel_effective = registry.histogram(
            "router_cancel_effective_seconds", "From a cancel's request until it is effective.", buckets.CANCEL_S
        )
        self.attempts = registry.counter("router_attempts_total", "Attempts started.")
        self.placements = registry.counter(
            "router_placements_total", "Attempts, by where the KV of their prompt was to come from.", {"way": PLACEMENTS}
        )
        self.moves = registry.counter(
            "router_moves_total",
            "Running sequences moved from a draining decode member, by outcome.",
            {"outcome": ("ok", "failed")},
        )
        self.failovers = registry.counter(
            "router_failovers_total", "Attempts after the first, by what was lost.", {"cause": _CAUSES}
        )
        self.adoptions = registry.counter(
            "router_adoptions_total", "Requests of dead routers taken over, by what became of them.", {"outcome": ADOPTIONS}
        )
        self.attaches = registry.counter(
            "router_attaches_total", "Streams taken up again, by where they were.", {"source": ATTACH_SOURCES}
        )
        self.store_latency = registry.histogram(
            "router_store_seconds", "Calls to the record store.", buckets.STORE_S, {"call": STORE_CALLS}
        )
        self.store_errors = registry.counter(
            "router_store_errors_total", "Calls to the record store that failed.", {"call": STORE_CALLS}
        )


def _samples(now: RouterGauges) -> Samples:
    return {
        "router_queued_requests": now.queued_requests,
        "router_oldest_queued_seconds": now.oldest_queued_s,
        "router_queued_prompt_tokens": now.queued_prompt_tokens,
        "router_running_requests": now.running_requests,
        "router_open_tickets": now.open_tickets,
        "router_open_streams": now.open_streams,
        "router_kept_streams": now.kept_streams,
        "router_kept_stream_bytes": now.kept_bytes,
        "router_members": now.members,
        "router_stale_members": now.stale_members,
        "router_leases": now.leases,
        "router_prefix_hints": now.prefix_hints,
        "router_store_available": now.store_available,
        "router_unwritten_ends": now.unwritten_ends,
        "router_offered_requests_total": now.offered_requests,
        "router_offered_prompt_tokens_total": now.offered_prompt_tokens,
        "router_ready_prompt_tokens_total": now.ready_prompt_tokens,
        "router_lease_lapses_total": now.lease_lapses,
        "router_store_forgets_total": now.store_forgets,
    }
