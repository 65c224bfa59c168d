"""The body of the engine thread: take in commands, plan a chunk, run it, send what is complete, publish."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.batch import LayerMarks
from engine.landing import LandingRows
from engine.prefix_index import PrefixChanges
from engine.runner import ModelError, Runner, finite_rows
from kv_transfer.grant_writer import Transfers
from kv_transfer.plan import LAYER_PIECES
from member.inbox import Inbox
from prefill_svc.messages import Command, Output
from prefill_svc.plans import SchedulerStatistics, StepPlan
from prefill_svc.scheduler import PrefillScheduler
from rpc import clocks

#: Weight of the newest step in the running figure of tokens per second.
RATE_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step for the metrics: rows and tokens that ran, and its seconds."""

    scheduled_sequences: int
    scheduled_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Begun:
    """A step that is planned and told. `started_at`: monotonic seconds."""

    plan: StepPlan
    started_at: float


@dataclass(frozen=True, slots=True)
class Computed:
    """A step that has run. `failure` says why the model could not run it. `broken`: jobs whose last logits are no numbers."""

    begun: Begun
    failure: str = ""
    broken: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerPorts:
    """Where the worker's results go; all are called on the engine thread and never block."""

    transfer: Callable[[Transfers], None]
    publish: Callable[[list[Output], SchedulerStatistics, PrefixChanges], None]
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
        self._layers = max(group.layers for group in runner.layout.groups)
        # Several groups end their layers at different times of a step; then the step's end is waited for.
        pieces = LAYER_PIECES if len(runner.layout.groups) == 1 else 0
        self._marks = tuple(sorted({-(-self._layers * piece // pieces) for piece in range(1, pieces + 1)}))
        self.steps = 0
        self.tokens_per_s = 0.0
        self.computed_tokens = 0

    def turn(self) -> bool:
        """One turn; True when a step ran, so there may be more to do at once."""
        begun = self.begin()
        if begun is None:
            self._runner.rest()
            return False
        self.settle(self.compute(begun))
        return True

    def begin(self) -> Begun | None:
        """The first third of a turn: commands, plan, and what is told before the step. None when there is no step."""
        now = clocks.monotonic()
        self._scheduler.accept(self._inbox.drain(), now)
        plan = self._scheduler.next_batch(now)
        # What the commands brought is told before the step, not after it: a refusal or a Drain's answer need not wait.
        self._tell()
        return None if plan is None else Begun(plan, now)

    def compute(self, begun: Begun) -> Computed:
        """The second third: the model runs, last logits are staged."""
        plan = begun.plan
        try:
            logits = self._runner.run(plan.batch, LayerMarks(self._marks, lambda layers: self._layers_done(plan, layers)))
        except ModelError as error:
            return Computed(begun, str(error) or type(error).__name__)
        last = [(chunk.grant_id, chunk.staging_row) for chunk in plan.chunks if chunk.staging_row is not None]
        for (_, row), values in zip(last, logits, strict=True):
            self._staging.row(row).copy_(values)
        finite = finite_rows(logits)
        return Computed(begun, broken=tuple(one for (one, _), good in zip(last, finite, strict=True) if not good))

    def settle(self, computed: Computed) -> None:
        """The last third: the step's result, and what it brings is told."""
        plan, started_at, ended_at = computed.begun.plan, computed.begun.started_at, clocks.monotonic()
        if computed.failure:
            self._scheduler.fail_step(plan, computed.failure)
        else:
            self._scheduler.commit(plan, ended_at)
            self._scheduler.distrust(computed.broken)
            # A Drain that came meanwhile is answered now: after more writes it would wait for the next step, of other prompts.
            self._scheduler.accept(self._inbox.drain(), ended_at)
            self._scheduler.send(plan, ended_at)
            self._note(plan, ended_at - started_at)
        self._tell()

    def _layers_done(self, plan: StepPlan, layers: int) -> None:
        """Called inside a step: what it has finished is on its way while it goes on."""
        self._scheduler.layers_done(plan, layers, self._layers, clocks.monotonic())
        self._transfer()

    def _transfer(self) -> None:
        transfers = self._scheduler.take_transfers()
        if transfers:
            self._ports.transfer(transfers)

    def _tell(self) -> None:
        self._transfer()
        outputs, statistics = self._scheduler.take_outputs(), self._scheduler.statistics()
        if outputs or statistics != self._told:
            self._told = statistics
            self._ports.publish(outputs, statistics, self._scheduler.prefixes.take_changes())

    def next_wake(self) -> float | None:
        """When the scheduler has something due although nothing arrives, in monotonic seconds."""
        return self._scheduler.next_wake(clocks.monotonic())

    def _note(self, plan: StepPlan, seconds: float) -> None:
        self.steps += 1
        self.computed_tokens += plan.batch.scheduled_tokens
        rate = plan.batch.scheduled_tokens / max(seconds, 1e-6)
        self.tokens_per_s = rate if self.steps == 1 else self.tokens_per_s + RATE_WEIGHT * (rate - self.tokens_per_s)
        self._ports.report(StepReport(plan.batch.scheduled_sequences, plan.batch.scheduled_tokens, seconds))
