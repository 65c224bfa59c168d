"""Settings of a decode member."""

from typing import Annotated, Literal

from decode_svc.grammar_compiler import CompileLimits
from decode_svc.grammars import GrammarLimits
from decode_svc.handover import HandoverLimits
from decode_svc.planning import StepLimits
from decode_svc.preemption import PreemptionKind, PressureLimits, Reservation
from decode_svc.scheduler_limits import SchedulerLimits
from decode_svc.speculation import SpeculationKind, SpeculationLimits
from decode_svc.streams import StreamLimits
from engine.prompt_lookup import LookupLimits
from member.config import MemberSettings
from rpc.settings import setting


class DecodeSettings(MemberSettings, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A decode member: its seats, its steps, its streams, its grants. `max_sequences`: seats, waiting or running."""

    computes_prompts: Annotated[bool, setting("Compute prompts here when a request names no prefill member.")] = True
    step_sequences: Annotated[int, setting("Most sequences that get a token in one step.", ge=1, le=4096)] = 32
    step_prompts: Annotated[int, setting("Most prompts of which a chunk is computed in one step.", ge=1, le=4096)] = 4
    stream_bytes: Annotated[
        int, setting("Output not taken by its reader at which a sequence pauses.", "bytes", ge=256, le=64 * 1024 * 1024)
    ] = 64 * 1024
    coalesce_bytes: Annotated[
        int,
        setting(
            "The same for a request that wants what waits merged (SLOW_READER_COALESCE).", "bytes", ge=256, le=2 * 1024 * 1024
        ),
    ] = 1024 * 1024
    hold_most_s: Annotated[
        float, setting("Longest time that a seat outlives its stream, for a router to adopt it.", "seconds", ge=0, le=600)
    ] = 30.0
    replay_bytes: Annotated[
        int, setting("Output of a seat that is kept to be sent again.", "bytes", ge=0, le=64 * 1024 * 1024)
    ] = 256 * 1024
    replay_total_bytes: Annotated[int, setting("The same, of all seats together.", "bytes", ge=0, le=16 * 1024 * 1024 * 1024)] = (
        64 * 1024 * 1024
    )
    linger_s: Annotated[
        float, setting("How long an ended stream waits for its reader to take the end.", "seconds", gt=0, le=600)
    ] = 10.0
    landing_rows: Annotated[int, setting("Rows for the logits of prompts that are handed over.", "rows", ge=1, le=65_536)] = 64
    max_open_grants: Annotated[int, setting("Most grants open at once, those being taken back included.", ge=1, le=4096)] = 256
    grant_expires_s: Annotated[
        float, setting("A grant whose writer shows no sign of life for that long is asked back.", "seconds", gt=0, le=3600)
    ] = 30.0
    grant_start_s: Annotated[
        float, setting("Before its first part arrives a grant may wait that long in prefill's queue.", "seconds", ge=0, le=3600)
    ] = 300.0
    drain_call_s: Annotated[float, setting("Time-out of one Drain call.", "seconds", gt=0, le=60)] = 2.0
    drain_retry_s: Annotated[
        float, setting("Wait before a silent writer is asked again, doubled each time.", "seconds", gt=0, le=60)
    ] = 0.25
    drain_tries: Annotated[int, setting("Silent tries after which a writer is fenced.", ge=1, le=100)] = 3
    reservation: Annotated[
        Literal["full", "expected"],
        setting("What a sequence is promised beyond its prompt: all of max_output_tokens, or as much output as others had."),
    ] = "full"
    expected_quantile: Annotated[
        float, setting("Share of the last outputs that were no longer than what is expected of the next.", gt=0, le=1)
    ] = 0.8
    expected_margin: Annotated[float, setting("Put on top of the expected output, as a share of it.", ge=0, le=10)] = 0.1
    preemption: Annotated[
        Literal["recompute", "swap", "cheaper"],
        setting(
            "What becomes of pages that are taken from a sequence: computed again, kept on the host while it has room, "
            "or whichever of these is quicker by what was measured."
        ),
    ] = "cheaper"
    swap_pages: Annotated[
        int, setting("Host pages for preempted sequences, in each KV group.", "pages", ge=1, le=100_000_000)
    ] = 256
    speculation: Annotated[
        Literal["off", "prompt_lookup", "draft_model", "both"],
        setting(
            "Where drafts of the next tokens come from, to be checked in one step: from the text before, from draft_model, from "
            "the model where the text has none (both), or there are none. With any of these a JSON schema drafts what it forces."
        ),
    ] = "off"
    draft_model: Annotated[
        str,
        setting(
            "A small model that drafts, with the same vocabulary as the model: a name, a folder, a GGUF file, or a hub id.",
            max_length=4096,
        ),
    ] = ""
    draft_pages: Annotated[
        int,
        setting("KV pages of draft_model, of each group of its layers, the null page included.", "pages", ge=2, le=100_000_000),
    ] = 1024
    draft_step_tokens: Annotated[
        int, setting("Most tokens of texts that draft_model reads before one step.", "tokens", ge=1, le=1_000_000)
    ] = 128
    draft_tokens: Annotated[int, setting("Most drafts of one sequence in one step.", "tokens", ge=1, le=64)] = 8
    lookup_shortest: Annotated[
        int, setting("Last tokens that must have stood together before, for what followed to be a draft.", "tokens", ge=1, le=16)
    ] = 2
    lookup_longest: Annotated[int, setting("Last tokens of which more in common are not better.", "tokens", ge=1, le=16)] = 5
    grammar_entries: Annotated[int, setting("Compiled grammars that are kept.", ge=1, le=100_000)] = 256
    grammar_kept_bytes: Annotated[int, setting("The same, their size.", "bytes", ge=1024 * 1024, le=64 * 1024 * 1024 * 1024)] = (
        256 * 1024 * 1024
    )
    grammar_waiting: Annotated[int, setting("Grammars that are compiled or wait for it; more are refused.", ge=1, le=4096)] = 16
    grammar_compile_s: Annotated[float, setting("Longest time to compile one grammar.", "seconds", gt=0, le=60)] = 3.0
    grammar_memory_bytes: Annotated[
        int,
        setting("Address space of the process that compiles.", "bytes", ge=256 * 1024 * 1024, le=256 * 1024 * 1024 * 1024),
    ] = 2 * 1024 * 1024 * 1024
    grammar_compiled_bytes: Annotated[int, setting("Largest compiled grammar.", "bytes", ge=64 * 1024, le=1024 * 1024 * 1024)] = (
        64 * 1024 * 1024
    )
    prefix_generated: Annotated[
        bool, setting("With prefix_cache: keep pages of generated tokens too, so that the next turn of a chat finds them.")
    ] = True
    release_wait_s: Annotated[
        float, setting("How long the end of a request waits for the writer of its pages.", "seconds", ge=0, le=60)
    ] = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_step_tokens <= self.step_sequences:
            raise ValueError(
                f"max_step_tokens is {self.max_step_tokens}; so that prompts go on it must be above "
                f"step_sequences, {self.step_sequences}"
            )
        asks_model = self.speculation_limits().kind.asks_model
        if asks_model and not self.draft_model:
            raise ValueError(f"speculation is {self.speculation}, and draft_model is not set")
        if self.draft_model and not asks_model:
            raise ValueError(
                f"draft_model is {self.draft_model}, and speculation is {self.speculation}; only draft_model and both use it"
            )

    def scheduler_limits(self) -> SchedulerLimits:
        """The scheduler's bounds."""
        return SchedulerLimits(
            sequences=self.max_sequences,
            stream_bytes=self.stream_bytes,
            coalesce_bytes=self.coalesce_bytes,
            release_wait_s=self.release_wait_s,
            keep_generated=self.prefix_generated,
            step=StepLimits(self.max_step_tokens, self.step_sequences, self.step_prompts),
            pressure=PressureLimits(
                Reservation(self.reservation),
                None if self.preemption == "cheaper" else PreemptionKind(self.preemption),
                self.expected_quantile,
                self.expected_margin,
            ),
            speculation=self.speculation_limits(),
        )

    def speculation_limits(self) -> SpeculationLimits:
        """What is drafted. Raises ValueError for lengths that do not fit each other."""
        lookup = LookupLimits(self.lookup_shortest, self.lookup_longest)
        return SpeculationLimits(SpeculationKind(self.speculation), self.draft_tokens, lookup)

    @property
    def host_pages(self) -> int:
        """Host pages of each KV group; 0 where nothing is ever swapped."""
        return self.swap_pages if self.reservation == "expected" and self.preemption != "recompute" else 0

    def stream_limits(self) -> StreamLimits:
        """The bounds of streams."""
        return StreamLimits(
            windows=self.scheduler_limits().windows,
            hold_most_s=self.hold_most_s,
            held_most=self.max_sequences,
            replay_bytes=self.replay_bytes,
            replay_total_bytes=self.replay_total_bytes,
        )

    def grammar_limits(self) -> GrammarLimits:
        """The bounds of grammars."""
        return GrammarLimits(
            entries=self.grammar_entries,
            kept_bytes=self.grammar_kept_bytes,
            waiting=self.grammar_waiting,
            compile=CompileLimits(self.grammar_compile_s, self.grammar_memory_bytes, self.grammar_compiled_bytes),
        )

    def handover_limits(self) -> HandoverLimits:
        """The bounds and durations of grants."""
        return HandoverLimits(
            grants_max=self.max_open_grants,
            expires_s=self.grant_expires_s,
            start_s=self.grant_start_s,
            retry_s=self.drain_retry_s,
            tries_before_fence=self.drain_tries,
        )
