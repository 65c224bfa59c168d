"""The engine thread of a decode member: owner of runner, sampler, landing rows and scheduler. One turn of it is one step."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from decode_svc.masks import MaskTimes, StepMasks
from decode_svc.messages import AskDrain, AskEndpoint, AskFence, Command, PromptScored, PushDrained, SeatEvent
from decode_svc.planning import Plan
from decode_svc.scheduler import Scheduler
from decode_svc.snapshot import Snapshot, take_snapshot
from engine.landing import LandingRows
from engine.log_probs import TokenLogProb, following, log_probs
from engine.page_clones import PageCloner
from engine.page_copy import PageCopy
from engine.prefix_index import PrefixChanges
from engine.runner import ModelError, Runner
from engine.sampler import Sampler
from kv_transfer.grant_writer import Transfers
from member.inbox import Inbox
from rpc import clocks

_LOG = logging.getLogger("decode.worker")

#: While steps follow one another the member's load is told that often, in seconds; when they stop it is told at once.
SNAPSHOT_EVERY_S = 0.1
#: Weight of the newest step in the running figures.
RATE_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where one step's time went, in seconds, and what was scheduled."""

    plan_s: float
    draft_s: float
    model_s: float
    sample_s: float
    commit_s: float
    publish_s: float
    sequences: int
    tokens: int
    prompt_tokens: int
    masks: MaskTimes | None = None

    @property
    def total_s(self) -> float:
        """The whole turn."""
        return self.plan_s + self.draft_s + self.model_s + self.sample_s + self.commit_s + self.publish_s


@dataclass(frozen=True, slots=True)
class Outbox:
    """Everything that one turn has for the event loop: one hop."""

    events: Sequence[SeatEvent]
    drains: Sequence[AskDrain]
    drained: Sequence[PushDrained]
    step: StepTimes | None
    snapshot: Snapshot | None
    prefixes: PrefixChanges = field(default_factory=PrefixChanges)


@dataclass(frozen=True, slots=True)
class Begun:
    """A step that is planned and told, with the monotonic times of its turn's begin and of its plan; drafting took `draft_s`."""

    plan: Plan
    started_at: float
    planned_at: float
    draft_s: float


@dataclass(frozen=True, slots=True)
class Computed:
    """A step that has run. `tokens` None: the model could not run it; they, `log_probs` and `scored` as in Scheduler.commit.
    Times are monotonic. `masks`: None without grammars."""

    begun: Begun
    tokens: Sequence[int | None] | None
    ran_at: float
    sampled_at: float
    masks: MaskTimes | None = None
    log_probs: Sequence[TokenLogProb | None] = ()
    scored: Sequence[PromptScored] = ()


@dataclass(frozen=True, slots=True)
class WorkerPorts:
    """Where a turn's results go. Called on the engine thread; none of them blocks.

    armed: whether notices are expected. push: what the writer's transfer thread is to do. copy_pages: copies to and from host
    pages, to be done on return.
    """

    publish: Callable[[Outbox], None]
    endpoint: Callable[[str], None]
    fence: Callable[[str], None]
    armed: Callable[[bool], None]
    copy_pages: Callable[[Sequence[PageCopy]], None]
    push: Callable[[Transfers], None]


class DecodeWorker:
    """`turn` and `next_wake` are called by the engine thread, nothing else is touched from elsewhere."""

    def __init__(
        self, runner: Runner, landing: LandingRows, scheduler: Scheduler, inbox: Inbox[Command], ports: WorkerPorts
    ) -> None:
        self._runner = runner
        self._sampler = Sampler(runner.vocabulary_size)
        self._masks = StepMasks(clocks.monotonic)
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
        self._drawn_tokens = 0

    def turn(self) -> bool:
        """Take commands in, run a step if there is one, publish; True when a step ran."""
        begun = self.begin()
        if begun is None:
            self._runner.rest()
            return False
        self.settle(self.compute(begun))
        return True

    def begin(self) -> Begun | None:
        """The first third of a turn: commands, plan, and what is told before the step. None when there is no step."""
        started_at = clocks.monotonic()
        commands = self._inbox.drain()
        self._scheduler.accept(commands, started_at)
        plan = self._scheduler.next_batch(started_at)
        # Before anything is told: a page that was swapped out, or cloned, may be in a grant that is. Clones were there first.
        clones = self._scheduler.families.take_clones()
        if clones:
            PageCloner(self._runner.layout, self._runner.slab_data).run(clones)
        copies = self._scheduler.preemption.take_copies()
        if copies:
            copying_at = clocks.monotonic()
            self._ports.copy_pages(copies)
            self._scheduler.preemption.copied(copies, clocks.monotonic() - copying_at)
        stuck = self._scheduler.progress.take_news()
        if stuck:
            _LOG.error("%s", stuck)
        # A turn without a step is there for commands, or because a clock ended something.
        self._dirty = self._dirty or bool(commands) or plan is None
        # What the commands brought, and what clocks ended, is told before the step: a grant need not wait for it.
        self._tell(None, with_load=plan is None or bool(commands))
        if plan is None:
            return None
        told_at = clocks.monotonic()
        self._scheduler.draft(plan)
        planned_at = clocks.monotonic()
        return Begun(plan, started_at, planned_at, planned_at - told_at)

    def compute(self, begun: Begun) -> Computed:
        """The second third: the model runs and the sampler chooses."""
        plan = begun.plan
        self._masks.begin(plan)
        try:
            logits = self._runner.run(plan.batch) if plan.batch is not None else None
        except ModelError as error:
            self._masks.finish(plan)
            now = clocks.monotonic()
            _LOG.error("a step of %d sequences failed: %s", len(plan.seats), error)
            return Computed(begun, None, now, now)
        ran_at = clocks.monotonic()
        masks = self._masks.finish(plan)
        scored: Sequence[PromptScored] = ()
        if logits is not None and plan.batch is not None and any(rows.all_logits for rows in plan.batch.rows):
            logits, scored = _scored(plan, logits)
        tokens, told = self._sample(plan, logits)
        return Computed(begun, tokens, ran_at, clocks.monotonic(), masks, told, scored)

    def settle(self, computed: Computed) -> None:
        """The last third: what arrived while the step ran, then the step's result, then everything is told."""
        begun, plan = computed.begun, computed.begun.plan
        # A cancel seen here throws the step's token away.
        self._scheduler.accept(self._inbox.drain(), computed.sampled_at)
        if computed.tokens is None:
            self._scheduler.fail(plan, computed.sampled_at)
        else:
            self._scheduler.commit(plan, computed.tokens, computed.sampled_at, computed.log_probs, computed.scored)
        ended_at = clocks.monotonic()
        times = self._times(computed, ended_at)
        self._dirty = True
        self._tell(times, with_load=begun.started_at - self._told_at >= SNAPSHOT_EVERY_S)

    def next_wake(self) -> float | None:
        """When a turn is due although nothing arrives, in monotonic seconds."""
        return self._scheduler.next_wake()

    def close(self) -> None:
        """After the last turn."""
        self._masks.close()

    def _sample(self, plan: Plan, logits: torch.Tensor | None) -> tuple[list[int | None], Sequence[TokenLogProb | None]]:
        """One token for each draw and each of its drafts, None where the logits can not be used, and the log-probabilities that
        are wanted."""
        if not plan.draws:
            return [], ()
        if plan.landing_rows:
            landed = self._landing.gather(plan.landing_rows)
            logits = landed if logits is None or logits.shape[0] == 0 else torch.cat((logits, landed))
        assert logits is not None, "tokens are to be drawn and nothing made logits"
        if plan.shared:
            first = {seat.number: drawn.start for seat, drawn in plan.drawn_rows()}
            logits = torch.cat((logits, logits[[first[leader.number] for leader in plan.shared]]))
        rows = [row for seat in plan.draws for row in seat.sequence.sample_rows(plan.drafts_of(seat))]
        tokens = [token if isinstance(token, int) else None for token in self._sampler.choose(logits, rows)]
        tops = [seat.sequence.spec.log_probs for seat, drawn in plan.drawn_rows() for _ in drawn]
        wanted = any(top is not None for top in tops)
        return tokens, log_probs(logits.detach().cpu().numpy(), tokens, tops) if wanted else ()

    def _times(self, computed: Computed, ended_at: float) -> StepTimes:
        begun, ran_at, sampled_at = computed.begun, computed.ran_at, computed.sampled_at
        plan, started_at, planned_at = begun.plan, begun.started_at, begun.planned_at
        self._scheduler.speculation.ran(plan, sampled_at - planned_at, begun.draft_s)
        times = StepTimes(
            plan_s=planned_at - started_at - begun.draft_s,
            draft_s=begun.draft_s,
            model_s=ran_at - planned_at,
            sample_s=sampled_at - ran_at,
            commit_s=ended_at - sampled_at,
            publish_s=self._publish_s,
            sequences=len(plan.seats),
            tokens=plan.scheduled_tokens,
            prompt_tokens=plan.prompt_tokens,
            masks=computed.masks,
        )
        self._scheduler.preemption.cost.stepped(plan.scheduled_tokens, times.model_s)
        self._drawn_tokens += len(plan.draws)
        step_s = ended_at - started_at
        self._step_s = step_s if self._step_s == 0.0 else self._step_s + RATE_WEIGHT * (step_s - self._step_s)
        if plan.prompt_tokens:
            rate = plan.prompt_tokens / max(step_s, 1e-6)
            known = self._prompt_tokens_per_s
            self._prompt_tokens_per_s = rate if known == 0.0 else known + RATE_WEIGHT * (rate - known)
        return times

    def _tell(self, times: StepTimes | None, *, with_load: bool) -> None:
        """Run errands and publish what there is; `with_load`: the load too, if it may have changed."""
        started_at = clocks.monotonic()
        drains, drained = list[AskDrain](), list[PushDrained]()
        for errand in self._scheduler.take_errands():
            if isinstance(errand, AskDrain):
                drains.append(errand)
            elif isinstance(errand, AskEndpoint):
                self._ports.endpoint(errand.writer)
            elif isinstance(errand, AskFence):
                self._ports.fence(errand.writer)
            elif isinstance(errand, PushDrained):
                drained.append(errand)
            else:
                self._ports.push(errand)
        armed = self._scheduler.handovers.open > 0
        if armed is not self._armed:
            self._armed = armed
            self._ports.armed(armed)
        snapshot, prefixes = None, PrefixChanges()
        if self._dirty and with_load:
            snapshot = take_snapshot(self._scheduler, self._step_s, self._prompt_tokens_per_s, self._drawn_tokens)
            prefixes = self._scheduler.memory.prefixes.take_changes()
            self._dirty = False
            self._told_at = started_at
        events = self._scheduler.take_events()
        if events or drains or drained or times is not None or snapshot is not None:
            self._ports.publish(Outbox(events, drains, drained, times, snapshot, prefixes))
        if times is not None:
            self._publish_s = clocks.monotonic() - started_at


def _scored(plan: Plan, logits: torch.Tensor) -> tuple[torch.Tensor, list[PromptScored]]:
    """The rows of logits that tokens are drawn from, and what the others tell of prompts."""
    draws, scored = plan.logit_rows()
    told = []
    for one in scored:
        block = logits[one.first_row : one.first_row + len(one.tokens)].detach().cpu().numpy()
        told.append(PromptScored(one.seat.number, following(block, one.tokens, one.seat.sequence.spec.log_probs or 0)))
    return logits[draws], told
