"""One prompt on its way through a prefill member."""

from dataclasses import dataclass
from enum import Enum

from kv_transfer.grant_writer import Filling
from prefill_svc.messages import Figures, Submit
from prefill_svc.prompt_pages import PromptPages


class Phase(Enum):
    """Where a job is. What its grant may still do is the writer book's business, not this one's."""

    WAITING = "waiting"
    COMPUTING = "computing"
    SENDING = "sending"
    STOPPING = "stopping"


@dataclass(slots=True)
class Job:
    """A job and its progress. Times are monotonic seconds; pages are held from its first chunk to its end."""

    submit: Submit
    filling: Filling
    arrived_at: float
    number: int
    phase: Phase = Phase.WAITING
    computed_tokens: int = 0
    #: Of those, how many were found in the cache.
    cached_tokens: int = 0
    #: Keys of the prompt's full pages, made when it is first looked for pages; the first `indexed` of them are indexed.
    keys: list[bytes] | None = None
    indexed: int = 0
    pages: PromptPages | None = None
    staging_row: int | None = None
    passed_over: int = 0
    started_at: float = 0.0
    last_chunk_at: float = 0.0
    detail: str = ""
    #: It has given back what it held.
    over: bool = False

    @property
    def grant_id(self) -> str:
        """The grant it fills."""
        return self.submit.grant_id

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return len(self.submit.prompt_token_ids)

    @property
    def held(self) -> PromptPages:
        """Its pages, once it computes."""
        assert self.pages is not None, f"the job of grant {self.grant_id} has no pages"
        return self.pages

    @property
    def left_tokens(self) -> int:
        """Positions not yet computed."""
        return self.tokens - self.computed_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts jobs: higher priority first, then older first."""
        return (-self.submit.priority, self.number)

    @property
    def due_at(self) -> float | None:
        """When the request's clock runs out; None without one."""
        return None if self.submit.remaining_s is None else self.arrived_at + self.submit.remaining_s

    @property
    def has_clock(self) -> bool:
        """Whether its clock still ends it: not once everything is computed, or while it stops anyway."""
        return not self.over and self.phase in (Phase.WAITING, Phase.COMPUTING) and self.submit.remaining_s is not None

    def figures(self) -> Figures:
        """What a finished hand-over reports."""
        filling = self.filling
        return Figures(
            cached_tokens=self.cached_tokens,
            sent_bytes=self.submit.plan.size_bytes,
            queue_s=self.started_at - self.arrived_at,
            compute_s=self.last_chunk_at - self.started_at,
            handover_s=filling.seconds,
            exposed_s=max(0.0, filling.last_done_at - self.last_chunk_at),
            post_s=filling.post_s,
        )
