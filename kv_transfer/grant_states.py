"""The life of a grant, once for each side: states, events, one table each. An illegal event raises and changes nothing."""

from enum import Enum
from typing import TypeVar

from kv_transfer.offer import HandoverError


class ReaderState(Enum):
    """A grant at the member that offered the pages."""

    OFFERED = "offered"
    COMMITTED = "committed"
    REVOKING = "revoking"
    QUARANTINED = "quarantined"
    RECLAIMED = "reclaimed"


class ReaderEvent(Enum):
    """What can happen to a grant at the reader."""

    FILLED = "filled"
    REVOKE = "revoke"
    UNANSWERED = "unanswered"
    DRAINED = "drained"
    FENCED = "fenced"


READER_TABLE: dict[tuple[ReaderState, ReaderEvent], ReaderState] = {
    (ReaderState.OFFERED, ReaderEvent.FILLED): ReaderState.COMMITTED,
    (ReaderState.OFFERED, ReaderEvent.REVOKE): ReaderState.REVOKING,
    (ReaderState.OFFERED, ReaderEvent.FENCED): ReaderState.RECLAIMED,
    (ReaderState.REVOKING, ReaderEvent.REVOKE): ReaderState.REVOKING,
    (ReaderState.REVOKING, ReaderEvent.UNANSWERED): ReaderState.QUARANTINED,
    (ReaderState.REVOKING, ReaderEvent.DRAINED): ReaderState.RECLAIMED,
    (ReaderState.REVOKING, ReaderEvent.FENCED): ReaderState.RECLAIMED,
    (ReaderState.QUARANTINED, ReaderEvent.REVOKE): ReaderState.QUARANTINED,
    (ReaderState.QUARANTINED, ReaderEvent.UNANSWERED): ReaderState.QUARANTINED,
    (ReaderState.QUARANTINED, ReaderEvent.DRAINED): ReaderState.RECLAIMED,
    (ReaderState.QUARANTINED, ReaderEvent.FENCED): ReaderState.RECLAIMED,
}

READER_TERMINAL = frozenset({ReaderState.COMMITTED, ReaderState.RECLAIMED})


class WriterState(Enum):
    """A grant at the member that fills the pages."""

    ACCEPTED = "accepted"
    WRITING = "writing"
    COMMITTED = "committed"
    DRAINING = "draining"
    DRAINED = "drained"


class WriterEvent(Enum):
    """What can happen to a grant at the writer."""

    BEGIN = "begin"
    ALL_SENT = "all_sent"
    STOP = "stop"
    IDLE = "idle"


WRITER_TABLE: dict[tuple[WriterState, WriterEvent], WriterState] = {
    (WriterState.ACCEPTED, WriterEvent.BEGIN): WriterState.WRITING,
    (WriterState.ACCEPTED, WriterEvent.STOP): WriterState.DRAINING,
    (WriterState.WRITING, WriterEvent.ALL_SENT): WriterState.COMMITTED,
    (WriterState.WRITING, WriterEvent.STOP): WriterState.DRAINING,
    (WriterState.DRAINING, WriterEvent.STOP): WriterState.DRAINING,
    (WriterState.DRAINING, WriterEvent.IDLE): WriterState.DRAINED,
}

WRITER_TERMINAL = frozenset({WriterState.COMMITTED, WriterState.DRAINED})

S = TypeVar("S", ReaderState, WriterState)
E = TypeVar("E", ReaderEvent, WriterEvent)


class IllegalGrantEvent(HandoverError):
    """An error of programming: an event that the grant's state has no edge for, or a part that cannot be. Nothing was changed."""

    def __init__(self, grant_id: str, state: str, event: str) -> None:
        super().__init__(f"grant {grant_id} in state {state} cannot take {event}")
        self.grant_id = grant_id


def step(table: dict[tuple[S, E], S], grant_id: str, state: S, event: E) -> S:
    """The state that `event` leads to. Raises IllegalGrantEvent when the table has no such edge."""
    try:
        return table[state, event]
    except KeyError:
        raise IllegalGrantEvent(grant_id, state.value, event.value) from None


class GrantsFull(HandoverError):
    """The bound on open grants is met."""

    def __init__(self, bound: int) -> None:
        super().__init__(f"all {bound} open grants are in use: try again when some have ended, or raise grants_max")
        self.bound = bound


class DuplicateGrant(HandoverError):
    """A grant id that was used before."""

    def __init__(self, grant_id: str, state: str) -> None:
        super().__init__(f"grant {grant_id} is known already ({state}): an id is never used twice")
        self.grant_id = grant_id
        self.state = state
