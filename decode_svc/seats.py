"""One seat of a decode member: where it is, what it holds, when what happened. Pure."""

import math
from dataclasses import dataclass, field
from enum import Enum

from decode_svc.flow import FlowWindow
from decode_svc.kv_place import AWAY, PLACE_EDGES, IllegalKvMove, KvPlace
from decode_svc.memory import DecodeMemory, Holding
from decode_svc.messages import OpenSeat, SeatReport
from engine.sequence import Sequence
from lifecycle.deadlines import Clock, Deadlines
from lifecycle.finish import Cause, Ending, FinishReason


class SeatState(Enum):
    """Where a seat is."""

    CONNECTING = "connecting"  # pages reserved, the writer's endpoint is being made
    OFFERED = "offered"  # the grant is out, the prompt's KV is on its way
    WAITING = "waiting"  # its prompt's KV comes for a sibling, and will be shared
    COMPUTING = "computing"  # the prompt is computed here, or what earlier attempts chose after it
    LANDED = "landed"  # the prompt's KV is here, its logits wait in a landing row
    RUNNING = "running"  # tokens are being generated
    PAUSED = "paused"  # it stands still for good, so that its sequence can be moved
    PUSHING = "pushing"  # the same, and its KV is being written into a grant of another member
    RECLAIMING = "reclaiming"  # its ending is fixed, its writer was asked to stop, or its own writes have to end
    ENDED = "ended"


SEAT_EDGES: dict[SeatState, frozenset[SeatState]] = {
    SeatState.CONNECTING: frozenset({SeatState.OFFERED, SeatState.ENDED}),
    SeatState.OFFERED: frozenset(
        {SeatState.LANDED, SeatState.COMPUTING, SeatState.RUNNING, SeatState.RECLAIMING, SeatState.ENDED}
    ),
    SeatState.WAITING: frozenset({SeatState.LANDED, SeatState.COMPUTING, SeatState.ENDED}),
    SeatState.COMPUTING: frozenset({SeatState.RUNNING, SeatState.PAUSED, SeatState.ENDED}),
    SeatState.LANDED: frozenset({SeatState.RUNNING, SeatState.PAUSED, SeatState.ENDED}),
    SeatState.RUNNING: frozenset({SeatState.PAUSED, SeatState.ENDED}),
    SeatState.PAUSED: frozenset({SeatState.PUSHING, SeatState.ENDED}),
    SeatState.PUSHING: frozenset({SeatState.PAUSED, SeatState.RECLAIMING, SeatState.ENDED}),
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


@dataclass(eq=False, slots=True)
class Family:
    """The seats of several outputs of one prompt. `leader` gets the prompt's KV; `waiting` are those that will share it.

    ready: the first token of any of them is chosen. row_readers: seats that draw their first token from the landing row that the
    prompt's logits are in. ends_later: what the leader ends with as soon as nobody waits for its KV.
    """

    leader: "Seat"
    seats: list["Seat"]
    waiting: list["Seat"]
    ready: bool = False
    row_readers: int = 0
    ends_later: tuple[Ending, float | None] | None = None


@dataclass(slots=True)
class Seat:
    """`ending` is what it must end with at the next step border; once it is set it stays. Times in monotonic seconds.

    begun_at: first part of the hand-over, or first chunk computed here. ready_at: the prompt's KV is whole.
    last_turn: the step that scheduled it last, and the place in it; who waited longest goes first. first_token_at: None also
    when an earlier attempt chose the first token; last_token_at is then that attempt's until one is chosen here.
    missing_tokens: tokens at the end of its cache that are in no page: it was preempted and they are to be computed again.
    preemptions: how often its pages were taken. waited_steps: steps that went by while it was preempted, up to the last
    return. away_since: the step before which it was preempted. passed: seats that came back before it since then.
    paused_at: since when it stands still to be moved. cached_tokens: of what was given, how many were in the prefix cache.
    kept_tokens: at most so many of its first tokens are left in the prefix cache. family: its siblings, when it was opened with
    some.
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
    place: KvPlace = KvPlace.NONE
    missing_tokens: int = 0
    preemptions: int = 0
    waited_steps: int = 0
    away_since: int = 0
    passed: int = 0
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
    paused_at: float | None = None
    cached_tokens: int = 0
    kept_tokens: float = math.inf
    released: dict[str, int] = field(default_factory=dict)
    family: Family | None = field(default=None, compare=False, repr=False)

    def move(self, state: SeatState) -> None:
        """The only writer of `state`. Raises IllegalSeatMove."""
        if state not in SEAT_EDGES[self.state]:
            raise IllegalSeatMove(f"seat {self.number} can not go from {self.state.value} to {state.value}")
        self.state = state

    def put(self, place: KvPlace) -> None:
        """The only writer of `place`. Raises IllegalKvMove."""
        if place not in PLACE_EDGES[self.place]:
            raise IllegalKvMove(f"the KV of seat {self.number} can not go from {self.place.value} to {place.value}")
        self.place = place

    @property
    def away(self) -> bool:
        """Whether it is preempted: it has no pages and is promised none."""
        return self.place in AWAY

    @property
    def whole(self) -> bool:
        """Whether all that its sequence has in the cache is in its pages."""
        return self.place is KvPlace.RESIDENT and not self.missing_tokens

    @property
    def stopped(self) -> bool:
        """Whether it generates and its reader has stopped it."""
        return self.state is SeatState.RUNNING and self.window.paused

    @property
    def pushable(self) -> bool:
        """Whether another member could go on with its pages: all but the last token that was chosen are in them."""
        return self.whole and self.sequence.waiting

    @property
    def leads(self) -> bool:
        """Whether siblings wait for the KV of its prompt."""
        return self.family is not None and self.family.leader is self and bool(self.family.waiting)

    @property
    def runnable(self) -> bool:
        """Whether its next token may be computed."""
        return self.state is SeatState.RUNNING and not self.window.paused and self.whole

    @property
    def paged_tokens(self) -> int:
        """Tokens whose KV is in its pages, or was when they were taken to the host."""
        return self.sequence.cache_tokens - self.missing_tokens

    @property
    def computes(self) -> bool:
        """Whether tokens that it was given, or that it lost, are still to be computed here."""
        unread = self.state is SeatState.COMPUTING and self.sequence.cache_tokens < len(self.sequence.given_token_ids)
        return unread or self.missing_tokens > 0

    def next_chunk(self, most: int) -> tuple[tuple[int, ...], int]:
        """Tokens to compute next, at most `most`, and the position of the first: of what was given, or of what it lost."""
        given, end = self.sequence.given_token_ids, self.sequence.cache_tokens
        if not self.missing_tokens:
            return given[end : end + most], end
        first = end - self.missing_tokens
        return self._known(first, min(first + most, end)), first

    def _known(self, first: int, end: int) -> tuple[int, ...]:
        """Token ids from position `first` to before `end`."""
        given = self.sequence.given_token_ids
        known = given if end <= len(given) else self.sequence.spec.prompt_token_ids + self.sequence.output_token_ids
        return known[first:end]

    def remember(self, memory: DecodeMemory) -> None:
        """At a step's border: the full pages of what it has can be found by others from now on."""
        if self.place is KvPlace.RESIDENT:
            tokens = min(self.kept_tokens, self.sequence.cache_tokens - self.missing_tokens)
            memory.remember(self.holding, int(tokens), self._known)

    def slide(self, memory: DecodeMemory) -> None:
        """At a step's border: pages that left a window go back. They are found as long as nobody needs their room."""
        self.remember(memory)
        memory.slide(self.holding, self.paged_tokens, computed=self.computes)

    def completed(self, n_tokens: int) -> None:
        """A step has put so many tokens into its pages."""
        if self.missing_tokens:
            self.missing_tokens -= n_tokens
            assert self.missing_tokens >= 0, f"seat {self.number} had {n_tokens} tokens computed again, more than it had lost"
        else:
            self.sequence.completed(n_tokens)

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
        if self.last_token_at is None:
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
        earlier = len(self.sequence.spec.earlier.token_ids)
        return SeatReport(
            opened_at=self.open.received_at,
            granted_at=self.granted_at,
            begun_at=self.begun_at,
            ready_at=self.ready_at,
            first_token_at=self.first_token_at,
            last_token_at=self.last_token_at if self.sequence.selected_tokens > earlier else None,
            ended_at=now,
            stop_hold_s=self.sequence.stop_hold_s,
            held_bytes=self.sequence.held_bytes,
            cancel_requested_at=requested_at,
            cancel_observed_at=self.cancel_observed_at if requested_at is not None else None,
            cancel_effective_at=now if requested_at is not None and everything_released else None,
            prompt_here=self.open.prefill is None,
            preemptions=self.preemptions,
            released=dict(self.released),
            paused_at=self.paused_at,
            received_bytes=self.holding.granted_bytes,
        )
