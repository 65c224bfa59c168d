"""One seat of a decode member: where it is, what it holds, when what happened. Pure."""

import math
from dataclasses import dataclass, field
from enum import Enum

from decode_svc.flow import FlowWindow
from decode_svc.memory import Holding
from decode_svc.messages import OpenSeat, SeatReport
from engine.sequence import Sequence
from lifecycle.deadlines import Clock, Deadlines
from lifecycle.finish import Cause, Ending, FinishReason


class SeatState(Enum):
    """Where a seat is."""

    CONNECTING = "connecting"  # pages reserved, the writer's endpoint is being made
    OFFERED = "offered"  # the grant is out, the prompt's KV is on its way
    COMPUTING = "computing"  # the prompt is computed here
    LANDED = "landed"  # the prompt's KV is here, its logits wait in a landing row
    RUNNING = "running"  # tokens are being generated
    RECLAIMING = "reclaiming"  # its ending is fixed, its writer was asked to stop
    ENDED = "ended"


SEAT_EDGES: dict[SeatState, frozenset[SeatState]] = {
    SeatState.CONNECTING: frozenset({SeatState.OFFERED, SeatState.ENDED}),
    SeatState.OFFERED: frozenset({SeatState.LANDED, SeatState.RECLAIMING, SeatState.ENDED}),
    SeatState.COMPUTING: frozenset({SeatState.RUNNING, SeatState.ENDED}),
    SeatState.LANDED: frozenset({SeatState.RUNNING, SeatState.ENDED}),
    SeatState.RUNNING: frozenset({SeatState.ENDED}),
    SeatState.RECLAIMING: frozenset({SeatState.ENDED}),
    SeatState.ENDED: frozenset(),
}


class IllegalSeatMove(Exception):
    """An error of programming: a move that the table has no edge for. Nothing was changed."""


#: Which cause each clock has; the inter-token clock tells its own.
CLOCK_CAUSES = {
    Clock.QUEUE: Cause.QUEUE_DEADLINE,
    Clock.FIRST_TOKEN: Cause.FIRST_TOKEN_DEADLINE,
    Clock.OVERALL: Cause.OVERALL_DEADLINE,
}


@dataclass(slots=True)
class Seat:
    """`ending` is what it must end with at the next step border; once it is set it stays. Times in monotonic seconds.

    begun_at: first part of the hand-over, or first chunk computed here. ready_at: the prompt's KV is whole.
    last_turn: the step that scheduled it last, and the place in it; who waited longest goes first.
    """

    number: int
    open: OpenSeat
    sequence: Sequence
    holding: Holding
    window: FlowWindow
    deadlines: Deadlines
    state: SeatState
    last_turn: float
    grant_id: str = ""
    landing_row: int = 0
    ending: Ending | None = None
    writer_drained: bool = False
    expires_at: float = field(default=math.inf)
    end_by: float = field(default=math.inf)
    cancel_requested_at: float | None = None
    cancel_observed_at: float | None = None
    granted_at: float | None = None
    begun_at: float | None = None
    ready_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    handover_s: float = 0.0
    released: dict[str, int] = field(default_factory=dict)

    def move(self, state: SeatState) -> None:
        """The only writer of `state`. Raises IllegalSeatMove."""
        if state not in SEAT_EDGES[self.state]:
            raise IllegalSeatMove(f"seat {self.number} can not go from {self.state.value} to {state.value}")
        self.state = state

    @property
    def runnable(self) -> bool:
        """Whether its next token may be computed."""
        return self.state is SeatState.RUNNING and not self.window.paused

    @property
    def due_at(self) -> float:
        """When it is to be looked at although nothing happens. What ended by a clock waits for its writer, not for the clock."""
        return self.end_by if self.state is SeatState.RECLAIMING else self.expires_at

    def set_clock(self) -> None:
        """Note when the first of its clocks runs out."""
        due_at = self.deadlines.next_expiry(admitted=True, last_token_at=self.last_token_at)
        self.expires_at = math.inf if due_at is None else due_at

    def expired(self, now: float) -> Ending | None:
        """The ending of the clock that ran out; None when none has."""
        clock = self.deadlines.expired(now, admitted=True, last_token_at=self.last_token_at)
        if clock is None:
            return None
        if clock is Clock.INTER_TOKEN:
            cause = Cause.INTER_TOKEN_BACKPRESSURE if self.window.paused else Cause.INTER_TOKEN_ENGINE
        else:
            cause = CLOCK_CAUSES[clock]
        return Ending(FinishReason.DEADLINE_EXCEEDED, cause)

    def end_with(self, ending: Ending, requested_at: float | None = None) -> bool:
        """Ask for an ending at the next step border; False when one was asked for before."""
        if self.ending is not None or self.state in (SeatState.RECLAIMING, SeatState.ENDED):
            return False
        self.ending = ending
        self.cancel_requested_at = requested_at
        return True

    def note_token(self, now: float) -> None:
        """A token was chosen at `now`."""
        if self.first_token_at is None:
            self.first_token_at = now
            self.last_token_at = now
            self.set_clock()
            return
        self.last_token_at = now
        if self.deadlines.limits.inter_token_s is not None:
            self.set_clock()

    def report(self, now: float, everything_released: bool) -> SeatReport:
        """What is known about it at its end."""
        requested_at = self.cancel_requested_at
        return SeatReport(
            opened_at=self.open.received_at,
            granted_at=self.granted_at,
            begun_at=self.begun_at,
            ready_at=self.ready_at,
            first_token_at=self.first_token_at,
            last_token_at=self.last_token_at,
            ended_at=now,
            stop_hold_s=self.sequence.stop_hold_s,
            held_bytes=self.sequence.held_bytes,
            cancel_requested_at=requested_at,
            cancel_observed_at=self.cancel_observed_at if requested_at is not None else None,
            cancel_effective_at=now if requested_at is not None and everything_released else None,
            prompt_here=self.open.prefill is None,
            released=dict(self.released),
        )
