"""Settings of a prefill member."""

from typing import Annotated

from member.config import MemberSettings
from prefill_svc.plans import SchedulerLimits
from rpc.settings import setting


class PrefillSettings(MemberSettings, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A prefill member: its queue, its steps and its staging rows."""

    max_step_tokens: Annotated[int, setting("Most prompt tokens in one step.", "tokens", ge=1, le=1_000_000)] = 256
    max_sequences: Annotated[int, setting("Most prompts in one step.", ge=1, le=100_000)] = 16
    max_jobs: Annotated[int, setting("Most prompts here at once; more are refused.", ge=1, le=100_000)] = 256
    max_queued_tokens: Annotated[
        int, setting("Most prompt tokens that wait; a prompt beyond them is refused.", "tokens", ge=1, le=100_000_000)
    ] = 65_536
    max_pass_over: Annotated[
        int, setting("How often a prompt that finds no pages may be passed by later ones.", ge=0, le=100_000)
    ] = 32
    staging_rows: Annotated[int, setting("Rows for last logits that are being sent.", "rows", ge=1, le=65_536)] = 32

    def scheduler_limits(self, context_tokens: int) -> SchedulerLimits:
        """The scheduler's bounds for a model of so many tokens of context."""
        return SchedulerLimits(
            step_tokens=self.max_step_tokens,
            step_sequences=self.max_sequences,
            max_jobs=self.max_jobs,
            max_queued_tokens=self.max_queued_tokens,
            max_pass_over=self.max_pass_over,
            staging_rows=self.staging_rows,
            context_tokens=context_tokens,
        )
