"""Copies of a record around a write to the store: as it will be, and what is taken over of it when it was. Pure."""

from lifecycle.record import RequestRecord
from lifecycle.states import Event, State
from router.redis_codec import copied
from router.store import Reservations, WriteResult


def placed(record: RequestRecord, holds: Reservations, at: float) -> RequestRecord:
    """A queued record as it is once admitted there."""
    granted = copied(record)
    placement = holds.placement
    members = [
        f"decode={placement.decode_member}",
        *([f"prefill={placement.prefill_member}"] if placement.prefill_member else []),
    ]
    granted.advance(Event.TICKET, at, " ".join(members))
    granted.decode_member = placement.decode_member
    granted.prefill_member = placement.prefill_member
    return granted


def requeued(record: RequestRecord, event: Event, at: float, detail: str = "") -> RequestRecord:
    """A record at its next attempt after `event` (REFUSED, PREFILL_LOST or DECODE_LOST), queued, without members."""
    short = copied(record)
    short.attempt += 1
    short.prefill_member = short.decode_member = short.decode_incarnation = ""
    if short.advance(event, at, detail) is not State.QUEUED:
        short.advance(Event.REFUSED, at)
    return short


def replaced(record: RequestRecord, event: Event, holds: Reservations, at: float, detail: str = "") -> RequestRecord:
    """A record at its next attempt after `event`, admitted at other members at once."""
    if event is Event.REFUSED:
        return placed(requeued(record, event, at, detail), holds, at)
    granted = copied(record)
    granted.attempt += 1
    granted.advance(event, at, detail)
    granted.decode_incarnation = ""
    granted.decode_member = holds.placement.decode_member
    granted.prefill_member = holds.placement.prefill_member
    return granted


def become(record: RequestRecord, other: RequestRecord) -> None:
    """Take over state, attempt, members and transitions; `other` grew out of `record`."""
    known = len(record.transitions)
    record.attempt = other.attempt
    record.state = other.state
    record.transitions.extend(other.transitions[known:])
    record.decode_member = other.decode_member
    record.decode_incarnation = other.decode_incarnation
    record.prefill_member = other.prefill_member


def learn(record: RequestRecord, result: WriteResult) -> None:
    """The owner's copy learns of a cancel that another router noted."""
    if result.cancel is not None and record.cancel_requested_at is None:
        record.cancel_requested_at = result.cancel.requested_at
        record.cancel_reason = result.cancel.reason
