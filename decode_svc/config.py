"""Settings of a decode member."""

from typing import Annotated

from decode_svc.handover import HandoverLimits
from decode_svc.planning import StepLimits
from decode_svc.scheduler import SchedulerLimits
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

    def scheduler_limits(self) -> SchedulerLimits:
        """The scheduler's bounds."""
        return SchedulerLimits(
            sequences=self.max_sequences,
            stream_bytes=self.stream_bytes,
            release_wait_s=self.release_wait_s,
            step=StepLimits(self.max_step_tokens, self.step_sequences, self.step_prompts),
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
