"""The body of the engine thread: take in commands, plan a chunk, run it, send what is complete, publish."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.landing import LandingRows
from engine.runner import ModelError, Runner
from member.inbox import Inbox
from prefill_svc.messages import Command, Output
from prefill_svc.plans import SchedulerStatistics, StepPlan, Transfers
from prefill_svc.scheduler import PrefillScheduler

#: Weight of the newest step in the running figure of tokens per second.
RATE_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step for the metrics: rows and tokens that ran, and its seconds."""

    scheduled_sequences: int
    scheduled_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerPorts:
    """Where the worker's results go; all are called on the engine thread and never block."""

    transfer: Callable[[Transfers], None]
    publish: Callable[[list[Output], SchedulerStatistics], None]
    report: Callable[[StepReport], None]


class PrefillWorker:
    """Owns runner, staging rows and scheduler; `turn` runs on the engine thread only."""

    def __init__(
        self, runner: Runner, staging: LandingRows, scheduler: PrefillScheduler, inbox: Inbox[Command], ports: WorkerPorts
    ) -> None:
        self._runner = runner
        self._staging = staging
        self._scheduler = scheduler
        self._inbox = inbox
        self._ports = ports
        self._told: SchedulerStatistics | None = None
        self.steps = 0
        self.tokens_per_s = 0.0

    def turn(self) -> bool:
        """One turn; True when a step ran, so there may be more to do at once."""
        now = time.monotonic()
        self._scheduler.accept(self._inbox.drain(), now)
        plan = self._scheduler.next_batch(now)
        # What the commands brought is told before the step, not after it: a refusal or a Drain's answer need not wait.
        self._tell()
        if plan is not None:
            self._run(plan, now)
            self._tell()
        return plan is not None

    def _tell(self) -> None:
        transfers = self._scheduler.take_transfers()
        if transfers:
            self._ports.transfer(transfers)
        outputs, statistics = self._scheduler.take_outputs(), self._scheduler.statistics()
        if outputs or statistics != self._told:
            self._told = statistics
            self._ports.publish(outputs, statistics)

    def next_wake(self) -> float | None:
        """When the scheduler has something due although nothing arrives, in monotonic seconds."""
        return self._scheduler.next_wake(time.monotonic())

    def _run(self, plan: StepPlan, started_at: float) -> None:
        try:
            logits = self._runner.run(plan.batch)
        except ModelError as error:
            self._scheduler.fail_step(plan, str(error), time.monotonic())
            return
        rows = [chunk.staging_row for chunk in plan.chunks if chunk.staging_row is not None]
        for row, values in zip(rows, logits, strict=True):
            self._staging.row(row).copy_(values)
        ended_at = time.monotonic()
        self._scheduler.commit(plan, ended_at)
        seconds = ended_at - started_at
        self.steps += 1
        rate = plan.batch.scheduled_tokens / max(seconds, 1e-6)
        self.tokens_per_s = rate if self.steps == 1 else self.tokens_per_s + RATE_WEIGHT * (rate - self.tokens_per_s)
        self._ports.report(StepReport(plan.batch.scheduled_sequences, plan.batch.scheduled_tokens, seconds))
