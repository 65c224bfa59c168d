"""One prompt on its way through a prefill member."""

from dataclasses import dataclass, field
from enum import Enum

from prefill_svc.messages import Figures, Submit


class Phase(Enum):
    """Where a job is. What its grant may still do is the writer book's business, not this one's."""

    WAITING = "waiting"
    COMPUTING = "computing"
    SENDING = "sending"
    STOPPING = "stopping"


@dataclass(slots=True)
class Job:
    """A job and its progress. Times are monotonic seconds; pages are held by `holder` from its first chunk to its end."""

    submit: Submit
    arrived_at: float
    number: int
    phase: Phase = Phase.WAITING
    computed_tokens: int = 0
    posted_parts: int = 0
    pages: tuple[tuple[int, ...], ...] = ()
    staging_row: int | None = None
    passed_over: int = 0
    started_at: float = 0.0
    first_post_at: float | None = None
    last_chunk_at: float = 0.0
    last_done_at: float = 0.0
    post_s: float = 0.0
    detail: str = ""
    pins: set[int] = field(default_factory=set)

    @property
    def grant_id(self) -> str:
        """The grant it fills."""
        return self.submit.grant_id

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return len(self.submit.prompt_token_ids)

    @property
    def left_tokens(self) -> int:
        """Positions not yet computed."""
        return self.tokens - self.computed_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts jobs: higher priority first, then older first."""
        return (-self.submit.priority, self.number)

    def expired(self, now: float) -> bool:
        """Whether the request's clock has run out."""
        return self.submit.remaining_s is not None and now - self.arrived_at >= self.submit.remaining_s

    def figures(self) -> Figures:
        """What a finished hand-over reports."""
        first_post_at = self.last_chunk_at if self.first_post_at is None else self.first_post_at
        return Figures(
            cached_tokens=0,
            sent_bytes=self.submit.plan.size_bytes,
            queue_s=self.started_at - self.arrived_at,
            compute_s=self.last_chunk_at - self.started_at,
            handover_s=self.last_done_at - first_post_at,
            exposed_s=max(0.0, self.last_done_at - self.last_chunk_at),
            post_s=self.post_s,
        )
