"""The decode member's decisions: who has a seat, who is in the next step, who ends and when. Pure.

A turn is accept → next_batch → (run, sample) → accept → commit → take_events, take_errands. Between next_batch and commit a
command only leaves a mark on a seat; seats end at the step's border, in `next_batch` or `commit`, each exactly once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from decode_svc import admission
from decode_svc.admission import Refusal
from decode_svc.flow import FlowWindow, cost
from decode_svc.handover import Handovers, Offer
from decode_svc.memory import DecodeMemory, NoPages
from decode_svc.messages import (
    Command,
    DrainAnswer,
    DrainAnswered,
    EndAll,
    EndpointMade,
    EndSeat,
    Errand,
    Examine,
    LosePrefill,
    NoticesArrived,
    OpenSeat,
    OutputMade,
    OutputTaken,
    PromptReady,
    SeatEvent,
    SeatGranted,
    SeatRefused,
    StopAdmitting,
    WriterFenced,
)
from decode_svc.planning import Plan, StepLimits, make_plan
from decode_svc.seat_book import SeatBook
from decode_svc.seats import Seat, SeatState
from engine.sequence import Sequence as TokenSequence
from engine.sequence import SequenceSpec
from kv_transfer.grants import Committed
from kv_transfer.grants import Refused as NoticeRefused
from lifecycle.deadlines import Deadlines
from lifecycle.finish import Cause, Ending, FinishReason

_HANDOVER_FAILED = Ending(FinishReason.TRANSPORT_ERROR, Cause.HANDOVER_FAILED)
_PREFILL_LOST = Ending(FinishReason.TRANSPORT_ERROR, Cause.PREFILL_LOST)
_MODEL_FAILED = Ending(FinishReason.MODEL_ERROR, Cause.MODEL_FAILED)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds. `sequences`: seats at once, waiting or running. `stream_bytes`: output of a seat not yet taken at which it pauses.

    release_wait_s: how long an ending waits, in seconds, for its writer's answer, so that it can say what was released.
    """

    sequences: int = 64
    stream_bytes: int = 64 * 1024
    release_wait_s: float = 2.0
    step: StepLimits = field(default_factory=StepLimits)


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the member is, for Watch and for gauges. free_pages: of the shortest group, not promised."""

    free_pages: int
    promised_pages: int
    running: int
    paused: int
    waiting: int
    waiting_tokens: int
    grants_open: int
    draining: bool
    steps: int


class Scheduler:
    """Owner of seats, pages, landing rows and grants. Lives in the engine thread; nobody else touches it."""

    def __init__(
        self,
        limits: SchedulerLimits,
        memory: DecodeMemory,
        handovers: Handovers,
        make_sequence: Callable[[SequenceSpec], TokenSequence],
    ) -> None:
        self.memory = memory
        self.handovers = handovers
        self.seats = SeatBook(memory, handovers, limits.release_wait_s)
        self.steps = 0
        self._limits = limits
        self._make_sequence = make_sequence
        self._draining = False
        self._handlers: dict[type, Callable[..., None]] = {
            OpenSeat: self._open,
            EndSeat: self._end_seat,
            LosePrefill: self._lose_prefill,
            OutputTaken: self._output_taken,
            EndpointMade: self._endpoint_made,
            NoticesArrived: self._notices,
            DrainAnswered: self._drain_answered,
            WriterFenced: self._fenced,
            StopAdmitting: self._stop_admitting,
            EndAll: self._end_all,
            Examine: self._examine,
        }

    # one turn

    def accept(self, commands: Sequence[Command], now: float) -> None:
        """Take commands in. A seat with rows in the running step is only marked."""
        for command in commands:
            self._handlers[type(command)](command, now)

    def next_batch(self, now: float) -> Plan | None:
        """End what is due, then plan the next step; None when nothing can run."""
        for number in self.handovers.reap(now):
            self.seats.mark(number, _HANDOVER_FAILED)
        self.seats.end_due(now)
        plan = make_plan(self.steps + 1, self.seats, self.memory, self._limits.step, now)
        if plan is not None:
            self.steps += 1
        return plan

    def commit(self, plan: Plan, tokens: Sequence[int | None], now: float) -> None:
        """The step has run. `tokens`: one for each of plan.draws, None where the logits were not numbers."""
        if plan.batch is not None:
            for seat, rows in zip(plan.seats, plan.batch.rows, strict=True):
                seat.sequence.completed(len(rows.token_ids))
        for seat, token in zip(plan.draws, tokens, strict=True):
            self._choose(seat, token, now)

    def fail(self, plan: Plan, now: float) -> None:
        """The model could not run the step: its sequences end. Tokens from landing rows are chosen in the next step."""
        for seat in plan.seats:
            seat.ending = seat.ending or _MODEL_FAILED
            self.seats.end(seat, now)

    def take_events(self) -> list[SeatEvent]:
        """What the streams are to be told since the last call, in order."""
        events, self.seats.events = self.seats.events, []
        return events

    def take_errands(self) -> list[Errand]:
        """What others are to do, since the last call."""
        return self.handovers.take_errands()

    def next_wake(self) -> float | None:
        """When the next clock runs out, or something is to be looked after; None when nothing is waited for."""
        times = [seat.due_at for seat in self.seats]
        reap_at = self.handovers.next_wake()
        if reap_at is not None:
            times.append(reap_at)
        return min(times, default=None)

    # opening

    def _open(self, command: OpenSeat, now: float) -> None:
        refusal = self._refusal(command) or self._admit(command, now)
        if refusal is not None:
            self.seats.events.append(SeatRefused(command.seat, refusal.reason, refusal.detail, refusal.retryable))

    def _refusal(self, command: OpenSeat) -> Refusal | None:
        if self._draining:
            return Refusal(admission.DRAINING, "this member is shutting down", True)
        key = command.sequence.key
        if self.seats.has(key):
            return Refusal(admission.DUPLICATE_ATTEMPT, f"attempt {key.attempt} of this request has a seat already", False)
        if len(self.seats) >= self._limits.sequences:
            return Refusal(admission.TOO_MANY_SEQUENCES, f"all {self._limits.sequences} sequences are taken", True)
        tokens = command.sequence.most_cache_tokens
        if not self.memory.fits_ever(tokens):
            return Refusal(
                admission.TOO_LONG, f"{tokens} tokens of KV are needed, this member holds at most {self.memory.most_tokens}", True
            )
        if command.prefill is not None:
            return self._handover_refusal(command.prefill.incarnation)
        return None

    def _handover_refusal(self, writer: str) -> Refusal | None:
        if self.handovers.suspect(writer):
            return Refusal(
                admission.WRONG_INCARNATION, f"prefill incarnation {writer!r} is being cut off: name another prefill member", True
            )
        if self.handovers.full:
            return Refusal(admission.NO_LANDING_ROW, f"all {self.handovers.grants_max} open grants are in use", True)
        if self.memory.landing_rows_used >= self.memory.landing_rows:
            return Refusal(admission.NO_LANDING_ROW, f"all {self.memory.landing_rows} landing rows are held", True)
        return None

    def _admit(self, command: OpenSeat, now: float) -> Refusal | None:
        spec = command.sequence
        try:
            holding = self.memory.promise(f"seat-{command.seat}", spec.most_cache_tokens)
        except NoPages as short:
            return Refusal(admission.NO_PAGES, str(short), True)
        seat = Seat(
            number=command.seat,
            open=command,
            sequence=self._make_sequence(spec),
            holding=holding,
            window=FlowWindow(self._limits.stream_bytes),
            deadlines=Deadlines(command.limits, command.received_at),
            state=SeatState.COMPUTING if command.prefill is None else SeatState.CONNECTING,
            last_turn=self.steps,
        )
        seat.set_clock()
        if command.prefill is None:
            seat.granted_at = now
            self.seats.add(seat)
            self.seats.events.append(SeatGranted(seat.number, None, 0))
            return None
        tokens = len(spec.prompt_token_ids)
        seat.grant_id, offer = self.handovers.reserve(seat.number, spec.key, holding, command.prefill, tokens, now)
        self.seats.add(seat)
        if offer is not None:
            self._announce(offer, now)
        return None

    def _announce(self, offer: Offer, now: float) -> None:
        seat = self.seats.get(offer.seat)
        assert seat is not None, f"grant {offer.grant.grant_id} is offered to seat {offer.seat}, which is gone"
        seat.move(SeatState.OFFERED)
        seat.granted_at = now
        self.seats.events.append(SeatGranted(seat.number, offer.grant, 0))

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

    # hand-over

    def _endpoint_made(self, command: EndpointMade, now: float) -> None:
        if command.endpoint is None:
            for number in self.handovers.endpoint_failed(command.writer):
                self.seats.mark(number, _HANDOVER_FAILED)
            return
        for offer in self.handovers.endpoint_made(command.writer, command.endpoint, now):
            self._announce(offer, now)

    def _notices(self, command: NoticesArrived, now: float) -> None:
        for writer, notice in command.notices:
            number, outcome = self.handovers.arrived(writer, notice, now)
            seat = self.seats.get(number)
            if seat is None:
                continue
            if seat.begun_at is None:
                seat.begun_at = now
            if isinstance(outcome, Committed):
                seat.landing_row = self.handovers.commit(outcome, seat.holding)
                seat.handover_s = outcome.handover_s
                seat.ready_at = now
                seat.sequence.completed(len(seat.sequence.spec.prompt_token_ids))
                seat.move(SeatState.LANDED)
            elif isinstance(outcome, NoticeRefused):
                seat.end_with(_HANDOVER_FAILED)

    def _drain_answered(self, command: DrainAnswered, now: float) -> None:
        freed = self.handovers.drain_answered(command.grant_id, command.answer, now)
        if freed is not None:
            self.seats.grant_reclaimed(freed.seat, freed.pages, now)
        elif command.answer is not DrainAnswer.STOPPED:
            self.seats.grant_set_aside(command.grant_id, now)

    def _fenced(self, command: WriterFenced, now: float) -> None:
        for freed in self.handovers.fenced(command.writer, command.proven, now):
            if freed.lost:
                self.seats.grant_lost(freed.seat, freed.pages, _PREFILL_LOST, now)
            else:
                self.seats.grant_reclaimed(freed.seat, freed.pages, now)

    # tokens

    def _choose(self, seat: Seat, token: int | None, now: float) -> None:
        """What ends the seat comes first and throws the token away; then the order of a token (engine.sequence)."""
        if seat.ending is None and now >= seat.expires_at:
            seat.ending = seat.expired(now)
        if seat.ending is None and token is None:
            seat.ending = _MODEL_FAILED
        if seat.ending is not None or token is None:
            self.seats.end(seat, now)
            return
        if seat.state is not SeatState.RUNNING:
            self._begin(seat, now)
        step = seat.sequence.choose(token, now)
        seat.note_token(now)
        self.seats.events.append(OutputMade(seat.number, (token,), step.text, step.token_ids))
        if step.ending is not None:
            self.seats.ended_by_itself(seat, step.ending, now)
        elif step.text and seat.open.sends_output:
            seat.window.produce(cost(step.text))

    def _begin(self, seat: Seat, now: float) -> None:
        """The first token of a seat is being chosen."""
        if seat.state is SeatState.LANDED:
            self.seats.free_landing_row(seat)
            ready = PromptReady(seat.number, seat.handover_s, 0.0, 0.0)
        else:
            assert seat.begun_at is not None, f"the prompt of seat {seat.number} was computed without a first chunk"
            seat.ready_at = now
            ready = PromptReady(seat.number, 0.0, now - seat.begun_at, seat.begun_at - seat.open.received_at)
        seat.move(SeatState.RUNNING)
        self.seats.events.append(ready)

    # reading

    def load(self) -> Load:
        """How busy the member is."""
        running = paused = waiting = waiting_tokens = 0
        for seat in self.seats:
            if seat.state is SeatState.RUNNING:
                running += 1
                paused += seat.window.paused
            else:
                waiting += 1
                if seat.state is SeatState.COMPUTING:
                    waiting_tokens += len(seat.sequence.spec.prompt_token_ids) - seat.sequence.cache_tokens
        return Load(
            free_pages=self.memory.available(),
            promised_pages=self.memory.promised_pages,
            running=running,
            paused=paused,
            waiting=waiting,
            waiting_tokens=waiting_tokens,
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
            "pages_promised": load.promised_pages,
            "landing_rows_used": self.memory.landing_rows_used,
            "seats": len(self.seats),
            "sequences": load.running,
            "batch_places": load.running,
            "grants_open": load.grants_open,
        }

    def check(self) -> list[str]:
        """Recount everything between two steps; sentences about what does not add up."""
        return [*self.seats.check(), *self.handovers.check()]

    def _examine(self, command: Examine, now: float) -> None:
        command.reply(self.books(), self.check())
