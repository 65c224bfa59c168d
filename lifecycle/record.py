"""The record of one request: the only thing that changes state, and what is written down about it."""

from dataclasses import dataclass, field

from lifecycle.finish import Ending
from lifecycle.states import TERMINAL, Event, State, next_state
from lifecycle.usage import Timings, Usage


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """Names one try at serving a request."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Transition:
    """One entered state, with the wall clock in seconds since the epoch of the process that wrote it.

    `detail` is what else is known: the members of a ticket, the closed label of what was lost.
    """

    state: State
    event: Event | None
    at: float
    attempt: int
    detail: str = ""


@dataclass(slots=True)
class RequestRecord:
    """What is known about one request. `advance` is the only writer of `state`.

    decode_incarnation: which process of the decode member has the seat; kept so that another router can find it.
    detach_s: how long it may run without a reader, in seconds; None ends it when the last reader leaves.
    rpc_bound: whether its overall clock is the deadline of the call that it came with.
    final_only: whether its output is told with its end alone, so that an end that is told without it is not the whole end.
    adapter: name of the one asked for; empty: none.
    terminal_sequence_no: number of the Completed event, known at the end; None when the router that knew it is lost.
    """

    request_id: str
    tenant: str
    model: str
    model_snapshot: str
    fingerprint: str
    priority: int
    router: str
    traceparent: str
    created_at: float
    attempt: int = 1
    state: State = State.CREATED
    prefill_member: str = ""
    decode_member: str = ""
    decode_incarnation: str = ""
    detach_s: float | None = None
    rpc_bound: bool = False
    final_only: bool = False
    adapter: str = ""
    transitions: list[Transition] = field(default_factory=list)
    ending: Ending | None = None
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    sent_bytes: int = 0
    held_bytes: int = 0
    cancel_requested_at: float | None = None
    cancel_observed_at: float | None = None
    cancel_effective_at: float | None = None
    cancel_reason: str = ""
    released: dict[str, int] = field(default_factory=dict)
    terminal_sequence_no: int | None = None

    def __post_init__(self) -> None:
        if not self.transitions:
            self.transitions.append(Transition(self.state, None, self.created_at, self.attempt))

    def advance(self, event: Event, at: float, detail: str = "") -> State:
        """Follow the table's edge for `event` at wall time `at`; returns the new state. Raises IllegalTransition."""
        self.state = next_state(self.state, event)
        self.transitions.append(Transition(self.state, event, at, self.attempt, detail))
        return self.state

    @property
    def ended(self) -> bool:
        """Whether the state is terminal."""
        return self.state in TERMINAL

    @property
    def counted(self) -> bool:
        """Whether `usage` is what happened: who ended it in the name of a lost router knows only what that one last wrote."""
        return not self.ended or self.terminal_sequence_no is not None
