"""What a terminal state means for the RPC: the table "How requests end" as code."""

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import RequestRecord
from lifecycle.states import State
from router.queue import QueueFull
from rpc.details import Quota, Resource
from rpc.status import (
    StatusError,
    already_exists,
    cancelled,
    deadline_exceeded,
    internal,
    resource_exhausted,
    slow_consumer,
    unavailable,
)

#: Reasons of refusals at the door, by the label under which they are counted.
REFUSAL_LABELS = {
    "QUEUE_FULL": "queue_full",
    "QUEUE_TOKENS_FULL": "queue_tokens_full",
    "TENANT_QUEUE_FULL": "tenant_limit",
    "TOKENISER_BUSY": "queue_full",
    "NO_MEMBER": "no_member",
    "STORE_UNAVAILABLE": "store_away",
    "DRAINING": "draining",
    "UNKNOWN_MODEL": "unknown_model",
    "IDEMPOTENCY_KEY_REUSED": "id_conflict",
    "REQUEST_IN_FLIGHT": "id_conflict",
    "REQUEST_ENDED": "id_conflict",
}
_QUEUE_REASONS = {
    "max_requests": ("QUEUE_FULL", "requests"),
    "max_tokens": ("QUEUE_TOKENS_FULL", "tokens"),
    "max_tenant_requests": ("TENANT_QUEUE_FULL", "requests"),
}
#: What a client that was refused for want of room is told to wait.
RETRY_AFTER_S = 1.0


def status_of(record: RequestRecord) -> StatusError | None:
    """The status after the terminal event of a record that has ended; None is OK."""
    ending = record.ending or Ending(FinishReason.TRANSPORT_ERROR)
    if record.state is State.CANCELLED:
        return cancelled(f"request {record.request_id!r} was cancelled", _label(ending.cause) or "CANCELLED")
    if ending.reason is FinishReason.DEADLINE_EXCEEDED:
        if record.state is State.FINISHED and ending.cause is not Cause.RPC_DEADLINE:
            return None
        clock = ending.cause.value.replace("_", " ") or "deadline"
        return deadline_exceeded(f"request {record.request_id!r}: {clock}", _label(ending.cause) or "DEADLINE_EXCEEDED")
    if record.state is State.FINISHED:
        return None
    return _failure(record.request_id, ending)


def _failure(request_id: str, ending: Ending) -> StatusError:
    if ending.reason is FinishReason.MODEL_ERROR or ending.cause is Cause.ROUTER_LOST:
        return internal(request_id)
    if ending.reason is FinishReason.SLOW_CONSUMER:
        return slow_consumer(f"request {request_id!r}: its reader did not keep up")
    what = ending.cause.value.replace("_", " ") or "transport error"
    return unavailable(f"request {request_id!r}: {what}", _label(ending.cause) or "TRANSPORT_ERROR")


def repeated(record: RequestRecord, *, same_body: bool) -> StatusError:
    """Why an id that is known cannot be used again: another body, still in work, or over."""
    resource = Resource("request", record.request_id)
    if not same_body:
        message = f"request_id {record.request_id!r} was used before with another body; choose a new one"
        return already_exists(resource, "IDEMPOTENCY_KEY_REUSED", message)
    if record.ended:
        message = f"request {record.request_id!r} has ended ({record.state.value}); Get has its record"
        return already_exists(resource, "REQUEST_ENDED", message)
    message = f"request {record.request_id!r} is in work ({record.state.value}); Get shows it, Cancel ends it"
    return already_exists(resource, "REQUEST_IN_FLIGHT", message)


def queue_full(full: QueueFull, tenant: str) -> StatusError:
    """There is no room to wait in."""
    reason, unit = _QUEUE_REASONS[full.limit]
    subject = f"tenant:{tenant}" if full.limit == "max_tenant_requests" else "cell"
    description = f"waiting {unit} are at the limit of {full.bound}"
    return resource_exhausted(
        f"the queue is full: {description}; try again",
        reason,
        retry_after_s=RETRY_AFTER_S,
        quotas=[Quota(subject, description, f"queue_{unit}", full.limit, full.bound)],
    )


def no_member() -> StatusError:
    """The pools have nobody who takes work."""
    return unavailable("no decode member, or no prefill member, takes work now; try again", "NO_MEMBER")


def _label(cause: Cause) -> str:
    return cause.value.upper()
