"""The decode member's decisions: who has a seat, who is in the next step, who ends and when. Pure.

A turn is accept → next_batch → (run, sample) → accept → commit → take_events, take_errands. Between next_batch and commit a
command only leaves a mark on a seat; seats end at the step's border, in `next_batch` or `commit`, each exactly once.
"""

from collections.abc import Callable, Sequence
from functools import partial

from decode_svc import admission
from decode_svc.admission import Refusal
from decode_svc.arrivals import Arrivals
from decode_svc.draft_model import ModelDrafts
from decode_svc.drafts import DraftSource
from decode_svc.families import Families
from decode_svc.flow import cost, log_probs_of
from decode_svc.handover import Handovers
from decode_svc.load import Load
from decode_svc.memory import DecodeMemory
from decode_svc.messages import (
    Command,
    EndAll,
    EndSeat,
    Errand,
    Examine,
    LosePrefill,
    OpenSeat,
    OutputMade,
    OutputTaken,
    PromptReady,
    PromptScored,
    SeatEvent,
    SeatRefused,
    StopAdmitting,
)
from decode_svc.moving import Moves
from decode_svc.planning import Plan, make_plan
from decode_svc.preemption import Preemption
from decode_svc.progress import Progress
from decode_svc.pushing import Pushes
from decode_svc.scheduler_limits import SchedulerLimits
from decode_svc.seat_book import SeatBook
from decode_svc.seating import Seating
from decode_svc.seats import Seat, SeatState
from decode_svc.speculation import Speculation
from engine.log_probs import TokenLogProb
from engine.sequence import Sequence as TokenSequence
from engine.sequence import SequenceSpec
from lifecycle.finish import Cause, Ending, FinishReason

_HANDOVER_FAILED = Ending(FinishReason.TRANSPORT_ERROR, Cause.HANDOVER_FAILED)
#: Standing still, to be moved.
_LEAVING = frozenset({SeatState.PAUSED, SeatState.PUSHING})

_MODEL_FAILED = Ending(FinishReason.MODEL_ERROR, Cause.MODEL_FAILED)


_DRAINS = Refusal(admission.DRAINING, "this member is shutting down", True)


class Scheduler:
    """Owner of seats, pages, landing rows and grants. Lives in the engine thread; nobody else touches it."""

    def __init__(
        self,
        limits: SchedulerLimits,
        memory: DecodeMemory,
        handovers: Handovers,
        make_sequence: Callable[[SequenceSpec], TokenSequence],
        drafts: DraftSource | None = None,
        draft_model: ModelDrafts | None = None,
    ) -> None:
        """`drafts`: where they come from; None leaves it to limits.speculation, which may want `draft_model`."""
        if memory.windowed and memory.step_tokens < limits.step.tokens:
            raise ValueError(
                f"memory is made for steps of {memory.step_tokens} tokens; the limit of a step is {limits.step.tokens}"
            )
        self.memory = memory
        self.handovers = handovers
        self.pushes = Pushes(memory.pools)
        self.seats = SeatBook(memory, handovers, self.pushes, limits.release_wait_s)
        self.preemption = Preemption(limits.pressure, memory, self.seats)
        self.speculation = Speculation(limits.speculation, memory, drafts, draft_model)
        self.progress = Progress()
        self.steps = 0
        self.families = Families(memory, self.seats)
        self._arrivals = Arrivals(self.seats, handovers, memory, self.families)
        self._seating = Seating(limits, handovers, self.preemption, self._arrivals, make_sequence)
        self._moves = Moves(self.seats, self.pushes)
        self._limits = limits
        self._draining = False
        self._handlers: dict[type, Callable[..., None]] = {
            OpenSeat: self._open,
            EndSeat: self._end_seat,
            LosePrefill: self._lose_prefill,
            OutputTaken: self._output_taken,
            StopAdmitting: self._stop_admitting,
            EndAll: self._end_all,
            Examine: self._examine,
            **self._arrivals.handlers(),
            **self.families.handlers(),
            **self._moves.handlers(),
        }

    # one turn

    def accept(self, commands: Sequence[Command], now: float) -> None:
        """Take commands in. A seat with rows in the running step is only marked."""
        self._moves.heard(now)
        for command in commands:
            self._handlers[type(command)](command, now)

    def next_batch(self, now: float) -> Plan | None:
        """End what is due, then plan the next step; None when nothing can run."""
        for number in self.handovers.reap(now):
            self.seats.mark(number, _HANDOVER_FAILED)
        self.seats.end_due(now)
        self._moves.border(now)
        # The second round is for a seat that gave itself up in the first: what it left may do for one that waits.
        plan = self._plan(now) or (self._plan(now) if self.preemption.away else None)
        self.speculation.let_go()
        if plan is not None:
            self.steps += 1
        held_up = plan is not None or self.handovers.open or any(seat.state in _LEAVING for seat in self.seats)
        self.progress.note(0 if held_up else self._could_go_on(), now)
        return plan

    def _plan(self, now: float) -> Plan | None:
        self.preemption.come_back(self.steps + 1)
        return make_plan(self.steps + 1, self.seats, self.memory, self.preemption, self._limits.step, now)

    def _could_go_on(self) -> int:
        return sum(not seat.stopped and seat.state is not SeatState.RECLAIMING for seat in self.seats)

    def draft(self, plan: Plan) -> None:
        """Put drafts behind the rows of a plan that is about to be run, where they pay."""
        self.speculation.add_drafts(plan, self._limits.step.tokens)

    def commit(
        self,
        plan: Plan,
        tokens: Sequence[int | None],
        now: float,
        log_probs: Sequence[TokenLogProb | None] = (),
        scored: Sequence[PromptScored] = (),
    ) -> None:
        """The step has run. `tokens`: one for each of plan.draws and then for each of its drafts, None where the logits were not
        numbers; `log_probs`: likewise, None where none are wanted; empty when nobody wants any. `scored`: as told of prompts."""
        self.seats.events += scored
        if plan.batch is not None:
            for seat, rows in zip(plan.seats, plan.batch.rows, strict=True):
                seat.completed(len(rows.token_ids) - rows.draft_tokens)
                self.families.computed(seat)
                if seat.state is SeatState.COMPUTING:
                    seat.remember(self.memory)
                if self.memory.windowed:
                    seat.slide(self.memory)
        told = log_probs or [None] * len(tokens)
        for seat, drawn in plan.drawn_rows():
            mine = tokens[drawn.start : drawn.stop]
            self._choose(seat, mine[0], now, told[drawn.start])
            if len(mine) > 1:
                following = [partial(self._choose, seat, tokens[row], now, told[row]) for row in drawn[1:]]
                self.speculation.accept(seat, plan.drafts_of(seat), mine[:-1], following)
        self.speculation.let_go()

    def fail(self, plan: Plan, now: float) -> None:
        """The model could not run the step: its sequences end. Tokens from landing rows are chosen in the next step."""
        for seat in plan.seats:
            seat.ending = seat.ending or _MODEL_FAILED
            self.seats.end(seat, now)
        self.speculation.let_go()

    def take_events(self) -> list[SeatEvent]:
        """What the streams are to be told since the last call, in order."""
        events, self.seats.events = self.seats.events, []
        return events

    def take_errands(self) -> list[Errand]:
        """What others are to do, since the last call."""
        return [*self.handovers.take_errands(), *self.pushes.take_errands()]

    def next_wake(self) -> float | None:
        """When the next clock runs out, or something is to be looked after; None when nothing is waited for."""
        times = [seat.due_at for seat in self.seats]
        reap_at = self.handovers.next_wake()
        times += [at for at in (reap_at, self.progress.due_at) if at is not None]
        return min(times, default=None)

    # opening

    def _open(self, command: OpenSeat, now: float) -> None:
        refusal = _DRAINS if self._draining else self._seating.open(command, self.steps, now)
        if refusal is not None:
            self.seats.events.append(SeatRefused(command.seat, refusal.reason, refusal.detail, refusal.retryable))

    # commands about a seat; one that is gone had ended before the command came, which is normal

    def _end_seat(self, command: EndSeat, now: float) -> None:
        self.seats.mark(command.seat, command.ending, command.requested_at)

    def _lose_prefill(self, command: LosePrefill, now: float) -> None:
        seat = self.seats.get(command.seat)
        if seat is None or seat.state not in (SeatState.CONNECTING, SeatState.OFFERED):
            return
        seat.writer_drained = command.drained
        seat.end_with(Ending(FinishReason.TRANSPORT_ERROR, command.cause))

    def _output_taken(self, command: OutputTaken, now: float) -> None:
        seat = self.seats.get(command.seat)
        if seat is not None:
            seat.window.take(command.amount_bytes)

    def _end_all(self, command: EndAll, now: float) -> None:
        self._draining = True
        for seat in self.seats:
            if not seat.end_with(command.ending):
                seat.end_by = min(seat.end_by, now)

    def _stop_admitting(self, command: StopAdmitting, now: float) -> None:
        self._draining = True

    # tokens

    def _choose(self, seat: Seat, token: int | None, now: float, log_prob: TokenLogProb | None) -> None:
        """What ends the seat comes first and throws the token away; then the order of a token (engine.sequence)."""
        if seat.ending is None and now >= seat.expires_at:
            seat.ending = seat.expired(now)
        if token is None:
            self.memory.distrust(seat.holding)
            seat.ending = seat.ending or _MODEL_FAILED
        if seat.ending is not None or token is None:
            self.seats.end(seat, now)
            return
        if seat.state is not SeatState.RUNNING:
            self._begin(seat, now)
        step = seat.sequence.choose(token, now)
        seat.note_token(now)
        told = () if log_prob is None else (log_prob,)
        self.seats.events.append(OutputMade(seat.number, (token,), step.text, step.token_ids, told))
        if step.ending is not None:
            self.preemption.ended(seat.sequence, step.ending)
            self.seats.ended_by_itself(seat, step.ending, now)
        elif step.text and seat.open.sends_output:
            top = seat.sequence.spec.log_probs
            seat.window.produce(cost(step.text, log_probs_of(len(step.token_ids), top)))

    def _begin(self, seat: Seat, now: float) -> None:
        """The first token of a seat is being chosen."""
        if seat.state is SeatState.LANDED:
            self.seats.free_landing_row(seat)
        if seat.open.prefill is not None:
            ready = PromptReady(seat.number, seat.handover_s, 0.0, 0.0, seat.holding.granted_bytes)
        else:
            assert seat.begun_at is not None, f"the prompt of seat {seat.number} was computed without a first chunk"
            seat.ready_at = now
            ready = PromptReady(seat.number, 0.0, now - seat.begun_at, seat.begun_at - seat.open.received_at)
        seat.move(SeatState.RUNNING)
        if seat.family is not None:
            if seat.family.ready:
                return
            seat.family.ready = True
        self.seats.events.append(ready)

    # reading

    def load(self) -> Load:
        """How busy the member is."""
        running = paused = waiting = waiting_tokens = preempted = moving = 0
        for seat in self.seats:
            if seat.state in _LEAVING:
                moving += 1
            elif seat.away:
                preempted += 1
            elif seat.state is SeatState.RUNNING:
                running += 1
                paused += seat.window.paused
            else:
                waiting += 1
                if seat.state is SeatState.COMPUTING:
                    waiting_tokens += len(seat.sequence.given_token_ids) - seat.sequence.cache_tokens
        return Load(
            free_pages=max(0, self.memory.available() - self.preemption.wanted_pages()),
            promised_pages=self.memory.promised_pages,
            running=running,
            paused=paused,
            waiting=waiting,
            waiting_tokens=waiting_tokens,
            preempted=preempted,
            moving=moving,
            expected_output_tokens=self.preemption.expected_output_tokens,
            grants_open=self.handovers.open,
            draining=self._draining,
            steps=self.steps,
        )

    def books(self) -> dict[str, int]:
        """What is held, by name."""
        counts, load = self.memory.counts(), self.load()
        return {
            "pages_total": counts.total,
            "pages_free": counts.free,
            "pages_owned": counts.owned,
            "pages_cached": counts.cached,
            "pages_granted": counts.granted,
            "pages_quarantined": counts.quarantined,
            "pages_pinned": counts.pinned,
            "pages_promised": load.promised_pages,
            "host_pages_used": self.memory.host.used,
            "landing_rows_used": self.memory.landing_rows_used,
            "seats": len(self.seats),
            "sequences": load.running + load.preempted + load.moving,
            "batch_places": load.running,
            "grants_open": load.grants_open,
            "pushes_open": self.pushes.open,
            "pushes_in_flight": self.pushes.in_flight,
            "drains_waiting": self.pushes.drains_waiting,
            "draft_pages_used": self.speculation.model_pages,
            "draft_sequences": self.speculation.model_sequences,
        }

    def check(self) -> list[str]:
        """Recount everything between two steps; sentences about what does not add up."""
        stuck = [self.progress.fault] if self.progress.fault else []
        parts = (self.seats, self.handovers, self.pushes, self.preemption, self.speculation)
        return [*(fault for part in parts for fault in part.check()), *stuck]

    def _examine(self, command: Examine, now: float) -> None:
        self.progress.look(now)
        command.reply(self.books(), self.check())
