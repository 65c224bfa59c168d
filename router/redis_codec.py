"""Records, reservations and replies as the scripts read and write them. Pure.

A record is a hash of strings. Times are `repr` of the float, so that they come back exactly; an empty string is "none".
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import RequestRecord, Transition
from lifecycle.states import Event, State
from lifecycle.usage import Timings, Usage
from router.budget import Budget, Claim, Resource, Scope, Shortage
from router.placement import Placement
from router.store import CancelFlag, Reservations, WriteOutcome, WriteResult

#: Transitions kept of a record, the newest ones.
MAX_TRANSITIONS = 64

_IDLE = frozenset({State.CREATED, State.QUEUED, State.FINISHED, State.CANCELLED, State.FAILED})


def _time(at: float | None) -> str:
    return "" if at is None else repr(at)


def _text(value: Any) -> str:
    """JSON, by the quickest encoder there is: every request waits for these before its first token."""
    return msgspec.json.encode(value).decode()


def _optional_time(text: str) -> float | None:
    return float(text) if text else None


def ending_text(ending: Ending | None) -> str:
    """An ending as a record keeps it; the empty text for None."""
    return "" if ending is None else _text(ending)


def ending_from_text(text: str) -> Ending | None:
    """An ending as a record keeps it; None for the empty text."""
    return msgspec.json.decode(text, type=Ending) if text else None


def steps_text(transitions: Sequence[Transition]) -> str:
    """Transitions as a JSON list of [state, event, time, attempt, detail], the newest MAX_TRANSITIONS of them."""
    return _text(
        [
            [step.state.value, step.event.value if step.event else "", repr(step.at), step.attempt, step.detail]
            for step in transitions[-MAX_TRANSITIONS:]
        ]
    )


def fields(record: RequestRecord, revision: int) -> dict[str, str]:
    """The hash of a record, without what only the store writes (holds, who created it)."""
    return {
        "request_id": record.request_id,
        "tenant": record.tenant,
        "model": record.model,
        "model_snapshot": record.model_snapshot,
        "fingerprint": record.fingerprint,
        "priority": str(record.priority),
        "router": record.router,
        "traceparent": record.traceparent,
        "created_at": repr(record.created_at),
        "attempt": str(record.attempt),
        "state": record.state.value,
        "prefill_member": record.prefill_member,
        "decode_member": record.decode_member,
        "decode_incarnation": record.decode_incarnation,
        "rpc_bound": "1" if record.rpc_bound else "",
        "final_only": "1" if record.final_only else "",
        "adapter": record.adapter,
        "detach_s": "" if record.detach_s is None else repr(record.detach_s),
        "transitions": steps_text(record.transitions),
        "ending": ending_text(record.ending),
        "usage": _text(record.usage),
        "timings": _text(record.timings),
        "sent_bytes": str(record.sent_bytes),
        "held_bytes": str(record.held_bytes),
        "cancel_requested_at": _time(record.cancel_requested_at),
        "cancel_observed_at": _time(record.cancel_observed_at),
        "cancel_effective_at": _time(record.cancel_effective_at),
        "cancel_reason": record.cancel_reason,
        "released": _text(record.released),
        "terminal_sequence_no": "" if record.terminal_sequence_no is None else str(record.terminal_sequence_no),
        "revision": str(revision),
    }


def copy_text(record: RequestRecord, revision: int) -> str:
    """The owner's copy, as an argument of a script."""
    return _text({"fields": fields(record, revision), "phase": phase(record)})


def record_from_fields(stored: Mapping[str, str]) -> RequestRecord:
    """A record from its hash."""
    record = RequestRecord(
        request_id=stored["request_id"],
        tenant=stored["tenant"],
        model=stored["model"],
        model_snapshot=stored["model_snapshot"],
        fingerprint=stored["fingerprint"],
        priority=int(stored["priority"]),
        router=stored["router"],
        traceparent=stored["traceparent"],
        created_at=float(stored["created_at"]),
        attempt=int(stored["attempt"]),
        state=State(stored["state"]),
        prefill_member=stored["prefill_member"],
        decode_member=stored["decode_member"],
        decode_incarnation=stored.get("decode_incarnation", ""),
        detach_s=_optional_time(stored.get("detach_s", "")),
        rpc_bound=bool(stored.get("rpc_bound", "")),
        final_only=bool(stored.get("final_only", "")),
        adapter=stored.get("adapter", ""),
        transitions=[_transition(step) for step in msgspec.json.decode(stored["transitions"])],
        ending=ending_from_text(stored["ending"]),
        usage=msgspec.json.decode(stored["usage"], type=Usage),
        timings=msgspec.json.decode(stored["timings"], type=Timings),
    )
    record.sent_bytes = int(stored["sent_bytes"])
    record.held_bytes = int(stored["held_bytes"])
    record.cancel_requested_at = _optional_time(stored["cancel_requested_at"])
    record.cancel_observed_at = _optional_time(stored["cancel_observed_at"])
    record.cancel_effective_at = _optional_time(stored["cancel_effective_at"])
    record.cancel_reason = stored["cancel_reason"]
    record.released = msgspec.json.decode(stored["released"])
    terminal = stored.get("terminal_sequence_no", "")
    record.terminal_sequence_no = int(terminal) if terminal else None
    return record


def _transition(step: Sequence[Any]) -> Transition:
    """One step; routers of before wrote none of the details, which come last."""
    state, event, at, attempt, *detail = step
    return Transition(State(state), Event(event) if event else None, float(at), attempt, *detail)


def phase(record: RequestRecord) -> str:
    """What the record's attempt may hold now: "nothing", "pages" (the hand-over has committed) or "everything"."""
    states = [step.state for step in record.transitions if step.attempt == record.attempt]
    if record.state is State.CANCEL_REQUESTED:
        before = [state for state in states if state is not State.CANCEL_REQUESTED]
        if not before or before[-1] in _IDLE:
            return "nothing"
    elif record.state in _IDLE:
        return "nothing"
    return "pages" if State.DECODING in states else "everything"


def copied(record: RequestRecord) -> RequestRecord:
    """An independent copy of a record: transitions and `released` are its own."""
    return replace(record, transitions=list(record.transitions), released=dict(record.released))


def cancelled_at_once(record: RequestRecord) -> RequestRecord:
    """The record as it ends when a cancel came before it: no work was done."""
    ended = copied(record)
    ended.advance(Event.CANCEL, record.created_at)
    ended.advance(Event.RELEASED, record.created_at)
    ended.ending = Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL)
    ended.cancel_observed_at = ended.cancel_effective_at = record.created_at
    ended.terminal_sequence_no = 0
    return ended


def claims_text(claims: Sequence[Claim], *, tokens: bool = True) -> str:
    """Claims as an argument of a script; without `tokens` those of token budgets are left out."""
    kept = [claim for claim in claims if tokens or claim.budget.resource is not Resource.TOKENS]
    if len({claim.budget for claim in kept}) != len(kept):
        raise ValueError("claims of one attempt must name each budget once")
    return _text([{"label": claim.budget.label, "amount": claim.amount, "limit": claim.limit} for claim in kept])


def budget_from_label(label: str) -> Budget:
    """The budget that a label names."""
    resource, scope, name = label.split(":", 2)
    return Budget(Resource(resource), Scope(scope), name)


def holds_of(record: RequestRecord, holds: Sequence[tuple[str, int, int]]) -> Reservations | None:
    """What the record's attempt holds, from (budget label, attempt, units); None when it is nothing."""
    claims = tuple(Claim(budget_from_label(label), units, units) for label, attempt, units in holds if attempt == record.attempt)
    return Reservations(Placement(record.decode_member, record.prefill_member), claims) if claims else None


def write_result(reply: Mapping[str, Any]) -> WriteResult:
    """What a script answered to a write."""
    short = reply.get("shortage")
    requested_at = _optional_time(reply.get("cancel_requested_at", ""))
    return WriteResult(
        outcome=WriteOutcome(reply["outcome"]),
        state=State(reply["state"]) if reply.get("state") else None,
        attempt=int(reply.get("attempt", 0)),
        cancel=None if requested_at is None else CancelFlag(requested_at, reply["cancel_reason"]),
        ending=ending_from_text(reply.get("ending", "")),
        shortage=None
        if short is None
        else Shortage(budget_from_label(short["label"]), int(short["wanted"]), int(short["taken"]), int(short["limit"])),
    )


def checked_id(request_id: str) -> str:
    """An id that can be part of key and field names. Raises ValueError."""
    if not request_id or "\x1f" in request_id:
        raise ValueError("request_id must not be empty nor contain control characters")
    return request_id
