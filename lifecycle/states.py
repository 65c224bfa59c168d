"""The one table of states and events. The Redis scripts get the same table; the picture in the docs is drawn from it."""

from enum import Enum


class State(Enum):
    """Where a request is. The order of members means nothing."""

    CREATED = "created"
    QUEUED = "queued"
    ADMITTED = "admitted"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    DRAINING = "draining"
    CANCEL_REQUESTED = "cancel_requested"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Event(Enum):
    """What can happen to a request."""

    ACCEPTED = "accepted"
    TICKET = "ticket"
    SENT = "sent"
    REFUSED = "refused"
    COMMITTED = "committed"
    PREFILL_LOST = "prefill_lost"
    DECODE_LOST = "decode_lost"
    STOPPED = "stopped"
    DELIVERED = "delivered"
    CANCEL = "cancel"
    RELEASED = "released"
    FAIL = "fail"


TERMINAL: frozenset[State] = frozenset({State.FINISHED, State.CANCELLED, State.FAILED})

TABLE: dict[tuple[State, Event], State] = {
    (State.CREATED, Event.ACCEPTED): State.QUEUED,
    (State.CREATED, Event.CANCEL): State.CANCEL_REQUESTED,
    (State.CREATED, Event.FAIL): State.FAILED,
    (State.QUEUED, Event.TICKET): State.ADMITTED,
    (State.QUEUED, Event.CANCEL): State.CANCEL_REQUESTED,
    (State.QUEUED, Event.FAIL): State.FAILED,
    (State.ADMITTED, Event.SENT): State.PREFILLING,
    (State.ADMITTED, Event.REFUSED): State.QUEUED,
    (State.ADMITTED, Event.CANCEL): State.CANCEL_REQUESTED,
    (State.ADMITTED, Event.FAIL): State.FAILED,
    (State.PREFILLING, Event.COMMITTED): State.DECODING,
    (State.PREFILLING, Event.PREFILL_LOST): State.ADMITTED,
    (State.PREFILLING, Event.DECODE_LOST): State.ADMITTED,
    (State.PREFILLING, Event.CANCEL): State.CANCEL_REQUESTED,
    (State.PREFILLING, Event.FAIL): State.FAILED,
    (State.DECODING, Event.STOPPED): State.DRAINING,
    (State.DECODING, Event.DECODE_LOST): State.ADMITTED,
    (State.DECODING, Event.CANCEL): State.CANCEL_REQUESTED,
    (State.DECODING, Event.FAIL): State.FAILED,
    (State.DRAINING, Event.DELIVERED): State.FINISHED,
    (State.DRAINING, Event.CANCEL): State.CANCEL_REQUESTED,
    (State.DRAINING, Event.FAIL): State.FAILED,
    (State.CANCEL_REQUESTED, Event.RELEASED): State.CANCELLED,
    (State.CANCEL_REQUESTED, Event.FAIL): State.FAILED,
}


class IllegalTransition(Exception):
    """An event that the state has no edge for. Nothing was changed."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"state {state.value} has no edge for event {event.value}")
        self.state = state
        self.event = event


def next_state(state: State, event: Event) -> State:
    """The state that `event` leads to from `state`. Raises IllegalTransition when the table has no such edge."""
    try:
        return TABLE[state, event]
    except KeyError:
        raise IllegalTransition(state, event) from None
