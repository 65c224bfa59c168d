"""Values of the prefill scheduler: its bounds, what it plans, what it tells."""

from dataclasses import dataclass, field

from engine.batch import Batch
from engine.pages import PageCounts
from engine.prefixes import PrefixStatistics


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one prefill member."""

    step_tokens: int = 256
    step_sequences: int = 16
    max_jobs: int = 256
    max_queued_tokens: int = 65_536
    max_pass_over: int = 32
    staging_rows: int = 32
    context_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of a job that one step computes. staging_row: where the last logits go, on the job's last chunk."""

    grant_id: str
    tokens: int
    staging_row: int | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: what the runner computes and what it means for each job, in the same order."""

    batch: Batch
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Gauges, recounted from the jobs. `pushed_bytes`: of all writes that were done. Pages: of the first KV group."""

    waiting_jobs: int
    computing_jobs: int
    sending_jobs: int
    stopping_jobs: int
    waiting_tokens: int
    free_pages: int
    staging_rows_used: int
    pushes_in_flight: int
    pages: PageCounts
    pushed_bytes: int = 0
    prefixes: PrefixStatistics = field(default_factory=PrefixStatistics)

    @property
    def jobs(self) -> int:
        """Jobs that have not ended."""
        return self.waiting_jobs + self.computing_jobs + self.sending_jobs + self.stopping_jobs
