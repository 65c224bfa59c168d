"""What a decode member measures. Declared once, here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lifecycle.finish import FinishReason
from telemetry import buckets
from telemetry.prefix_metrics import PrefixGauges, prefix_computed, prefix_samples
from telemetry.registry import Computed, MetricsRegistry, Samples

#: Parts of one turn of the engine thread.
STEP_PARTS = ("plan", "draft", "model", "sample", "text", "publish")
#: Why a seat is refused, as in Refused.reason.
REFUSALS = (
    *("draining", "unknown_model", "wrong_incarnation", "no_pages", "no_landing_row", "too_many_sequences", "too_long"),
    *("duplicate_attempt", "inbox_full", "unknown_attempt", "bad_grammar", "grammar_costly", "grammar_busy", "cancelled"),
    *("prefix_gone", "unknown_adapter"),
)
#: How a push of a sequence's KV to another member ends: well, or with a cause of Pushed.
MOVES = (*("pushed", "layout_mismatch", "bad_grant", "queue_full", "revoked", "abandoned", "transfer_failed", "lease_expired"),)
#: Why a write failed.
PUSH_CAUSES = (
    *("peer_gone", "not_registered", "not_connected", "bad_metadata", "connect_failed", "transport_error"),
    *("closed", "stale", "withdrawn", "queue_full"),
)
#: How a grammar is found: compiled already, being compiled, to be compiled, or too many are.
GRAMMAR_LOOKUPS = ("hit", "joined", "miss", "busy")
#: How a compile ends.
GRAMMAR_OUTCOMES = ("ok", "bad", "costly", "cancelled")
#: How grammars are written.
GRAMMAR_KINDS = ("json_schema", "regex", "ebnf", "json_object")
#: Kinds of tokens.
TOKEN_KINDS = ("selected", "returned", "billed")

_REASONS = tuple(reason.value for reason in FinishReason)

_DRAFTS = (
    Computed("decode_draft_tokens_total", "Drafts that were computed, and those accepted.", "outcome", counter=True),
    Computed("decode_drafting_off_sequences", "Sequences that do not draft, because it does not pay."),
    Computed("decode_drafts_total", "Drafts that were computed, by their source.", "source", counter=True),
    Computed("decode_accepted_drafts_total", "Drafts that were accepted, by their source.", "source", counter=True),
    Computed("decode_draft_pages", "KV pages of the draft model that sequences hold."),
)

#: What waits and what KV is taken: charts/tandem/scaling/queries.yaml asks for them.
_SCALED_ON = (
    Computed("decode_waiting_sequences", "Sequences waiting for their pages or a place."),
    Computed("decode_waiting_tokens", "Prompt tokens that are computed here and are not yet."),
    Computed("decode_kv_used_ratio", "Share of KV pages that somebody holds or may write into, 0 to 1."),
    Computed("decode_kv_reserved_ratio", "Share of KV pages that are used or promised: at 1 nobody is admitted."),
)


@dataclass(frozen=True, slots=True)
class DecodeGauges:
    """What a decode member holds now; computed when scraped."""

    running_sequences: float = 0
    paused_sequences: float = 0
    waiting_sequences: float = 0
    waiting_tokens: float = 0
    preempted_sequences: float = 0
    moving_sequences: float = 0
    host_pages: float = 0
    pages: Mapping[str, float] = field(default_factory=dict)  # by state: free, owned, cached, granted, quarantined, pinned
    kv_used_ratio: float = 0  # 0 to 1
    kv_reserved_ratio: float = 0  # 0 to 1
    open_grants: float = 0
    landing_rows: float = 0
    seats: float = 0
    stream_buffer_bytes: float = 0
    slow_readers: float = 0
    seats_held: float = 0
    replay_bytes: float = 0
    receiving_agents: float = 0
    remote_agents: float = 0
    pushes_in_flight: float = 0
    inbox_messages: float = 0
    engine_busy_ratio: float = 0  # 0 to 1, since the start
    grammars: float = 0
    grammar_bytes: float = 0
    # Counts since the start, kept by the engine thread.
    grants: Mapping[str, float] = field(default_factory=dict)  # by outcome: offered, committed, reclaimed, fenced
    stray_notices: Mapping[str, float] = field(default_factory=dict)  # by cause
    silent_drains: float = 0
    fences: float = 0
    preemptions: Mapping[str, float] = field(default_factory=dict)  # by kind: recompute, swap
    swapped_bytes: Mapping[str, float] = field(default_factory=dict)  # by direction: out, back
    dropped_tokens: float = 0
    draft_tokens: Mapping[str, float] = field(default_factory=dict)  # by outcome: drafted, accepted
    drafting_off_sequences: float = 0
    drafted_tokens: Mapping[str, float] = field(default_factory=dict)  # by source: grammar, prompt_lookup, draft_model
    accepted_drafts: Mapping[str, float] = field(default_factory=dict)  # likewise
    draft_pages: float = 0
    cached_tokens: float = 0
    prefix: PrefixGauges = field(default_factory=PrefixGauges)


class DecodeMetrics:
    """A decode member's metrics. Durations in seconds, sizes in bytes."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self.sequences = registry.counter(
            "decode_sequences_total", "Sequences that ended, by finish reason.", {"finish_reason": _REASONS}
        )
        self.refusals = registry.counter("decode_refusals_total", "Seats refused, by reason.", {"reason": REFUSALS})
        self.adoptions = registry.counter("decode_adoptions_total", "Seats that another call took over.")
        self.tokens = registry.counter("decode_tokens_total", "Tokens, by kind.", {"kind": TOKEN_KINDS})
        self.decode = registry.histogram("decode_sequence_seconds", "Commit to the last token.", buckets.PHASE_S)
        self.stop_hold = registry.histogram(
            "decode_stop_hold_seconds", "Longest hold of text for a possible stop, of one sequence.", buckets.PHASE_S
        )
        self._steps(registry)
        self._grants(registry)
        self._moves(registry)
        self._grammars(registry)
        self._model = registry.computed(
            (
                Computed("decode_model_part_seconds_total", "Inside the model, by part of a step.", "part", counter=True),
                Computed("decode_lent_steps_total", "Steps that used threads of members with nothing to compute.", counter=True),
                Computed("decode_recalled_steps_total", "Those of them that gave the threads back before the end.", counter=True),
            )
        )
        self._gauges = registry.computed(
            (
                Computed("decode_running_sequences", "Sequences generating."),
                Computed("decode_paused_sequences", "Sequences paused by back-pressure."),
                Computed("decode_preempted_sequences", "Sequences whose pages were taken and that wait to come back."),
                Computed("decode_moving_sequences", "Sequences that stand still to be moved to another member."),
                Computed("decode_host_pages", "Host pages that preempted sequences hold."),
                Computed("decode_pages", "KV pages by state.", "state"),
                *_SCALED_ON,
                Computed("decode_open_grants", "Grants offered and not yet committed or taken back."),
                Computed("decode_landing_rows", "Landing rows in use."),
                Computed("decode_seats", "Seats open."),
                Computed("decode_stream_buffer_bytes", "Bytes of events not yet taken by routers."),
                Computed("decode_slow_readers", "Seats whose reader is behind."),
                Computed("decode_seats_held", "Seats, and ends of seats, that no call reads and a router may adopt."),
                Computed("decode_replay_bytes", "Output that is kept to be sent again, in bytes."),
                Computed("decode_receiving_agents", "Receiving agents, one a writer's incarnation."),
                Computed("decode_remote_agents", "Receiving agents of other members that sequences move to."),
                Computed("decode_pushes_in_flight", "Writes to other members posted and not yet done."),
                Computed("decode_inbox_messages", "Messages waiting for the engine thread."),
                Computed("decode_engine_busy_ratio", "Share of time that the engine thread was busy since the start."),
                Computed("decode_grammars", "Compiled grammars that are kept."),
                Computed("decode_grammar_bytes", "Their size, in bytes."),
                Computed("decode_grants_total", "Grants, by what became of them.", "outcome", counter=True),
                Computed("decode_stray_notices_total", "Notices that changed nothing, by cause.", "cause", counter=True),
                Computed("decode_silent_drains_total", "Drain calls that their writer did not answer.", counter=True),
                Computed("decode_fences_total", "Writers that were cut off.", counter=True),
                Computed("decode_preemptions_total", "Sequences preempted, by kind.", "kind", counter=True),
                Computed("decode_swapped_bytes_total", "Bytes swapped, by direction.", "direction", counter=True),
                Computed("decode_dropped_tokens_total", "Tokens whose KV was dropped, to be computed again.", counter=True),
                *_DRAFTS,
                Computed(
                    "decode_cached_tokens_total", "Tokens found in the cache: neither sent here nor computed.", counter=True
                ),
                *prefix_computed("decode"),
            )
        )

    def model_from(
        self, part_seconds: Callable[[], Mapping[str, float]], lent_steps: Callable[[], int], recalled_steps: Callable[[], int]
    ) -> None:
        """Set who tells the seconds of each part of the model, steps with more threads, and those that gave them back early;
        called in the scrape's thread."""
        self._model.provide(
            lambda: {
                "decode_model_part_seconds_total": part_seconds(),
                "decode_lent_steps_total": lent_steps(),
                "decode_recalled_steps_total": recalled_steps(),
            }
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

    def _moves(self, registry: MetricsRegistry) -> None:
        self.moves = registry.counter(
            "decode_moves_total", "Pushes of sequences to other members that ended, by outcome.", {"outcome": MOVES}
        )
        self.move = registry.histogram("decode_move_seconds", "First write of a push to the last one done.", buckets.TRANSFER_S)
        self.move_pause = registry.histogram(
            "decode_move_pause_seconds",
            "A sequence that moved away: from its standing still to its end here.",
            buckets.TRANSFER_S,
        )
        self.moved_bytes = registry.counter("decode_moved_bytes_total", "Bytes of pushes that ended well.")
        self.push_failures = registry.counter(
            "decode_push_failures_total", "Writes to other members that failed, by cause.", {"cause": PUSH_CAUSES}
        )

    def _grammars(self, registry: MetricsRegistry) -> None:
        self.grammar_sequences = registry.counter(
            "decode_grammar_sequences_total", "Seats opened with a grammar, by how it is written.", {"kind": GRAMMAR_KINDS}
        )
        self.grammar_lookups = registry.counter(
            "decode_grammar_lookups_total", "Grammars asked for, by how they were found.", {"outcome": GRAMMAR_LOOKUPS}
        )
        self.grammar_compile = registry.histogram(
            "decode_grammar_compile_seconds",
            "Compiling a grammar, waiting for the compiler included.",
            buckets.PHASE_S,
            {"outcome": GRAMMAR_OUTCOMES},
        )
        self.grammar_masks = registry.histogram(
            "decode_grammar_masks_seconds", "Filling the masks of one step, beside the model.", buckets.STEP_S
        )
        self.grammar_wait = registry.histogram(
            "decode_grammar_wait_seconds", "What a step waited for its masks after the model.", buckets.STEP_S
        )
        self.grammar_failures = registry.counter(
            "decode_grammar_failures_total", "Sequences that ended because their grammar allowed no token or gave no mask."
        )


def _samples(now: DecodeGauges) -> Samples:
    return {
        "decode_running_sequences": now.running_sequences,
        "decode_paused_sequences": now.paused_sequences,
        "decode_waiting_sequences": now.waiting_sequences,
        "decode_waiting_tokens": now.waiting_tokens,
        "decode_pages": now.pages,
        "decode_kv_used_ratio": now.kv_used_ratio,
        "decode_kv_reserved_ratio": now.kv_reserved_ratio,
        "decode_open_grants": now.open_grants,
        "decode_landing_rows": now.landing_rows,
        "decode_seats": now.seats,
        "decode_stream_buffer_bytes": now.stream_buffer_bytes,
        "decode_slow_readers": now.slow_readers,
        "decode_seats_held": now.seats_held,
        "decode_replay_bytes": now.replay_bytes,
        "decode_receiving_agents": now.receiving_agents,
        "decode_inbox_messages": now.inbox_messages,
        "decode_engine_busy_ratio": now.engine_busy_ratio,
        "decode_grammars": now.grammars,
        "decode_grammar_bytes": now.grammar_bytes,
        "decode_grants_total": now.grants,
        "decode_stray_notices_total": now.stray_notices,
        "decode_silent_drains_total": now.silent_drains,
        "decode_fences_total": now.fences,
        "decode_preempted_sequences": now.preempted_sequences,
        "decode_moving_sequences": now.moving_sequences,
        "decode_remote_agents": now.remote_agents,
        "decode_pushes_in_flight": now.pushes_in_flight,
        "decode_host_pages": now.host_pages,
        "decode_preemptions_total": now.preemptions,
        "decode_swapped_bytes_total": now.swapped_bytes,
        "decode_dropped_tokens_total": now.dropped_tokens,
        "decode_draft_tokens_total": now.draft_tokens,
        "decode_drafting_off_sequences": now.drafting_off_sequences,
        "decode_drafts_total": now.drafted_tokens,
        "decode_accepted_drafts_total": now.accepted_drafts,
        "decode_draft_pages": now.draft_pages,
        "decode_cached_tokens_total": now.cached_tokens,
        **prefix_samples("decode", now.prefix),
    }
