"""The engine thread of a decode member: owner of runner, sampler, landing rows and scheduler. One turn of it is one step."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from decode_svc.messages import AskDrain, AskEndpoint, AskFence, Command, SeatEvent
from decode_svc.planning import Plan
from decode_svc.scheduler import Scheduler
from decode_svc.snapshot import Snapshot, take_snapshot
from engine.landing import LandingRows
from engine.runner import ModelError, Runner
from engine.sampler import Sampler
from member.inbox import Inbox

_LOG = logging.getLogger("decode.worker")

#: While steps follow one another the member's load is told that often, in seconds; when they stop it is told at once.
SNAPSHOT_EVERY_S = 0.1
#: Weight of the newest step in the running figures.
RATE_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where one step's time went, in seconds, and what was scheduled."""

    plan_s: float
    model_s: float
    sample_s: float
    commit_s: float
    publish_s: float
    sequences: int
    tokens: int
    prompt_tokens: int

    @property
    def total_s(self) -> float:
        """The whole turn."""
        return self.plan_s + self.model_s + self.sample_s + self.commit_s + self.publish_s


@dataclass(frozen=True, slots=True)
class Outbox:
    """Everything that one turn has for the event loop: one hop."""

    events: Sequence[SeatEvent]
    drains: Sequence[AskDrain]
    step: StepTimes | None
    snapshot: Snapshot | None


@dataclass(frozen=True, slots=True)
class WorkerPorts:
    """Where a turn's results go. Called on the engine thread; none of them blocks.

    armed: whether notices are expected.
    """

    publish: Callable[[Outbox], None]
    endpoint: Callable[[str], None]
    fence: Callable[[str], None]
    armed: Callable[[bool], None]


class DecodeWorker:
    """`turn` and `next_wake` are called by the engine thread, nothing else is touched from elsewhere."""

    def __init__(
        self, runner: Runner, landing: LandingRows, scheduler: Scheduler, inbox: Inbox[Command], ports: WorkerPorts
    ) -> None:
        self._runner = runner
        self._sampler = Sampler(runner.vocabulary_size)
        self._landing = landing
        self._scheduler = scheduler
        self._inbox = inbox
        self._ports = ports
        self._armed = False
        self._dirty = True
        self._told_at = 0.0
        self._publish_s = 0.0
        self._step_s = 0.0
        self._prompt_tokens_per_s = 0.0

    def turn(self) -> bool:
        """Take commands in, run a step if there is one, publish; True when a step ran."""
        started_at = time.monotonic()
        commands = self._inbox.drain()
        self._scheduler.accept(commands, started_at)
        plan = self._scheduler.next_batch(started_at)
        self._dirty = self._dirty or bool(commands)
        # What the commands brought, and what clocks ended, is told before the step: a grant need not wait for it.
        self._tell(None, with_load=plan is None or bool(commands))
        if plan is None:
            return False
        times = self._run(plan, started_at)
        self._dirty = True
        self._tell(times, with_load=started_at - self._told_at >= SNAPSHOT_EVERY_S)
        return True

    def next_wake(self) -> float | None:
        """When a turn is due although nothing arrives, in monotonic seconds."""
        return self._scheduler.next_wake()

    def _run(self, plan: Plan, started_at: float) -> StepTimes:
        planned_at = time.monotonic()
        try:
            logits = self._runner.run(plan.batch) if plan.batch is not None else None
        except ModelError as error:
            now = time.monotonic()
            _LOG.error("a step of %d sequences failed: %s", len(plan.seats), error)
            self._scheduler.accept(self._inbox.drain(), now)
            self._scheduler.fail(plan, now)
            return self._times(plan, (started_at, planned_at, now, now, time.monotonic()))
        ran_at = time.monotonic()
        tokens = self._sample(plan, logits)
        sampled_at = time.monotonic()
        # What arrived while the step ran: a cancel seen here throws the step's token away.
        self._scheduler.accept(self._inbox.drain(), sampled_at)
        self._scheduler.commit(plan, tokens, sampled_at)
        return self._times(plan, (started_at, planned_at, ran_at, sampled_at, time.monotonic()))

    def _sample(self, plan: Plan, logits: torch.Tensor | None) -> list[int | None]:
        """One token for each draw; None where the logits can not be used."""
        if not plan.draws:
            return []
        if plan.landing_rows:
            landed = self._landing.gather(plan.landing_rows)
            logits = landed if logits is None or logits.shape[0] == 0 else torch.cat((logits, landed))
        assert logits is not None, "tokens are to be drawn and nothing made logits"
        chosen = self._sampler.choose(logits, [seat.sequence.sample_row() for seat in plan.draws])
        return [token if isinstance(token, int) else None for token in chosen]

    def _times(self, plan: Plan, marks: tuple[float, float, float, float, float]) -> StepTimes:
        started_at, planned_at, ran_at, sampled_at, ended_at = marks
        times = StepTimes(
            plan_s=planned_at - started_at,
            model_s=ran_at - planned_at,
            sample_s=sampled_at - ran_at,
            commit_s=ended_at - sampled_at,
            publish_s=self._publish_s,
            sequences=len(plan.seats),
            tokens=plan.scheduled_tokens,
            prompt_tokens=plan.prompt_tokens,
        )
        step_s = ended_at - started_at
        self._step_s = step_s if self._step_s == 0.0 else self._step_s + RATE_WEIGHT * (step_s - self._step_s)
        if plan.prompt_tokens:
            rate = plan.prompt_tokens / max(step_s, 1e-6)
            known = self._prompt_tokens_per_s
            self._prompt_tokens_per_s = rate if known == 0.0 else known + RATE_WEIGHT * (rate - known)
        return times

    def _tell(self, times: StepTimes | None, *, with_load: bool) -> None:
        """Run errands and publish what there is; `with_load`: the load too, if it may have changed."""
        started_at = time.monotonic()
        drains = []
        for errand in self._scheduler.take_errands():
            if isinstance(errand, AskDrain):
                drains.append(errand)
            elif isinstance(errand, AskEndpoint):
                self._ports.endpoint(errand.writer)
            elif isinstance(errand, AskFence):
                self._ports.fence(errand.writer)
        armed = self._scheduler.handovers.open > 0
        if armed is not self._armed:
            self._armed = armed
            self._ports.armed(armed)
        snapshot = None
        if self._dirty and with_load:
            snapshot = take_snapshot(self._scheduler, self._step_s, self._prompt_tokens_per_s)
            self._dirty = False
            self._told_at = started_at
        events = self._scheduler.take_events()
        if events or drains or times is not None or snapshot is not None:
            self._ports.publish(Outbox(events, drains, times, snapshot))
        if times is not None:
            self._publish_s = time.monotonic() - started_at
